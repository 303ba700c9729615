"""Brings what SemBlend logs into vLLM's own log, with vLLM's level and time, and `semblend` before the message."""

from __future__ import annotations

import logging
from copy import copy

_FLOORS = ("engine_wrapper", "semblend_trt", "kernels")


class _IntoVllm(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        target = logging.getLogger("vllm")
        handlers = target.handlers
        if not handlers and not logging.getLogger().handlers and logging.lastResort is not None:
            handlers = [logging.lastResort]  # vLLM configures no logging, and the user neither
        own = copy(record)
        own.msg = f"semblend: {record.msg}"
        for handler in handlers if target.isEnabledFor(record.levelno) else ():
            if record.levelno >= handler.level:
                handler.handle(own)


_handler = _IntoVllm()


def log_into_vllm() -> None:
    """Have every line of the product's loggers, from INFO on, appear once in vLLM's log. A second call does nothing."""
    for floor in _FLOORS:
        logger = logging.getLogger(floor)
        logger.addHandler(_handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
