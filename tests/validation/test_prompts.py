"""The prompt format is exact, no part can forge a mark, and a model is asked in the form that its tokenizer knows."""

import hashlib
from types import SimpleNamespace

import pytest

from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.errors import ConfigurationError
from validation import prompts
from validation.prompts import FORMS, PLAIN, SHIPPED, YARDSTICK, Turn, form_for

PARTS = ("Answer.", ["one", "two"], "How many?")
TURNS = [Turn("q1", "a1", ("d1",)), Turn("q2", "a2")]


def knowing(*words):
    """A tokenizer that knows these words."""
    return SimpleNamespace(get_vocab=lambda: {word: number for number, word in enumerate(words)})


def test_parts_are_joined_in_order_under_marks_or_headings():
    marked = "<|inst|>Answer.<|doc|>one<|doc|>two<|q|>How many?<|a|>"
    assert prompts.render(*PARTS) == SHIPPED.render(*PARTS) == marked
    assert PLAIN.render(*PARTS) == "Answer.\n\none\n\ntwo\n\nQuestion: How many?\nAnswer: "
    assert SHIPPED.render_pages("Read.", ["one", "tw"]) == "<|inst|>Read.<|doc|>one<|doc|>tw"


def test_conversations_interleave_turns():
    assert prompts.render_conversation("system", TURNS, "q3") == (
        "<|inst|>system<|doc|>d1<|q|>q1<|a|>a1<|end|><|q|>q2<|a|>a2<|end|><|q|>q3<|a|>"
    )
    assert PLAIN.render_conversation("Hi.", TURNS[:1], "r") == (
        "Hi.\n\nd1\n\nQuestion: q1\nAnswer: a1\n\n\nQuestion: r\nAnswer: "
    )
    assert prompts.render_conversation("system", [], "q1") == prompts.render("system", [], "q1")


@pytest.mark.parametrize("mark", [*prompts.MARKS, "<|endoftext|>"])
def test_marks_inside_a_part_are_refused(mark):
    with pytest.raises(ValueError, match="must not hold the mark"):
        prompts.render("Answer.", [f"text {mark}"], "How many?")
    with pytest.raises(ValueError, match="must not hold the mark"):
        PLAIN.render_pages("Read.", [mark])


def test_the_tokenizer_decides_on_the_form_unless_one_is_named(shipped, tiny_model_paths, chat_tokenizer):
    assert form_for(shipped.tokenizer) is SHIPPED
    assert form_for(ModelRunner(tiny_model_paths["llama"], "float32", "cpu").tokenizer) is PLAIN
    assert form_for(knowing(*prompts.MARKS, "a")) is YARDSTICK
    assert form_for(knowing(*prompts.MARKS[1:], "a")) is PLAIN
    assert all(form_for(knowing(), name) is form and form.name == name for name, form in FORMS.items())
    with pytest.raises(ConfigurationError, match="'markdown' is unknown; use shipped, yardstick, plain, chat"):
        form_for(knowing(), "markdown")
    assert form_for(chat_tokenizer(None)) is PLAIN
    with pytest.raises(ConfigurationError, match="has no chat template"):
        form_for(chat_tokenizer(None), "chat")


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
SILENT = "{% for each in messages if each.role != 'system' %}[{{ each.role }}]{{ each.content }}{% endfor %}"


@pytest.mark.promise(
    "commands",
    "An instruct model is asked by its own chat template, also by one without a system turn; one that cannot be "
    "used is refused",
)
def test_a_chat_template_writes_system_and_user_turns(chat_tokenizer):
    tokenizer = chat_tokenizer()
    form = form_for(tokenizer)
    assert form.render(*PARTS) == (
        "<|start|>system\nAnswer.<|stop|>\n<|start|>user\nContext:\n\none\n\ntwo\n\nHow many?<|stop|>\n"
        "<|start|>assistant\n"
    )
    assert form.render_conversation("Hi.", TURNS, "q3").endswith(
        "Context:\n\nd1\n\nq1<|stop|>\n<|start|>assistant\na1<|stop|>\n<|start|>user\nq2<|stop|>\n<|start|>assistant\n"
        "a2<|stop|>\n<|start|>user\nq3<|stop|>\n<|start|>assistant\n"
    )
    assert form.render_pages("Read.", ["one", "tw "]).endswith("<|start|>user\nContext:\n\none\n\ntw ")
    assert form.template_digest == hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()
    assert form.head == "<|start|>"
    assert tokenizer.convert_ids_to_tokens(form.end_id) == "<|stop|>"
    assert form_for(tokenizer, "plain") is PLAIN
    assert PLAIN.template_digest is None


@pytest.mark.promise("commands", "An instruct model is asked by...")
@pytest.mark.parametrize("template", [NO_SYSTEM + SILENT, SILENT])
def test_a_template_without_system_turn_gets_the_instruction_in_the_first_user_turn(chat_tokenizer, template):
    form = form_for(chat_tokenizer(template))
    assert form.render(*PARTS) == "[user]Answer.\n\nContext:\n\none\n\ntwo\n\nHow many?"
    assert form.render_conversation("Hi.", TURNS[1:], "q3") == "[user]Hi.\n\nq2[assistant]a2[user]q3"
    assert form.end_id is None


@pytest.mark.promise("commands", "An instruct model is asked by...")
@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for %}", "Hello.", "{{ messages | length }}"])
def test_a_template_that_cannot_be_used_is_refused_in_one_sentence(chat_tokenizer, template):
    with pytest.raises(ConfigurationError, match=r"^The model's chat template cannot be used.*--form\.$"):
        form_for(chat_tokenizer(template))
    assert form_for(chat_tokenizer(template), "plain") is PLAIN


def test_no_part_of_a_chat_forges_a_turn(chat_tokenizer):
    with pytest.raises(ValueError, match="must not hold"):
        form_for(chat_tokenizer()).render("Answer.", ["text <|stop|>"], "How many?")
