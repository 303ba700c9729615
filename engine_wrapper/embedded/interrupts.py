"""Ctrl-C that waits until what is under way is whole."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


class _Hold:
    """A handler that keeps the first interrupt and hands further ones on."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._first: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._first is not None:
            self._handler(number, frame)
        self._first = number, frame

    def end(self) -> None:
        signal.signal(signal.SIGINT, self._handler)
        if self._first is not None:
            self._handler(*self._first)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Answers an interrupt that comes inside the block at its end (the outermost one's), and a second one at once.

    Python interrupts the main thread only; elsewhere nothing is held.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if handler is None or isinstance(handler, (int, _Hold)):
        yield
        return
    hold = _Hold(handler)
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        hold.end()
