"""What came from outside (NATS, HTTP, files, models) as text with which a terminal does nothing but show it."""

from __future__ import annotations

import logging
from typing import Any


def printable(text: object) -> str:
    """`text` in one line. What is not seen as it stands (control characters and terminal escapes, line ends, bidi
    marks, lone surrogates) is escaped as in Python's literals."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


class PrintableFormatter(logging.Formatter):
    """Messages and tracebacks that may hold what came from outside; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(map(printable, super().formatException(ei).split("\n")))
