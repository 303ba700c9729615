"""The built-in cases are seeded, sized, and hold what their workload promises."""

from __future__ import annotations

import re

import pytest

from semblend_trt.errors import ConfigurationError
from validation import prompts
from validation.cases import Case, Expectation, groups
from validation.workloads import (
    CUT_TURNS,
    DEFAULT_BATCHES,
    HARMLESS,
    REORDERED,
    REPEAT,
    SIZES,
    SYSTEM_PROMPT,
    UNRELATED,
    write_batches,
)


def count(text: str) -> int:
    """Words, digits and marks: near enough to a tokenizer for tests of sizes."""
    return len(re.findall(r"<\|\w+\|>|\d|\w+|[^\w\s]|\n", text))


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return write_batches(DEFAULT_BATCHES, count, 1, 8_192)


def of(cases: list[Case], workload: str) -> list[Case]:
    """The look-ups of a workload."""
    found = [case for case in cases if case.workload == workload and case.known_answer]
    assert found
    return found


def documents_of(prompt: str) -> list[str]:
    return [part.split("<|")[0] for part in prompt.split(prompts.DOCUMENT_MARK)[1:]]


def opening(prompt: str) -> str:
    return prompt[: prompt.index(prompts.DOCUMENT_MARK)]


def question(prompt: str) -> str:
    return prompt[prompt.rindex(prompts.QUESTION_MARK) :]


def test_equal_seeds_write_equal_cases_alone_and_among_other_batches(cases: list[Case]) -> None:
    assert write_batches(DEFAULT_BATCHES, count, 1, 8_192) == cases
    other = write_batches(DEFAULT_BATCHES, count, 2, 8_192)
    assert [case.id for case in other] == [case.id for case in cases]
    assert all(ours.prompt != theirs.prompt for ours, theirs in zip(cases, other, strict=True))
    alone = write_batches(DEFAULT_BATCHES[-1:], count, 1, 8_192)
    assert alone == [case for case in cases if case in alone]


def test_ids_differ_every_group_has_one_timed_case_and_asks_different_questions(cases: list[Case]) -> None:
    assert len({case.id for case in cases}) == len(cases)
    for group in groups(cases):
        assert [case.is_timed for case in group] == [True] + [False] * (len(group) - 1)
        assert len({case.donors for case in group}) == len({case.prompt for case in group}) - len(group) + 1 == 1
        if group[0].workload in HARMLESS and group[0].known_answer:
            assert question(group[0].donors[0]) not in [question(case.prompt) for case in group]


def test_prompts_have_their_nominal_size_and_fit_the_context(cases: list[Case]) -> None:
    for case in cases:
        assert 0.7 * SIZES[case.size] < count(case.prompt) <= 1.05 * SIZES[case.size], case.id
    assert {case.size for case in write_batches(DEFAULT_BATCHES, count, 1, 3_000)} == {"1k", "2k"}
    with pytest.raises(ConfigurationError, match="leaves 1000 for a prompt"):
        write_batches(DEFAULT_BATCHES, count, 1, 1_000)


def test_documents_come_again_reordered_or_shifted(cases: list[Case]) -> None:
    for case in of(cases, REORDERED):
        donor, prompt = documents_of(case.donors[0]), documents_of(case.prompt)
        assert sorted(donor) == sorted(prompt)
        assert donor != prompt
        assert opening(case.donors[0]) != opening(case.prompt)
    for case in of(cases, SYSTEM_PROMPT):
        assert documents_of(case.donors[0]) == documents_of(case.prompt)
        assert count(opening(case.donors[0])) != count(opening(case.prompt))


def test_cut_turns_are_the_end_of_the_donors_conversation(cases: list[Case]) -> None:
    for case in of(cases, CUT_TURNS):
        [donor] = case.donors
        kept = case.prompt[len(opening(case.prompt)) : case.prompt.rindex(prompts.QUESTION_MARK)]
        assert kept in donor
        assert not donor.startswith(opening(case.prompt) + kept)


def test_unrelated_prompts_share_no_document_and_repeats_are_word_for_word(cases: list[Case]) -> None:
    for case in of(cases, UNRELATED):
        assert case.expects is Expectation.NONE
        assert not set(documents_of(case.donors[0])) & set(documents_of(case.prompt))
    assert all(case.donors == (case.prompt,) for case in cases if case.workload == REPEAT)
    assert all(case.expects is Expectation.EXACT_PREFIX for case in of(cases, REPEAT))


def test_known_answers_stand_in_the_prompt(cases: list[Case]) -> None:
    for case in cases:
        item = re.search(r"How many (\w+) are in ([^?<]+)\?<\|a\|>$", case.prompt)
        if item:
            [document] = [text for text in documents_of(case.prompt) if text.startswith(f"Stock list of {item[2]}.")]
            assert f"\n{item[1]}: {case.reference}" in document
        elif case.known_answer:
            assert str(case.reference) in case.prompt


def test_prose_is_continued_by_its_reference(cases: list[Case]) -> None:
    prose = [case for case in cases if not case.known_answer]
    assert {case.workload for case in prose} == {REORDERED, SYSTEM_PROMPT, REPEAT}
    assert all(str(case.reference).startswith(" ") and not case.prompt.endswith(" ") for case in prose)


def test_plain_text_has_no_marks(cases: list[Case]) -> None:
    text = prompts.in_plain_text(cases[0].prompt)
    assert "<|" not in text
    assert text.endswith("?\nAnswer: ")
