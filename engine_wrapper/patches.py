"""Changes of one method of one object of an engine. Each is marked, refuses a second one, and is undone by a call."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # Leaves the engine as it was found; a second call does nothing.
    Undo = Callable[[], None]


class _Replacement:
    """What replaces a method, as a bound method of its own: of any other callable vLLM keeps the object for good, with
    its engine (`utils/func_utils.py`, `supports_kw`)."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def call(self, *arguments: Any, **options: Any) -> Any:
        return self._run(*arguments, **options)


class AlreadyPatchedError(RuntimeError):
    """A method that SemBlend has replaced is to be replaced once more."""


def replace_method(owner: Any, name: str, replacement: Callable[..., Any]) -> Undo:
    """Put `replacement` in the place of a method of `owner`. Raises AttributeError if it has no such method, and
    AlreadyPatchedError if the method is a replacement."""
    if isinstance(getattr(getattr(owner, name), "__self__", None), _Replacement):
        raise AlreadyPatchedError(f"{type(owner).__name__}.{name} is replaced already")
    own, held = _Replacement(replacement).call, vars(owner)
    had, before = name in held, held.get(name)
    setattr(owner, name, own)

    def undo() -> None:
        if held.get(name) is not own:
            return
        del held[name]
        if had:
            setattr(owner, name, before)

    return undo


@contextmanager
def replaced_method(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Do as `replace_method` until the block ends."""
    undo = replace_method(owner, name, replacement)
    try:
        yield
    finally:
        undo()


def watch_method(owner: Any, name: str, after: Callable[..., None]) -> Undo:
    """Have `after(result, *arguments)` called when a method of `owner` has ended, with None as the result if it raised,
    since it may have written in part."""
    stock = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        result = None
        try:
            result = stock(*arguments, **options)
        finally:
            after(result, *arguments)
        return result

    return replace_method(owner, name, call)
