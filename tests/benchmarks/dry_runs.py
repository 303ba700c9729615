"""Short runs of benchmarks, which promise nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from validation.scoreboard import read_rows

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from validation.results import Row


def dry_rows(benchmark: ModuleType, folder: Path, *arguments: str) -> dict[str, Row]:
    """What a dry run writes, by name; its rows have no goals and name its command line."""
    benchmark.main([*arguments, "--json", str(folder / "out")])
    (rows,) = read_rows(folder).values()
    assert all(row.goal is None and row.holds and " ".join(arguments) in row.command for row in rows)
    return {row.name: row for row in rows}
