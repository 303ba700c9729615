"""How every command ends, and the type of an argument that is a name."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING

from semblend_trt.errors import SemBlendError
from semblend_trt.printable import PrintableFormatter, printable

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

USAGE_ERROR = 2
INTERRUPTED = 130
READER_GONE = 141


def ended(program: str, run: Callable[[], int]) -> int:
    """Runs a command and returns its status: 2 after an error, 130 after an interrupt, 141 when the reader of its
    output has gone. An unforeseen error leaves its traceback too."""
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
    """A name for an argument parser. Raises ArgumentTypeError for one that is empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; give one, or leave the option out")
    return text
