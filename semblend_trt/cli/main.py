"""`semblend-trt SUBCOMMAND`: every other module of this folder is a subcommand of its name, with hyphens. So is what an
installed package names as an entry point of the group `semblend_trt.cli`.

Such a module has SUMMARY (one line for the list of subcommands), `configure(parser)`, which adds its arguments, and
`run(arguments)`, which returns the exit status. It imports what is heavy in `run`.
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

import semblend_trt
from semblend_trt import cli
from semblend_trt.command_line import ended

if TYPE_CHECKING:
    from collections.abc import Sequence


def subcommands() -> list[str]:
    """Return the subcommands' names, sorted."""
    modules = {module.name for module in pkgutil.iter_modules(cli.__path__) if not module.name.startswith("_")}
    names = {name.replace("_", "-") for name in modules - {"main"}}
    return sorted(names | _plugged().keys())


def _plugged() -> dict[str, metadata.EntryPoint]:
    """The subcommands of the floors above, which this one cannot import."""
    return {point.name: point for point in metadata.entry_points(group="semblend_trt.cli")}


def _module_of(name: str) -> Any:
    return import_module(f"{cli.__name__}.{name.replace('-', '_')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Return its status, or that of `command_line.ended`."""
    words = list(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        arguments = _parser(words).parse_args(words)
        return int(arguments.run(arguments))

    return ended("semblend-trt", run)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser. It imports only the subcommand that `words` begin with, or all where they name none."""
    parser = argparse.ArgumentParser(prog="semblend-trt", description=semblend_trt.__doc__)
    parsers = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    known, plugged = subcommands(), _plugged()
    for name in [words[0]] if words and words[0] in known else known:
        module: Any = plugged[name].load() if name in plugged else _module_of(name)
        subparser = parsers.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        module.configure(subparser)
        subparser.set_defaults(run=module.run)
    return parser
