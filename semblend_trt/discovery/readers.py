"""Which version of the index each lookup in progress reads, so that nothing it may see is used again too early."""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

State = TypeVar("State")


class Readers(Generic[State]):
    """The published state, its version, and who reads which. A lookup keeps those with which it began."""

    def __init__(self, state: State) -> None:
        self._lock = threading.Lock()
        self._version = 0
        self._state = state
        self._active: dict[int, int] = {}
        self._tickets = itertools.count()

    @property
    def version(self) -> int:
        """The version that a lookup would read now."""
        return self._version

    @property
    def state(self) -> State:
        """The state that a lookup would read now."""
        return self._state

    def advance(self, state: State | None = None) -> None:
        """Lookups that begin from now on read the next version, and `state` when one is given."""
        with self._lock:
            self._version += 1
            if state is not None:
                self._state = state

    def oldest(self) -> int:
        """The lowest version that a lookup in progress reads; the current one when there is none."""
        with self._lock:
            return min(self._active.values(), default=self._version)

    @contextmanager
    def reading(self) -> Iterator[tuple[State, int]]:
        """Holds the published state and its version for one lookup."""
        with self._lock:
            ticket = next(self._tickets)
            state, version = self._state, self._version
            self._active[ticket] = version
        try:
            yield state, version
        finally:
            with self._lock:
                del self._active[ticket]
