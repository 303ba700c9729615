"""FairLock: a lock that a thread which waits gets before one that asks again at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class FairLock:
    """A lock for a `with` statement.

    `threading.Lock` goes to who is running. A thread that takes it in a loop runs, and who waits wakes too late, many
    times in a row. Here who waits holds the turn meanwhile, so that nobody else can ask.
    """

    def __init__(self) -> None:
        self._turn, self._lock = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._turn:
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
