"""One thread that runs calls in order."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Background:
    """Runs calls one after another on a daemon thread: a disk that never answers must not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def drain(self) -> None:
        """Waits until everything that was submitted has run."""
        done = threading.Event()
        self._calls.put(done.set)
        done.wait()

    def close(self, seconds: float) -> bool:
        """Runs what was submitted and ends. False when that takes longer than `seconds`; the thread then goes on
        alone."""
        self._calls.put(None)
        if threading.current_thread() is self._thread:
            return True  # a finaliser, which may run anywhere; the thread ends by itself
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                logger.exception("a call in the background failed")
            del call  # or an idle thread would keep alive what its last call refers to
