"""The prompt format is exact, no part can forge a mark, and a model is asked in the form that its tokenizer knows."""

import pytest

from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.errors import ConfigurationError
from validation import prompts
from validation.prompts import FORMS, PLAIN, SHIPPED, YARDSTICK, Turn, form_for

TURNS = [Turn("q1", "a1", ("d1",)), Turn("q2", "a2")]


class Words:
    """A tokenizer that knows `words`."""

    def __init__(self, *words):
        self._words = words

    def get_vocab(self):
        return {word: number for number, word in enumerate(self._words)}


def test_parts_are_joined_in_order_under_marks_or_headings():
    parts = ("Answer.", ["one", "two"], "How many?")
    marked = "<|inst|>Answer.<|doc|>one<|doc|>two<|q|>How many?<|a|>"
    assert prompts.render(*parts) == SHIPPED.render(*parts) == marked
    assert PLAIN.render(*parts) == "Answer.\n\none\n\ntwo\n\nQuestion: How many?\nAnswer: "
    assert SHIPPED.render_pages("Read.", ["one", "tw"]) == "<|inst|>Read.<|doc|>one<|doc|>tw"


def test_conversations_interleave_turns():
    assert prompts.render_conversation("system", TURNS, "q3") == (
        "<|inst|>system<|doc|>d1<|q|>q1<|a|>a1<|end|><|q|>q2<|a|>a2<|end|><|q|>q3<|a|>"
    )
    assert PLAIN.render_conversation("Hi.", TURNS[:1], "r") == (
        "Hi.\n\nd1\n\nQuestion: q1\nAnswer: a1\n\n\nQuestion: r\nAnswer: "
    )
    assert prompts.render_conversation("system", [], "q1") == prompts.render("system", [], "q1")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_openings_differ_and_the_shipped_ones_differ_in_length(form):
    for source in (form.instructions, form.system_prompts):
        assert len(set(source)) == len(source) >= 6
        assert form is YARDSTICK or len({len(text) for text in source}) == len(source)


@pytest.mark.parametrize("mark", [*prompts.MARKS, "<|endoftext|>"])
def test_marks_inside_a_part_are_refused(mark):
    with pytest.raises(ValueError, match="must not hold the mark"):
        prompts.render("Answer.", [f"text {mark}"], "How many?")
    with pytest.raises(ValueError, match="must not hold the mark"):
        PLAIN.render_pages("Read.", [mark])


def test_the_tokenizer_decides_on_the_form_unless_one_is_named(shipped, tiny_model_paths):
    assert form_for(shipped.tokenizer) is SHIPPED
    assert form_for(ModelRunner(tiny_model_paths["llama"], "float32", "cpu").tokenizer) is PLAIN
    assert form_for(Words(*prompts.MARKS, "a")) is YARDSTICK
    assert form_for(Words(*prompts.MARKS[1:], "a")) is PLAIN
    assert all(form_for(Words(), name) is form and form.name == name for name, form in FORMS.items())
    with pytest.raises(ConfigurationError, match="'markdown' is unknown; use shipped, yardstick, plain"):
        form_for(Words(), "markdown")
