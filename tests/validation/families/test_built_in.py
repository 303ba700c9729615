"""Token by token: what a trap shares with its donor holds the asked row, and lacks what gives the row its meaning."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from semblend_trt.discovery.span_index import SpanIndex
from validation import prompts

if TYPE_CHECKING:
    from semblend_trt.discovery.span_index import Run
    from tests.validation.families.conftest import Writer
    from validation.cases import Case

# Shortest span that the quality runs reuse; a yardstick list of nine rows is hardly longer.
MIN_SPAN = 48
EXCHANGED = ["header_trap", "planted", "mid_sentence_trap", "alias_trap", "pronoun_trap", "unit_trap", "date_trap"]


def runs_of(writer: Writer, case: Case) -> list[Run]:
    index = SpanIndex()
    for number, donor in enumerate(case.donors):
        index.add("namespace", str(number), writer.tokenizer.encode(donor).ids)
    return index.find("namespace", writer.tokenizer.encode(case.prompt).ids)


def row_of(case: Case) -> tuple[int, int, str]:
    """Where the number of the asked row stands in the prompt, in characters, and the asked place."""
    asked = re.search(r"How many (\w+) are in ([^?<]+)\?<\|a\|>$", case.prompt)
    assert asked is not None
    heading = re.search(rf"{re.escape(prompts.DOCUMENT_MARK)}Stock list of {asked[2]}[.,]", case.prompt)
    assert heading is not None
    row = re.compile(rf"\n{asked[1]}: (\d+)").search(case.prompt, heading.end())
    assert row is not None
    return row.start(1), row.end(1), asked[2]


def shared_around(writer: Writer, case: Case, begin: int, end: int) -> tuple[Run, str] | None:
    """The run that holds the characters begin..end of the prompt, and its text; None when no run does."""
    offsets = writer.tokenizer.encode(case.prompt).offsets
    for run in runs_of(writer, case):
        first, last = offsets[run.target_start][0], offsets[run.target_start + run.length - 1][1]
        if first <= begin and end <= last:
            return run, case.prompt[first:last]
    return None


@pytest.mark.parametrize("name", [*EXCHANGED, "far_header_trap"])
def test_the_asked_row_is_shared_and_its_heading_is_not(writer: Writer, name: str) -> None:
    for case in writer.write(name):
        begin, end, place = row_of(case)
        found = shared_around(writer, case, begin, end)
        assert found is not None
        run, text = found
        assert run.length >= MIN_SPAN
        assert place not in text
        # Tokens end where the meaning does: the token in front of the run differs from the donor's.
        prompt, donor = (writer.tokenizer.encode(each).ids for each in (case.prompt, case.donors[0]))
        assert prompt[run.target_start - 1] != donor[run.donor_start - 1]
        assert run.target_start != run.donor_start or name != "header_trap"


def test_a_shared_text_begins_in_the_middle_of_the_header(writer: Writer) -> None:
    for case in writer.write("mid_sentence_trap"):
        begin, end, place = row_of(case)
        found = shared_around(writer, case, begin, end)
        assert found is not None
        assert re.match(rf"\w* ?{place.split()[1]}\.\n", found[1])


@pytest.mark.parametrize(("name", "inside"), [("alias_trap", "Counts of the store."), ("pronoun_trap", "It holds")])
def test_a_shared_text_holds_the_word_that_stands_for_the_place(writer: Writer, name: str, inside: str) -> None:
    for case in writer.write(name):
        begin, end, _ = row_of(case)
        found = shared_around(writer, case, begin, end)
        assert found is not None
        assert found[1].index(inside) < found[1].index(f": {case.reference}")


def test_rows_lie_between_a_far_header_and_what_is_shared(writer: Writer) -> None:
    for case in writer.write("far_header_trap"):
        begin, end, place = row_of(case)
        found = shared_around(writer, case, begin, end)
        assert found is not None
        before = case.prompt[: case.prompt.index(found[1])]
        assert before[before.index(f"Stock list of {place}.") :].count("\n") >= 2


def test_a_number_that_differs_is_in_no_shared_text(writer: Writer) -> None:
    checked = 0
    for case in writer.write("near_duplicates"):
        if case.donor_answer is not None:
            begin, end, _ = row_of(case)
            assert shared_around(writer, case, begin, end) is None
            assert sum(run.length for run in runs_of(writer, case)) > 0.6 * writer.count(case.prompt)
            assert sum(a != b for a, b in zip(case.reference or "", case.donor_answer, strict=True)) == 1
            checked += 1
    assert checked


def test_unrelated_prompts_share_no_run(writer: Writer) -> None:
    for case in writer.write("unrelated", groups=6):
        assert not [run for run in runs_of(writer, case) if run.length >= MIN_SPAN]


@pytest.mark.parametrize("name", ["reordered", "system_prompt", "cut_turns", "prose"])
def test_harmless_prompts_share_nearly_all_of_their_documents(writer: Writer, name: str) -> None:
    for case in writer.write(name, tokens=1_500):
        covered = {
            position
            for run in runs_of(writer, case)
            for position in range(run.target_start, run.target_start + run.length)
        }
        assert len(covered) > 0.7 * writer.count(case.prompt)


def test_planted_places_are_of_one_kind_and_spelt_alike(writer: Writer) -> None:
    for case in writer.write("planted", tokens=700):
        places = re.findall(r"Stock list of (\w+) (\w+)\.", case.prompt)
        asked = re.search(r"are in (\w+) (\w+)\?<\|a\|>$", case.prompt)
        assert asked is not None
        others = [name for kind, name in places if kind == asked[1] and name != asked[2]]
        assert any(name[0] == asked[2][0] for name in others)
