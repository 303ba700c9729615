"""Work beside serving: a thread that runs calls in order, and a filter for the warnings that such work repeats."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0


class Background:
    """Runs calls one after another on a daemon thread: a disk that never answers must not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def drain(self) -> None:
        """Wait until everything that was submitted has run."""
        done = threading.Event()
        self._calls.put(done.set)
        done.wait()

    def close(self, seconds: float) -> bool:
        """Run what was submitted and end. Return False after `seconds`; the thread then goes on alone."""
        self._calls.put(None)
        if threading.current_thread() is self._thread:
            return True  # a finaliser may run on any thread; this one ends by itself
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                logger.exception("a call in the background failed")
            del call  # or an idle thread would keep alive what its last call refers to


class OnceAMinute(logging.Filter):
    """Logs a warning or error of one kind once a minute, with the number of records left out since. A kind is a line of
    code with the exceptions that it names, by type and errno: a donor's name makes no new kind."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # When a record of the kind was last logged, and how many were left out since.
        self._kinds: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        named = [*(record.args or ()), record.exc_info and record.exc_info[1]]
        failures = [(type(each), getattr(each, "errno", None)) for each in named if isinstance(each, BaseException)]
        kind, now = (record.pathname, record.lineno, *failures), self._clock()
        shown, left_out = self._kinds.get(kind, (None, 0))
        if shown is not None and now - shown < QUIET_SECONDS:
            self._kinds[kind] = (shown, left_out + 1)
            return False
        self._kinds[kind] = (now, 0)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (and {left_out} more like it since it was last said)", ()
        return True


def quiet_logger(name: str) -> logging.Logger:
    """Return a module's logger, which repeats a warning or error once a minute."""
    logger = logging.getLogger(name)
    logger.addFilter(OnceAMinute())
    return logger
