"""`semblend-trt SUBCOMMAND`: every other module of this folder is a subcommand of its name, with hyphens. So is what an
installed package names as an entry point of the group `semblend_trt.cli`.

Such a module has SUMMARY (one line for the list of subcommands), `configure(parser)`, which adds its arguments, and
`run(arguments)`, which returns the exit status. It imports what is heavy in `run`.
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Any

import semblend_trt
from semblend_trt import cli
from semblend_trt.command_line import ended
from semblend_trt.errors import ConfigurationError

# Entry points of this group are the subcommands of the floors above, which this one cannot import.
_PLUGGED = "semblend_trt.cli"
# Subcommands that are gone, and what replaced them.
_GONE = {
    "router": "the router is gone: gateways place requests now, LiteLLM by the callback "
    "semblend_trt.fleet.litellm.placement, NVIDIA Dynamo by `python -m semblend_trt.fleet.dynamo` and others by the "
    "library semblend_trt.fleet.placement; docs/fleet.md shows how"
}


def subcommands() -> list[str]:
    modules = {module.name for module in pkgutil.iter_modules(cli.__path__) if not module.name.startswith("_")}
    names = {name.replace("_", "-") for name in modules - {"main"}}
    return sorted(names | metadata.entry_points(group=_PLUGGED).names)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Return its status, or that of `command_line.ended`."""
    words = list(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        if words and words[0] in _GONE:
            raise ConfigurationError(_GONE[words[0]])
        arguments = _parser(words).parse_args(words)
        return int(arguments.run(arguments))

    return ended("semblend-trt", run)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser. It imports only the subcommand that `words` begin with, or all where they name none."""
    parser = argparse.ArgumentParser(prog="semblend-trt", description=semblend_trt.__doc__)
    parsers = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    known, plugged, own = subcommands(), metadata.entry_points(group=_PLUGGED), f"{cli.__name__}.{{}}"
    for name in [words[0]] if words and words[0] in known else known:
        is_own = name not in plugged.names
        module: Any = import_module(own.format(name.replace("-", "_"))) if is_own else plugged[name].load()
        subparser = parsers.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        module.configure(subparser)
        subparser.set_defaults(run=module.run)
    return parser
