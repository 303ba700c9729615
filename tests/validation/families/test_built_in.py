"""Token by token: what a trap shares with its donor holds the asked row, and lacks what gives the row its meaning.
What changes in a plain-English prompt differs from the donor; what answers its questions is still there."""

import re

import pytest

from semblend_trt.discovery.span_index import SpanIndex
from validation import prompts
from validation.cases import equal_start
from validation.families.catalog import FAMILIES, Kind, family

# Shortest span that the quality runs reuse; a yardstick list of nine rows is hardly longer.
MIN_SPAN = 48
EXCHANGED = ["header_trap", "planted", "mid_sentence_trap", "alias_trap", "pronoun_trap", "unit_trap", "date_trap"]
ENGLISH = [each.name for each in FAMILIES if each.marks is False]


def runs_of(writer, case):
    index = SpanIndex()
    for number, donor in enumerate(case.donors):
        index.add("namespace", str(number), writer.tokenizer.encode(donor).ids)
    return index.find("namespace", writer.tokenizer.encode(case.prompt).ids).runs


def shared_tokens(writer, case):
    runs = runs_of(writer, case)
    return len({place for run in runs for place in range(run.target_start, run.target_start + run.length)})


def place_of(writer, case, run):
    offsets = writer.tokenizer.encode(case.prompt).offsets
    return slice(offsets[run.target_start][0], offsets[run.target_start + run.length - 1][1])


def shared_row(writer, case):
    """The run that holds the number of the asked row, its text, and the asked place; None when no run does."""
    asked = re.search(r"How many (\w+) are in ([^?<]+)\?<\|a\|>$", case.prompt)
    heading = re.search(rf"{re.escape(prompts.DOCUMENT_MARK)}Stock list of {asked[2]}[.,]", case.prompt)
    row = re.compile(rf"\n{asked[1]}: (\d+)").search(case.prompt, heading.end())
    for run in runs_of(writer, case):
        place = place_of(writer, case, run)
        if place.start <= row.start(1) and row.end(1) <= place.stop:
            return run, case.prompt[place], asked[2]
    return None


@pytest.mark.parametrize("name", [*EXCHANGED, "far_header_trap"])
def test_the_asked_row_is_shared_and_its_heading_is_not(writer, name):
    for case in writer.write(name):
        run, text, place = shared_row(writer, case)
        assert run.length >= MIN_SPAN
        assert place not in text
        # Tokens end where the meaning does: the token in front of the run differs from the donor's.
        prompt, donor = (writer.tokenizer.encode(each).ids for each in (case.prompt, case.donors[0]))
        assert prompt[run.target_start - 1] != donor[run.donor_start - 1]
        assert run.target_start != run.donor_start or name != "header_trap"


def test_a_number_that_differs_is_in_no_shared_text(writer):
    changed = [case for case in writer.write("near_duplicates") if case.donor_answer is not None]
    assert changed
    for case in changed:
        assert shared_row(writer, case) is None
        assert sum(run.length for run in runs_of(writer, case)) > 0.6 * writer.count(case.prompt)
        assert sum(a != b for a, b in zip(case.reference or "", case.donor_answer or "", strict=True)) == 1


def test_unrelated_prompts_share_no_run(writer):
    for case in writer.write("unrelated", groups=6):
        assert all(run.length < MIN_SPAN for run in runs_of(writer, case))


@pytest.mark.parametrize("name", ["reordered", "system_prompt", "cut_turns", "prose"])
def test_harmless_prompts_share_nearly_all_of_their_documents(writer, name):
    for case in writer.write(name, tokens=1_500):
        assert shared_tokens(writer, case) > 0.7 * writer.count(case.prompt)


@pytest.mark.parametrize("name", ENGLISH)
def test_most_of_an_english_prompt_was_seen_before_and_not_at_its_beginning_alone(english, name):
    for case in english.write(name, groups=3, tokens=1_200, seed=5):
        donor, prompt = (english.tokenizer.encode(each).ids for each in (case.donors[0], case.prompt))
        assert shared_tokens(english, case) > 0.6 * len(prompt) > equal_start(donor, prompt)


@pytest.mark.parametrize("name", ENGLISH)
def test_an_english_prompt_holds_the_right_answer_and_a_traps_donor_a_wrong_one(english, name):
    cases = english.write(name, groups=3, tokens=1_200, seed=5)
    assert all(case.known_answer and case.reference in case.prompt for case in cases)
    wrong = [case for case in cases if case.donor_answer is not None]
    assert (len(wrong) > len(cases) / 2) == (family(name).kind is Kind.TRAP)
    assert all(case.donor_answer != case.reference and case.donor_answer in case.donors[0] for case in wrong)


@pytest.mark.parametrize(("name", "premise"), [("link", r"belongs to"), ("edited_field", r"List \w+\.")])
def test_what_draws_a_conclusion_is_shared_and_its_premise_is_not(writer, name, premise):
    for case in writer.write(name, tokens=1_536):
        item = re.search(r"many (\w+)[^|]*\|a\|>$", case.prompt)[1]
        row = re.compile(rf"\n{item}: {case.reference}\b")
        runs = [run for run in runs_of(writer, case) if run.length >= MIN_SPAN]
        texts = [case.prompt[place_of(writer, case, run)] for run in runs]
        assert any(row.search(text) for text in texts)
        assert not any(re.search(premise, text) for text in texts if row.search(text))
