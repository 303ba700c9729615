"""Result rows: the figures that documents quote, each with its command line, machine and versions; and their tables.

A page holds a table between `<!-- results:PATTERN ... -->` and `<!-- /results -->`. A shell pattern matches a row's
name, its file's `machine/file`, or both as `machine/file/name`. With `<!-- results:HEADING=PATTERN ... -->` the values
form columns: such a pattern matches a row's name or `machine/file/name`, and its one `*` names the line. A heading
that is given again continues its column; `goal` shows the rows' goals. `<!-- results:files PATTERN ... -->` has a line
for each file. A value that misses its goal is bold."""

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch

from semblend_trt.command_line import printable
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import read_input, write_bytes

Better = Literal["higher", "lower"]

_DISTRIBUTIONS = ("semblend-trt", "torch", "transformers", "numpy", "numba", "tokenizers", "triton", "rouge-score")


@dataclass(frozen=True, slots=True)
class Measured:
    """What the rows of one run share: command line, machine, versions and date (UTC, ISO 8601)."""

    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    date: str

    @classmethod
    def now(cls, command: str, device: str | None = None, name: str | None = None) -> "Measured":
        """Describe a run that ends now; `device` and `name` as in `describe`."""
        return cls(command, describe(device, name), versions(), today())

    def sentence(self) -> str:
        """Say command, date and machine for a page."""
        return f"`{self.command}`, {self.date}, machine {self.machine['name']}"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, with what it is measured against (`baseline`), and its goal if it has one.
    Raises ValueError or TypeError for wrong fields: rows are also read from files."""

    name: str
    value: float
    unit: str
    goal: float | None
    better: Better
    holds: bool
    baseline: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    date: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.<>-]+", self.name):
            raise ValueError(f"{self.name!r} cannot name a row; use letters, digits and _.<>-")
        for figure in (self.value, 0.0 if self.goal is None else self.goal):
            if not math.isfinite(figure):
                raise ValueError(f"The row {self.name} has the value {figure}; a result is a finite number.")
        if self.better not in ("higher", "lower"):
            raise ValueError(f"the row {self.name} has better={self.better!r}; it is higher or lower")
        if self.holds is not meets(self.value, self.goal, self.better):
            raise ValueError(f"the row {self.name} says holds={self.holds}, which its figures contradict")
        texts = (self.unit, self.baseline, self.command)
        if not all(isinstance(each, str) for each in texts) or not re.match(r"\d{4}-\d{2}-\d{2}", self.date):
            raise ValueError(f"the row {self.name} has no texts in unit, baseline and command, or no date")
        if not (isinstance(self.machine, dict) and isinstance(self.versions, dict)):
            raise ValueError(f"the row {self.name} has no objects in machine and versions")


class Results:
    """The rows of one run, by default of this program with `arguments` (None: its own) on `device`.
    Rows of a `dry` run have no goals, and are written only if a folder is given."""

    def __init__(
        self,
        arguments: Sequence[str] | None = None,
        device: str | None = None,
        *,
        dry: bool = False,
        measured: Measured | None = None,
        is_shown: bool = True,
    ) -> None:
        self.rows: list[Row] = []
        self.measured = measured or Measured.now(command(arguments), device)
        self.dry, self._is_shown = dry, is_shown

    def add(
        self, name: str, value: float, unit: str, baseline: str, goal: float | None = None, better: Better = "lower"
    ) -> None:
        """Add a figure. `holds` follows from value, goal and direction. Raises ValueError when the value is not finite.
        It shows the figure at once, so that a run that is cut short has shown what it measured."""
        value, goal = float(value), None if self.dry or goal is None else float(goal)
        added = Row(name, value, unit, goal, better, meets(value, goal, better), baseline, **asdict(self.measured))
        self.rows.append(added)
        if self._is_shown:
            say(_line(added))

    def write(self, folder: Path | None, name: str, default: Path | None = None) -> None:
        """Show all rows with baselines; write `name.json` to `folder`, else to `default` unless the run is dry."""
        for each in self.rows:
            say(_line(each))
            say(f"    {each.baseline}")
        target = folder or (None if self.dry else default)
        if target is not None:
            write_rows(target / f"{name}.json", self.rows)
            say(f"wrote {len(self.rows)} rows to {target / name}.json")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows of one run to `path`, replacing what an earlier run left there."""
    write_json(path, [asdict(each) for each in rows])


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON; NaN and infinities, which JSON does not have, become null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    write_bytes(path, (json.dumps(finite, indent=1, ensure_ascii=False) + "\n").encode())


