"""How long one lookup may work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Deadline:
    """`milliseconds` of work from now on, in processor time of this thread.

    Time in which the thread waits for a processor or for the interpreter does not count: a lookup given up would not
    bring it back, and the request would lose its reuse to another thread's work.
    """

    __slots__ = ("_clock", "_end")

    def __init__(self, milliseconds: float, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._end = clock() + milliseconds / 1000

    @property
    def is_over(self) -> bool:
        return self._clock() > self._end
