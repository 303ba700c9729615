"""Read all result rows, and make tables of them, for the terminal and on pages.

A page holds a table between `<!-- results:PATTERN ... -->` and `<!-- /results -->`. A shell pattern matches a row's
name, its file's `machine/file`, or both as `machine/file/name`. With `<!-- results:HEADING=PATTERN ... -->` the values
form columns: such a pattern matches a row's name or `machine/file/name`, and its one `*` names the line. A heading
that is given again continues its column; `goal` shows the rows' goals. `<!-- results:files PATTERN ... -->` has a line
for each file. A value that misses its goal is bold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from semblend_trt.command_line import printable
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import read_input
from validation import output
from validation.results import Row

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
    return output.markdown_table(headings, lines) + "\n"


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
    return output.markdown_table("file | rows, with their goals", cells) + "\n"


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
    return output.markdown_table(" | ".join(("", *headings)), lines) + "\n"


def _starred(pattern: str, rows: dict[str, list[Row]]) -> dict[str, Row]:
    """Return the rows that match, by the text that the pattern's one `*` matches."""
    before, star, after = pattern.partition("*")
    if not star or "*" in after:
        raise ConfigurationError(f"The column's pattern {pattern!r} needs exactly one *, which names the lines.")
    found: dict[str, Row] = {}
    for place, each in ((place, each) for place, those in rows.items() for each in those):
        text = f"{place}/{each.name}" if "/" in before else each.name
        if not fnmatchcase(text, pattern):
            continue
        line = text[len(before) : len(text) - len(after)]
        if line in found:
            raise ConfigurationError(f"Two rows match {pattern!r} as {line!r}; begin with machine/file/.")
        found[line] = each
    if not found:
        raise ConfigurationError(f"No result row matches {pattern!r}; measure it or correct the marker.")
    return found


def figure(value: float) -> str:
    """Return four significant digits; large integers whole."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
