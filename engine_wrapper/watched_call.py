"""Notices calls of an engine by which weights may be written or its prefix cache emptied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class WatchedCall:
    """In the place of one method of one object: calls `after(result, *arguments)` when the method has ended.

    The result is None if the method has raised: what it was to write may be written in part.
    """

    def __init__(self, owner: Any, name: str, after: Callable[..., None]) -> None:
        """Raises AttributeError if the owner has no such method."""
        self._owner, self._name, self._after = owner, name, after
        self._stock: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, self._call)

    def remove(self) -> None:
        """Leave the owner as it was found."""
        vars(self._owner).pop(self._name, None)

    def _call(self, *arguments: Any, **options: Any) -> Any:
        result = None
        try:
            result = self._stock(*arguments, **options)
        finally:
            self._after(result, *arguments)
        return result
