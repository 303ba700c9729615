"""Text from outside (NATS, HTTP, files, models), escaped so that a terminal only shows it."""

from __future__ import annotations

import logging
from typing import Any


def printable(text: object) -> str:
    """`text` in one line. Characters that do not print (control characters, terminal escapes, line ends, bidi marks,
    lone surrogates) are escaped as in Python's literals."""
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
