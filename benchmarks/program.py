"""A benchmark's command line, from which its rows go to a file."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from validation.results import Results, command

FOLDER = Path("benchmarks/results")


def parser_of(description: str | None, default: Path | None = None) -> argparse.ArgumentParser:
    """Return a parser of the argument that every benchmark takes; `default` is where rows go without it."""
    parser = argparse.ArgumentParser(prog=command(()), description=description)
    shown = "write the rows to DIR/<benchmark>.json" + (f" (default: {default})" if default else "")
    parser.add_argument("--json", type=Path, metavar="DIR", help=shown)
    return parser


class Count(NamedTuple):
    """A number of the command line: fewer than `full` are a dry run."""

    name: str
    full: int
    help: str


def run_counted(
    parts: Mapping[str, Callable[..., None]],
    description: str | None,
    counts: Sequence[Count],
    arguments: Sequence[str] | None = None,
    **more: Mapping[str, Any],
) -> None:
    """Run a benchmark without a card: call each part with the command line's counts and its rows, print the rows and
    write them to a file of the part's name. `more` options, with `add_argument`'s keywords, go to parts by name."""
    parser = parser_of(description)
    for name, described in more.items():
        parser.add_argument(f"--{name}", **described)
    for each in counts:
        shown = f"{each.help}; fewer than {each.full} are a dry run"
        parser.add_argument(f"--{each.name}", type=int, default=each.full, help=shown)
    options = vars(parser.parse_args(arguments))
    for each in counts:
        if options[each.name] < 1:
            parser.error(f"--{each.name} {options[each.name]} is too few; at least 1 is needed")
    for benchmark, run in parts.items():
        rows = Results(arguments, "cpu", dry=any(options[each.name] < each.full for each in counts))
        run(*(options[each.name] for each in counts), rows, **{name: options[name] for name in more})
        rows.write(options["json"], benchmark, FOLDER / str(rows.measured.machine["name"]))


def seconds(call: Callable[..., object], *arguments: object) -> float:
    """Return the wall time of one call."""
    began = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began
