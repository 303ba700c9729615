"""What changes in front of a plain-English prompt differs from the donor; what answers its questions is still there."""

import re

import pytest

from semblend_trt.discovery.span_index import SpanIndex
from validation.families.catalog import FAMILIES, FamilyRequest, Kind, family, write_family
from validation.prompts import PLAIN

NAMES = [each.name for each in FAMILIES if each.marks is False]


def tokens(text):
    return re.findall(r" ?\w+|\W", text)


def write(name):
    return write_family(name, PLAIN, lambda text: len(tokens(text)), FamilyRequest((), 3, 4, 1_200, 5))


def reused(case):
    """How many of the prompt's tokens are shared with the donor, and how many of them are an equal beginning."""
    numbers = {}
    donor, prompt = (
        [numbers.setdefault(each, len(numbers)) for each in tokens(text)] for text in (case.donors[0], case.prompt)
    )
    index = SpanIndex()
    index.add("namespace", "donor", donor)
    runs = index.find("namespace", prompt).runs
    shared = {place for run in runs for place in range(run.target_start, run.target_start + run.length)}
    same = next(place for place, pair in enumerate(zip(donor, prompt, strict=False)) if pair[0] != pair[1])
    return len(shared), same, len(prompt)


@pytest.mark.parametrize("name", NAMES)
def test_most_of_a_prompt_was_seen_before_and_not_at_its_beginning_alone(name):
    for case in write(name):
        shared, same, length = reused(case)
        assert shared > 0.6 * length
        assert same < 0.6 * length


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_holds_the_right_answer_and_a_traps_donor_a_wrong_one(name):
    cases = write(name)
    assert all(case.known_answer and case.reference in case.prompt for case in cases)
    wrong = [case for case in cases if case.donor_answer is not None]
    assert (len(wrong) > len(cases) / 2) == (family(name).kind is Kind.TRAP)
    assert all(case.donor_answer != case.reference and case.donor_answer in case.donors[0] for case in wrong)
