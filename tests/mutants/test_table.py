"""Each seeded mutant still has its place in the product and its test; `make mutants` runs them."""

from tests.mutants.table import MUTANTS
from tests.pages import ROOT, named_tests


def test_each_mutant_has_one_place():
    found = {each.name: (ROOT / each.file).read_text("utf-8").count(each.old) for each in MUTANTS}
    assert {name: count for name, count in found.items() if count != 1} == {}


def test_each_mutant_has_its_test():
    assert sorted({each.test for each in MUTANTS} - named_tests().keys()) == []


def test_mutants_have_names_of_their_own_and_change_something():
    assert len({each.name for each in MUTANTS}) == len(MUTANTS)
    assert [each.name for each in MUTANTS if each.old == each.new] == []
