"""The prompt format is exact, and no part can forge a mark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.errors import ConfigurationError
from validation import prompts
from validation.cli import shipped_model
from validation.prompts import FORMS, PLAIN, SHIPPED, YARDSTICK, form_for

if TYPE_CHECKING:
    from pathlib import Path


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


class Words:
    """A tokenizer that knows `words`."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self._words)}


def test_the_tokenizer_decides(tiny_model_paths: dict[str, Path]) -> None:
    assert form_for(ModelRunner(shipped_model(), "float32", "cpu").tokenizer) is SHIPPED
    assert form_for(ModelRunner(tiny_model_paths["llama"], "float32", "cpu").tokenizer) is PLAIN
    assert form_for(Words(*prompts.MARKS, "a")) is YARDSTICK
    assert form_for(Words(*prompts.MARKS[1:], "a")) is PLAIN


def test_a_name_decides_first() -> None:
    for name, form in FORMS.items():
        assert form.name == name
        assert form_for(Words(), name) is form
    with pytest.raises(ConfigurationError, match="'markdown' is unknown; use shipped, yardstick, plain"):
        form_for(Words(), "markdown")


def test_marks_or_headings() -> None:
    parts = ("Answer.", ["one", "two"], "How many?")
    assert SHIPPED.render(*parts) == "<|inst|>Answer.<|doc|>one<|doc|>two<|q|>How many?<|a|>"
    assert PLAIN.render(*parts) == "Answer.\n\none\n\ntwo\n\nQuestion: How many?\nAnswer: "
    assert SHIPPED.render_pages("Read.", ["one", "tw"]) == "<|inst|>Read.<|doc|>one<|doc|>tw"
    assert PLAIN.render_conversation("Hi.", [prompts.Turn("q", "a", ("d",))], "r") == (
        "Hi.\n\nd\n\nQuestion: q\nAnswer: a\n\n\nQuestion: r\nAnswer: "
    )


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_openings_differ(form: object) -> None:
    assert form in (SHIPPED, YARDSTICK, PLAIN)
    for source in (form.instructions, form.system_prompts):  # type: ignore[attr-defined]
        assert len(set(source)) == len(source) >= 6


def test_a_mark_inside_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match="must not hold the mark"):
        PLAIN.render_pages("Read.", ["<|doc|>"])
