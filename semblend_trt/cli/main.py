"""`semblend-trt SUBCOMMAND`: every other module of this folder is a subcommand of its name.

Such a module has SUMMARY (one line for the list of subcommands), `configure(parser)`, which adds its arguments, and
`run(arguments)`, which returns the exit status. It imports what is heavy in `run`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pkgutil
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import semblend_trt
from semblend_trt import cli
from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE_ERROR = 2
INTERRUPTED = 130


def subcommands() -> list[str]:
    """Names of the subcommands, sorted."""
    names = (module.name for module in pkgutil.iter_modules(cli.__path__))
    return sorted(name for name in names if name != "main" and not name.startswith("_"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Returns its status, 2 for bad usage and 130 when it was interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parser(words).parse_args(words)
        return int(arguments.run(arguments))
    except SemBlendError as error:
        sys.stderr.write(f"semblend-trt: {error}\n")
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has enough; what is still buffered must not fail at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser. Only the subcommand that `words` begin with is imported, or all where they name none."""
    parser = argparse.ArgumentParser(prog="semblend-trt", description=semblend_trt.__doc__)
    parsers = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    known = subcommands()
    for name in [words[0]] if words and words[0] in known else known:
        module: Any = import_module(f"{cli.__name__}.{name}")
        subparser = parsers.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        module.configure(subparser)
        subparser.set_defaults(run=module.run)
    return parser
