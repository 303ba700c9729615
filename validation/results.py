"""Result rows: every figure that a document quotes, with how it was measured."""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from semblend_trt.errors import ConfigurationError
from validation.files import write_json

if TYPE_CHECKING:
    from pathlib import Path

Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What all rows of one run share: the command line, the machine, the versions and the date (UTC, ISO 8601)."""

    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    date: str


class Row(BaseModel):
    """One figure. `goal` None is a figure without a goal; `holds` says whether the value meets it.

    `baseline` says in words what the value is measured against.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.<>-]+$")]
    value: float
    unit: str
    goal: float | None
    better: Better
    holds: bool
    baseline: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}")]


def today() -> str:
    """The date of a row: UTC, ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def row(
    name: str, value: float, unit: str, *, goal: float | None, better: Better, baseline: str, measured: Measured
) -> Row:
    """Makes a row; `holds` follows from value, goal and direction. Raises ValueError for a value that is not finite."""
    if not math.isfinite(value):
        raise ValueError(f"The row {name} has the value {value}; a result is a finite number.")
    holds = goal is None or (value >= goal if better == "higher" else value <= goal)
    return Row(
        name=name, value=value, unit=unit, goal=goal, better=better, holds=holds, baseline=baseline, **asdict(measured)
    )


def write_rows(path: Path, rows: list[Row]) -> None:
    """Writes the rows of one run to `path`, replacing what an earlier run left there."""
    write_json(path, [each.model_dump() for each in rows])


def read_rows(root: Path) -> dict[str, list[Row]]:
    """Rows of all JSON files under `root`, by `machine/file` without the extension, sorted.

    Raises ConfigurationError naming the file when it does not hold rows, when a row's `holds` contradicts its figures,
    or when a machine has two rows of one name.
    """
    if not root.is_dir():
        raise ConfigurationError(f"{root} is not a folder of results; give one with --results.")
    found: dict[str, list[Row]] = {}
    owners: dict[tuple[str, str], Path] = {}
    for path in sorted(root.rglob("*.json")):
        rows = rows_of(path)
        for each in rows:
            other = owners.setdefault((path.parent.name, each.name), path)
            if other is not path:
                raise ConfigurationError(f"The row {each.name} stands both in {other} and in {path}; keep one.")
        found[path.relative_to(root).with_suffix("").as_posix()] = rows
    return found


def rows_of(path: Path) -> list[Row]:
    """Rows of one file. Raises ConfigurationError when it does not hold rows, or they contradict themselves."""
    try:
        rows = [Row.model_validate(fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise ConfigurationError(f"{path} does not hold result rows: {problem}.") from error
    for each in rows:
        if each.goal is not None and each.holds != (
            each.value >= each.goal if each.better == "higher" else each.value <= each.goal
        ):
            raise ConfigurationError(f"{path}: the row {each.name} says holds={each.holds}, its figures say otherwise.")
    if len({each.name for each in rows}) != len(rows):
        raise ConfigurationError(f"{path} holds two rows of one name.")
    return rows
