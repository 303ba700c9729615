"""What the benchmarks that need no card have in common: an argument, and how their rows are shown and written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from validation.benchmarks.ttft import Rows
from validation.machine import describe, slug, versions
from validation.results import Measured, today, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the argument that says where the rows go."""
    parser = argparse.ArgumentParser(prog=f"python -m validation.benchmarks.{name}", description=description)
    parser.add_argument("--json", type=Path, metavar="DIR", help="write the rows to DIR/<benchmark>.json")
    return parser


def record(
    name: str, folder: Path | None, options: Mapping[str, int], measure: Callable[[Rows], None], *, dry: bool
) -> None:
    """Measures, prints a table, and writes `name`.json to `folder`, by default this machine's; a `dry` run has no
    goals, and is written where a folder is given only."""
    given = "".join(f" --{option} {value}" for option, value in options.items())
    command = f"python -m validation.benchmarks.{name}{given}"
    console = Console()
    rows = Rows(Measured(command, describe("cpu"), versions(), today()), dry, console)
    measure(rows)
    console.print(rows.table())
    target = folder or (None if dry else Path("benchmarks/results") / slug("cpu"))
    if target is not None:
        target.mkdir(parents=True, exist_ok=True)
        write_rows(target / f"{name}.json", rows.rows)
