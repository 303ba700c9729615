"""The prompt format is exact, and no part can forge a mark."""

import pytest

from validation import prompts


def test_render_joins_the_parts_in_order() -> None:
    assert prompts.render("Answer.", ["one", "two"], "How many?") == (
        "<|inst|>Answer.<|doc|>one<|doc|>two<|q|>How many?<|a|>"
    )


def test_render_conversation_interleaves_turns() -> None:
    turns = [prompts.Turn("q1", "a1", ("d1",)), prompts.Turn("q2", "a2")]
    assert prompts.render_conversation("system", turns, "q3") == (
        "<|inst|>system<|doc|>d1<|q|>q1<|a|>a1<|end|><|q|>q2<|a|>a2<|end|><|q|>q3<|a|>"
    )


def test_conversation_without_turns_equals_a_plain_prompt() -> None:
    assert prompts.render_conversation("system", [], "q1") == prompts.render("system", [], "q1")


def test_instructions_and_system_prompts_differ_in_length() -> None:
    assert len(prompts.INSTRUCTIONS) >= 12
    assert len(prompts.SYSTEM_PROMPTS) >= 6
    assert len({len(text) for text in prompts.INSTRUCTIONS}) == len(prompts.INSTRUCTIONS)
    assert len({len(text) for text in prompts.SYSTEM_PROMPTS}) == len(prompts.SYSTEM_PROMPTS)


@pytest.mark.parametrize("mark", [*prompts.MARKS, "<|endoftext|>"])
def test_marks_inside_a_part_are_refused(mark: str) -> None:
    with pytest.raises(ValueError, match="must not hold the mark"):
        prompts.render("Answer.", [f"text {mark}"], "How many?")