def say(sentence: object) -> None:
    """Show one line on stdout at once."""
    sys.stdout.write(printable(sentence) + "\n")
    sys.stdout.flush()


def command(arguments: Sequence[str] | None = None) -> str:
    """Return this run's command line for a reader to repeat; `arguments` replace the program's own."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = sys.argv[0] if module is None else f"-m {module.name.removesuffix('.__main__')}"
    return f"python {program} {shlex.join(sys.argv[1:] if arguments is None else arguments)}".strip()


def today() -> str:
    """Return the date of a row: UTC, ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and the installed distributions that decide a figure."""
    found = {"python": platform.python_version()}
    if torch.version.cuda is not None:
        found["cuda"] = str(torch.version.cuda)
    for name in (*_DISTRIBUTIONS, "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def describe(device: str | None = None, name: str | None = None) -> dict[str, Any]:
    """Return the machine as a row shows it: with the card if `device` is one, by default if torch sees one.
    `name` is the folder of its results, by default `cpu-2core`, or the card's such as `nvidia-h200`."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    card = torch.cuda.get_device_properties(device) if device.startswith("cuda") else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    derived = f"cpu-{cores}core" if card is None else re.sub(r"[^a-z0-9]+", "-", card.name.lower()).strip("-")
    return {
        "name": name or derived,
        "cpu": model or platform.processor() or platform.machine(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": None if card is None else card.name,
        "gpu_memory_gib": None if card is None else round(card.total_memory / 2**30, 1),
        "multiprocessors": None if card is None else card.multi_processor_count,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def meets(value: float, goal: float | None, better: Better) -> bool:
    """Return whether a value reaches its goal, or has none; NaN reaches none."""
    return goal is None or (value >= goal if better == "higher" else value <= goal)


def _line(each: Row) -> str:
    verdict = "" if each.goal is None else f"  goal {'>=' if each.better == 'higher' else '<='} {each.goal:,.5g}"
    return f"{each.name:<44} {each.value:>12,.5g} {each.unit:<10}{verdict}{'' if each.holds else '  MISSED'}"


_BLOCK = re.compile(r"(<!-- results:(?P<patterns>[^>]*?) -->\n)(?P<table>.*?)(<!-- /results -->)", re.DOTALL)


def read_rows(root: Path) -> dict[str, list[Row]]:
    """Read all JSON files under `root`, sorted, by `machine/file` without the extension.
    Raises ConfigurationError as `rows_of`, and if a machine has two rows of one name."""
    if not root.is_dir():
        raise ConfigurationError(f"{root} is not a folder of results; give one with --results.")
    found: dict[str, list[Row]] = {}
    owners: dict[tuple[str, str], Path] = {}
    for path in sorted(root.rglob("*.json")):
        rows = rows_of(path)
        for each in rows:
            other = owners.setdefault((path.parent.name, each.name), path)
            if other is not path:
                raise ConfigurationError(f"The row {each.name} is both in {other} and in {path}; keep one.")
        found[path.relative_to(root).with_suffix("").as_posix()] = rows
    return found


def rows_of(path: Path) -> list[Row]:
    """Read one file. Raises ConfigurationError if it does not hold rows, or they contradict themselves."""
    try:
        rows = [Row(**fields) for fields in json.loads(read_input(path))]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{path} does not hold result rows: {error}.") from error
    if len({each.name for each in rows}) != len(rows):
        raise ConfigurationError(f"{path} holds two rows of one name.")
    return rows


def with_tables(text: str, rows: dict[str, list[Row]], root: str) -> str:
    """Return the page with new results tables, whose rows link to their files under `root`, as seen from the page.
    Raises ConfigurationError for an open marker or as `markdown_table`."""
    if text.count("<!-- results:") != len(_BLOCK.findall(text)):
        raise ConfigurationError("A `<!-- results:... -->` marker is not followed by `<!-- /results -->`; close it.")
    return _BLOCK.sub(lambda found: found[1] + markdown_table(found["patterns"], rows, root) + found[4], text)


def markdown_table(patterns: str, rows: dict[str, list[Row]], root: str | None = None) -> str:
    """Return the Markdown table of the rows that match the patterns, in their order. Each names its file: as a link
    under `root`, or without one beside what the row is compared with.
    Raises ConfigurationError for a pattern that no row matches or, in columns, that is ambiguous."""
    if "=" in patterns:
        return _column_table(patterns.split(), rows)
    if patterns.startswith("files "):
        return _file_table(_chosen(patterns.split()[1:], rows), root)
    lines = []
    for (place, name), each in _chosen(patterns.split(), rows).items():
        recorded = (each.baseline, place) if root is None else (f"[{place}]({root}/{place}.json)",)
        lines.append(_printable((f"`{name}`", _value(each), _goal(each), *recorded)))
    headings = "row | value | goal | against | file" if root is None else "row | value | goal | file"
    return table_of(headings, lines) + "\n"


def _chosen(patterns: Sequence[str], rows: dict[str, list[Row]]) -> dict[tuple[str, str], Row]:
    """Return the rows that match, by file and name, in the patterns' order."""
    chosen: dict[tuple[str, str], Row] = {}
    for pattern in patterns:
        matching = {
            (place, each.name): each
            for place, found in rows.items()
            for each in found
            if any(fnmatchcase(named, pattern) for named in (each.name, place, f"{place}/{each.name}"))
        }
        if not matching:
            raise ConfigurationError(f"No result row matches {pattern!r}; measure it or correct the marker.")
        chosen |= matching
    return chosen


def _file_table(chosen: dict[tuple[str, str], Row], root: str | None) -> str:
    """Return a line for each file, with its rows, their values and, in brackets, their goals."""
    lines: dict[str, list[str]] = {}
    for (place, name), each in chosen.items():
        goal = "" if each.goal is None else f" ({_goal(each)})"
        lines.setdefault(place, []).append(f"`{name}` {_value(each)}{goal}")
    cells = (_printable((f"[{place}]({root}/{place}.json)", ", ".join(found))) for place, found in lines.items())
    return table_of("file | rows, with their goals", cells) + "\n"


def _printable(cells: Sequence[str]) -> list[str]:
    return [printable(cell).replace("|", "\\|") for cell in cells]


def _goal(row: Row) -> str:
    return "-" if row.goal is None else f"{'>=' if row.better == 'higher' else '<='} {figure(row.goal)}"


def _value(row: Row) -> str:
    return _bold(f"{figure(row.value)} {row.unit}".strip(), row)


def _bold(value: str, row: Row) -> str:
    return value if row.holds else f"**{value}**"


def _column_table(columns: Sequence[str], rows: dict[str, list[Row]]) -> str:
    """Return a line for each name that the patterns' stars match, `-` for an empty one."""
    cells: dict[str, dict[str, str]] = {}
    for heading, _, pattern in (column.partition("=") for column in columns):
        for line, each in _starred(pattern, rows).items():
            cells.setdefault(line, {})[heading] = _goal(each) if heading == "goal" else _bold(figure(each.value), each)
    headings = dict.fromkeys(column.partition("=")[0] for column in columns)
    lines = ((f"`{line or '-'}`", *(found.get(heading, "-") for heading in headings)) for line, found in cells.items())
    return table_of(" | ".join(("", *headings)), lines) + "\n"


def _starred(pattern: str, rows: dict[str, list[Row]]) -> dict[str, Row]:
    """Return the rows that match, by the text that the pattern's one `*` matches."""
    before, star, after = pattern.partition("*")
    if not star or "*" in after:
        raise ConfigurationError(f"The column's pattern {pattern!r} needs exactly one *, which names the lines.")
    found: dict[str, Row] = {}
    for (place, name), each in _chosen([pattern], rows).items():
        text = f"{place}/{name}" if "/" in before else name
        line = text[len(before) : len(text) - len(after)]
        if line in found:
            raise ConfigurationError(f"Two rows match {pattern!r} as {line!r}; begin with machine/file/.")
        found[line] = each
    return found


def figure(value: float | None) -> str:
    """Return four significant digits, large integers whole, or `-` for None."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def table_of(headings: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a table; `headings` are separated by ` | `."""
    head = [f"| {headings} |", "|" + "---|" * len(headings.split(" | "))]
    return "\n".join([*head, *(f"| {' | '.join(cells)} |" for cells in rows)])
