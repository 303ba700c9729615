"""Keeps warnings that repeat from filling a log."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

QUIET_SECONDS = 60.0
MAX_KINDS = 1024


class OnceAMinute(logging.Filter):
    """Logs a warning or error of one kind once a minute, with the number of records left out since.

    Records of one kind come from the same line of code with equal arguments and the same type of exception. Without
    `by_values` only the exceptions among the arguments count: a donor's name makes no new kind.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, by_values: bool = True) -> None:
        super().__init__()
        self._clock, self._by_values = clock, by_values
        # When a record of the kind was last logged, and how many were left out since.
        self._kinds: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        failure = record.exc_info[0] if record.exc_info else None
        told: object = record.args
        if not self._by_values:
            told = [(type(e), getattr(e, "errno", None)) for e in record.args or () if isinstance(e, Exception)]
        kind = (record.pathname, record.lineno, failure, str(told)[:256])
        now = self._clock()
        shown, left_out = self._kinds.get(kind, (None, 0))
        if shown is not None and now - shown < QUIET_SECONDS:
            self._kinds[kind] = (shown, left_out + 1)
            return False
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            self._kinds.pop(next(iter(self._kinds)))
        self._kinds[kind] = (now, 0)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (and {left_out} more like it since it was last said)", ()
        return True
