"""Every known defect of docs/failure-modes.md has tests that fail on it, which their marks say."""

import ast
import re
from collections import defaultdict

from tests.pages import Page, named_tests

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


def test_every_defect_is_on_the_page_and_has_its_tests():
    cells = [row[0] for row in Page("docs/failure-modes.md").rows if re.fullmatch(r"\d+(, \d+)*", row[0])]
    assert sorted(int(number) for cell in cells for number in cell.split(", ")) == list(NUMBERS)
    assert sorted(marked()) == list(NUMBERS)
