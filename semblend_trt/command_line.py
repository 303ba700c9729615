"""How every command ends, what it shows of text from outside, and the types of arguments: a name, a count."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from semblend_trt.errors import SemBlendError

logger = logging.getLogger(__name__)

USAGE_ERROR = 2
INTERRUPTED = 130
READER_GONE = 141


def printable(text: object) -> str:
    """Return `text` in one line; characters that do not print are escaped as in Python's literals."""
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


def ended(program: str, run: Callable[[], int]) -> int:
    """Run a command and return its status: 2 after an error, 130 after an interrupt, 141 when its reader has gone."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter())
    logging.basicConfig(handlers=[handler])
    try:
        return run()
    except KeyboardInterrupt:
        sentence, status = "interrupted", INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has enough; what is still buffered must not fail at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except (SemBlendError, OSError) as error:
        sentence, status = str(error), USAGE_ERROR
    except Exception as error:
        logger.exception("this is a defect of %s; please report it with these lines", program)
        sentence, status = f"it cannot go on: {type(error).__name__}: {error}", USAGE_ERROR
    sys.stderr.write(f"{program}: {printable(sentence)}\n")
    return status


def named(text: str) -> str:
    """Return a name for an argument parser. Raises ArgumentTypeError for an empty one."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; give one, or leave the option out")
    return text


def number_up_to(most: float, kind: str, text: str) -> float:
    """Return a number above 0 for an argument parser. Raises ArgumentTypeError for any other."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= most:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no {kind} above 0 and up to {most}")


def count(text: str) -> int:
    """Return a number for an argument parser. Raises ArgumentTypeError for one below 1."""
    with contextlib.suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
