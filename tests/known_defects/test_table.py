"""docs/failure-modes.md names for every known defect the tests that fail on it, and these tests say so themselves."""

import ast
from collections import defaultdict

from tests.pages import Page, code_in, named_tests

NUMBERS = range(1, 38)


def marked():
    """The tests with a `known_defect` mark, by the mark's numbers."""
    found = defaultdict(set)
    for name, test in named_tests().items():
        for mark in test.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.known_defect":
                for number in map(ast.literal_eval, mark.args):
                    found[number].add(name)
    return found


def test_every_defect_has_its_tests_and_the_page_names_them():
    rows = [row for row in Page("docs/failure-modes.md").rows if row[0].isdigit()]
    assert [int(number) for number, *_ in rows] == list(NUMBERS)
    assert {int(number): set(code_in(tests)) for number, *_, tests in rows} == marked()
