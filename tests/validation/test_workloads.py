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


def documents_of(prompt: str) -> list[str]:
    return [part.split("<|")[0] for part in prompt.split(prompts.DOCUMENT_MARK)[1:]]


def test_equal_seeds_write_equal_cases(cases: list[Case]) -> None:
    assert write_batches(DEFAULT_BATCHES, count, 1, 8_192) == cases
    other = write_batches(DEFAULT_BATCHES, count, 2, 8_192)
    assert [case.id for case in other] == [case.id for case in cases]
    assert all(ours.prompt != theirs.prompt for ours, theirs in zip(cases, other, strict=True))


def test_a_batch_alone_writes_the_cases_it_writes_among_others(cases: list[Case]) -> None:
    alone = write_batches(DEFAULT_BATCHES[-1:], count, 1, 8_192)
    assert alone == [case for case in cases if case in alone]


def test_ids_differ_and_every_group_has_one_timed_case(cases: list[Case]) -> None:
    assert len({case.id for case in cases}) == len(cases)
    for group in groups(cases):
        assert [case.is_timed for case in group] == [True] + [False] * (len(group) - 1)
        assert len({case.donors for case in group}) == 1 or group[0].workload == REPEAT


def test_prompts_have_their_nominal_size(cases: list[Case]) -> None:
    for case in cases:
        size = SIZES[case.size]
        assert 0.7 * size < count(case.prompt) <= 1.05 * size, case.id


def test_prompts_that_do_not_fit_the_context_are_left_out() -> None:
    assert {case.size for case in write_batches(DEFAULT_BATCHES, count, 1, 3_000)} == {"1k", "2k"}
    with pytest.raises(ConfigurationError, match="leaves 1000 for a prompt"):
        write_batches(DEFAULT_BATCHES, count, 1, 1_000)


def test_reordered_prompts_hold_the_donors_documents_in_another_order(cases: list[Case]) -> None:
    for case in cases:
        if case.workload == REORDERED and case.known_answer:
            donor, prompt = documents_of(case.donors[0]), documents_of(case.prompt)
            assert sorted(donor) == sorted(prompt)
            assert donor != prompt
            assert opening(case.donors[0]) != opening(case.prompt)


def test_system_prompt_keeps_the_documents_and_shifts_them(cases: list[Case]) -> None:
    for case in cases:
        if case.workload == SYSTEM_PROMPT and case.known_answer:
            assert documents_of(case.donors[0]) == documents_of(case.prompt)
            assert count(opening(case.donors[0])) != count(opening(case.prompt))


def test_cut_turns_are_the_end_of_the_donors_conversation(cases: list[Case]) -> None:
    for case in cases:
        if case.workload == CUT_TURNS:
            [donor] = case.donors
            kept = case.prompt[len(opening(case.prompt)) : case.prompt.rindex(prompts.QUESTION_MARK)]
            assert kept in donor
            assert not donor.startswith(opening(case.prompt) + kept)


def test_unrelated_prompts_share_no_document(cases: list[Case]) -> None:
    unrelated = [case for case in cases if case.workload == UNRELATED]
    assert unrelated
    for case in unrelated:
        assert case.expects is Expectation.NONE
        assert not set(documents_of(case.donors[0])) & set(documents_of(case.prompt))


def test_repeats_repeat_exactly(cases: list[Case]) -> None:
    repeats = [case for case in cases if case.workload == REPEAT]
    assert repeats
    assert all(case.donors == (case.prompt,) and case.expects is Expectation.EXACT_PREFIX for case in repeats)


def test_known_answers_stand_in_the_prompt(cases: list[Case]) -> None:
    for case in cases:
        if case.known_answer:
            assert case.reference is not None
            item = re.search(r"How many (\w+) are in ([^?<]+)\?<\|a\|>$", case.prompt)
            if item:
                [document] = [
                    text for text in documents_of(case.prompt) if text.startswith(f"Stock list of {item[2]}.")
                ]
                assert f"\n{item[1]}: {case.reference}" in document
            else:
                assert case.reference in case.prompt


def test_questions_of_a_group_differ_from_each_other_and_from_the_donors(cases: list[Case]) -> None:
    for group in groups(cases):
        asked = [text[text.rindex(prompts.QUESTION_MARK) :] for text in map(last_question, group) if text]
        assert len(set(asked)) == len(asked)
        if group[0].workload in HARMLESS and group[0].known_answer:
            assert group[0].donors[0][group[0].donors[0].rindex(prompts.QUESTION_MARK) :] not in asked


def test_prose_is_continued_by_its_reference(cases: list[Case]) -> None:
    prose = [case for case in cases if not case.known_answer]
    assert {case.workload for case in prose} == {REORDERED, SYSTEM_PROMPT, REPEAT}
    for case in prose:
        assert case.reference is not None
        assert case.reference.startswith(" ")
        assert not case.prompt.endswith(" ")


def test_plain_text_has_no_marks(cases: list[Case]) -> None:
    text = prompts.in_plain_text(cases[0].prompt)
    assert "<|" not in text
    assert text.endswith("?\nAnswer: ")


def opening(prompt: str) -> str:
    return prompt[: prompt.index(prompts.DOCUMENT_MARK)]


def last_question(case: Case) -> str:
    return case.prompt if case.known_answer else ""
