"""docs/failure-modes.md names for every known defect the tests that fail on it, and these tests say so themselves."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "failure-modes.md").read_text(encoding="utf-8")
NUMBERS = range(1, 38)


def marked(source: str) -> dict[str, set[int]]:
    """The numbers of `known_defect` marks, by the name of the test that bears them."""
    found: dict[str, set[int]] = defaultdict(set)
    for node in ast.parse(source).body:
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.known_defect":
                found[node.name].update(map(ast.literal_eval, mark.args))
    return found


def numbered_tests() -> dict[int, set[str]]:
    found: dict[int, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for name, numbers in marked(path.read_text(encoding="utf-8")).items():
            for number in numbers:
                found[number].add(f"{path.relative_to(TESTS).as_posix()}::{name}")
    return found


def table() -> dict[int, set[str]]:
    """The tests of the page's table, by the defect's number."""
    _, _, section = PAGE.partition("## Known defects of public connectors")
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len({number for number, *_ in rows}) == len(rows), "a defect has two rows"
    return {int(number): set(re.findall(r"`(\S+::\w+)`", tests)) for number, _, _, tests in rows}


def test_marks_are_found() -> None:
    source = "@pytest.mark.known_defect(3, 8)\n@pytest.mark.slow\ndef test_it(): ...\ndef test_other(): ..."
    assert marked(source) == {"test_it": {3, 8}}


def test_every_defect_has_its_tests_and_the_page_names_them() -> None:
    assert {number: sorted(tests) for number, tests in sorted(numbered_tests().items())} == {
        number: sorted(tests) for number, tests in sorted(table().items())
    }


def test_no_defect_is_left_out() -> None:
    assert sorted(table()) == list(NUMBERS)
    assert all(table().values())
