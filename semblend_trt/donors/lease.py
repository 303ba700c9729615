"""Lease: one reader's hold on one donor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Lease:
    """Keeps one donor from being dropped until `release`. Releasing twice is once."""

    def __init__(self, donor_id: str, end: Callable[[Lease], None]) -> None:
        """`end` is called by every release; it asks `released` and calls `ended` under its owner's lock."""
        self.donor_id = donor_id
        self._end = end
        self._released = False

    @property
    def released(self) -> bool:
        return self._released

    def release(self) -> None:
        self._end(self)

    def ended(self) -> None:
        """Marks the lease as released."""
        self._released = True
