"""Every family is seeded, keeps to its budget, and knows its answers."""

import re

import pytest

from semblend_trt.errors import ConfigurationError
from validation import prompts
from validation.cases import Expectation, groups
from validation.families.catalog import FAMILIES, TIMED, Kind, family, write_timed

BUILT_IN = [each.name for each in FAMILIES if not each.needs_eval_data]
# Families whose answer has to be inferred from more than one line.
INFERRED = ("link", "edited_field")
READ_BY_ROW = [each.name for each in FAMILIES if each.marks is not False and not each.is_text]
READ_BY_ROW = [name for name in READ_BY_ROW if name not in INFERRED]
EXPECTED = {Kind.NONE: Expectation.NONE, Kind.EXACT: Expectation.EXACT_PREFIX}


@pytest.mark.parametrize("name", BUILT_IN)
def test_cases_are_seeded_and_those_of_a_group_share_donors_and_ask_differently(writer, name):
    cases = writer.write(name)
    assert writer.write(name) == cases
    assert writer.write(name, groups=1) == cases[:4]
    assert not {case.prompt for case in writer.write(name, seed=4)} & {case.prompt for case in cases}
    assert len(cases) == len({case.id for case in cases}) == 8
    expected = EXPECTED.get(family(name).kind, Expectation.REUSE)
    assert {(case.expects, case.workload) for case in cases} == {(expected, name)}
    for group in groups(cases):
        assert len(group) == len({case.prompt for case in group}) == 4
        assert len({case.donors for case in group}) == 1
        assert [case.is_timed for case in group] == [True, False, False, False]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("tokens", [700, 2_048])
def test_prompts_and_donors_keep_to_the_budget_and_use_it(writer, name, tokens):
    # A register of more lists than six is not answered.
    least = min(tokens / 3, 500) if name in INFERRED else tokens / 3
    for case in writer.write(name, tokens=tokens):
        assert least <= max(writer.count(text) for text in (*case.donors, case.prompt)) <= tokens


@pytest.mark.parametrize("name", [each for each in BUILT_IN if each in READ_BY_ROW])
def test_the_row_that_is_asked_for_stands_under_the_asked_heading(writer, name):
    for case in writer.write(name):
        assert case.known_answer
        assert answer_in(case.prompt, case.prompt) == case.reference
        if name != "near_duplicates":
            assert (case.donor_answer is not None) == (family(name).kind is Kind.TRAP)
        if case.donor_answer is not None:
            assert case.donor_answer != case.reference
            assert answer_in(case.donors[0], case.prompt) == case.donor_answer


@pytest.mark.parametrize("name", INFERRED)
def test_the_answer_follows_from_what_stands_in_front(writer, name):
    for case in writer.write(name, tokens=1_536):
        assert case.known_answer
        assert counted_at(case.prompt, case.prompt) == case.reference
        assert counted_at(case.donors[0], case.prompt) == case.donor_answer != case.reference


def counted_at(text, prompt):
    """The count in the list whose name belongs to the asked place."""
    asked = re.search(r"How many (\w+) are in ([^?<]+)\?<\|a\|>$", prompt)
    [owner] = re.findall(rf"\n(List \w+) belongs to {asked[2]}\.", text)
    [document] = [each for each in text.split(prompts.DOCUMENT_MARK)[2:] if f"{owner}." in each]
    return re.search(rf"\n{asked[1]}: (\d+)", document)[1]


def answer_in(text, prompt):
    """What `text`'s list of the place says of the item that `prompt` asks for."""
    asked = re.search(r"How many (\w+) are in ([^?<]+)\?<\|a\|>$", prompt)
    for document in text.split(prompts.DOCUMENT_MARK)[1:]:
        if re.match(rf"Stock list of {asked[2]}[.,]", document):
            row = re.search(rf"\n{asked[1]}: (\d+)", document)
            return None if row is None else row[1]
    return None


def test_prose_goes_on_as_its_reference_and_repeats_were_served_word_for_word(writer):
    for case in writer.write("prose"):
        assert str(case.reference).startswith(" ")
        assert not case.prompt.endswith(" ")
        assert not case.known_answer
    assert all(case.prompt in case.donors for case in writer.write("repeat"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "riddles"}, "'riddles' is unknown; use reordered, "),
        ({"tokens": 100}, r"leave \d+ for documents; ask for at least"),
        ({"questions": 500}, "but 501 are needed"),
        ({"name": "squad"}, "name their folder with --eval-data"),
    ],
)
def test_what_cannot_be_written_is_refused(writer, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        writer.write(**({"name": "reordered"} | changes))


def test_a_timed_run_has_seeded_prompts_that_fit_the_context(shipped):
    cases = write_timed(shipped, 1, 8_192, full=True)
    assert len({case.id for case in cases}) == len(cases) == 107
    assert write_timed(shipped, 1, 3_000, full=True) == [case for case in cases if case.size != "4096"]
    with pytest.raises(ConfigurationError, match="leaves 1000 for a prompt; bring shorter cases"):
        write_timed(shipped, 1, min(row[-1] for row in TIMED) - 24, full=True)


@pytest.mark.promise(
    "commands",
    "`make validate` serves a part of the full run's prompts, of every kind, and shows headline, figures and gates "
    "on one screen",
)
def test_a_first_look_serves_a_part_of_a_full_run_of_every_kind(shipped):
    cases = write_timed(shipped, 1, 8_192, full=False)
    every = {case.id: case for case in write_timed(shipped, 1, 8_192, full=True)}
    assert {family(case.workload).kind for case in cases} == set(Kind)
    assert all(every[case.id] == case for case in cases)
    assert {case.size for case in cases if case.workload == "reordered"} == {"2048", "4096"}
    assert sum(case.known_answer and case.expects is Expectation.REUSE for case in cases) == 54
