"""Prompts of the OpenAI API as token ids: texts, ids, chats by the tokenizer's template, and what is no prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from semblend_trt.fleet.router.prompts import Piece, PromptError, PromptReader
from semblend_trt.model_tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ raise_exception('no') if tools }}<a>"


@pytest.fixture(scope="module")
def tokenizer(tiny_qwen2_path: Path) -> Any:
    return load_tokenizer(str(tiny_qwen2_path))


@pytest.fixture
def reader(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> PromptReader:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE, raising=False)
    return PromptReader(tokenizer)


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [64, 65, 66], [[64, 65, 66]]])
def test_a_completion_is_a_text_or_ids(reader: PromptReader, tokenizer: Any, prompt: Any) -> None:
    assert tokenizer.encode("abc") == [64, 65, 66]
    assert reader.completion({"prompt": prompt}) == [64, 65, 66]


def test_a_chat_goes_through_the_template(reader: PromptReader, tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": parts}, {"role": "assistant"}]
    assert reader.chat({"messages": messages}) == tokenizer.encode("<system>a<user>b\nc<assistant><a>")
    assert reader.pieces({"messages": messages}) == [
        Piece("system", "a"),
        Piece("user", "b\nc"),
        Piece("assistant", ""),
    ]


def test_a_completions_pieces_are_its_text(reader: PromptReader) -> None:
    assert reader.pieces({"prompt": ["abc"]}) == [Piece(None, "abc")]
    assert reader.pieces({"prompt": [1, 2]}) == []


@pytest.mark.parametrize(
    "prompt", [None, 5, [], ["a", "b"], [[1], [2]], [1, "a"], [1.5], [True], {"a": 1}, "\ud800", [[]]]
)
def test_other_prompts_are_refused(reader: PromptReader, prompt: Any) -> None:
    with pytest.raises(PromptError):
        reader.completion({"prompt": prompt})


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (None, "messages is a list of objects"),
        ([], "messages is a list of objects"),
        (["a"], "messages is a list of objects"),
        ([{"content": "a"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is int; give text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\] holds more than text"),
    ],
)
def test_other_chats_are_refused(reader: PromptReader, messages: Any, problem: str) -> None:
    with pytest.raises(PromptError, match=problem):
        reader.chat({"messages": messages})


def test_what_the_template_raises_is_told(reader: PromptReader) -> None:
    with pytest.raises(PromptError, match="the model's chat template does not take these messages: no"):
        reader.chat({"messages": [{"role": "user", "content": "a"}], "tools": [{}]})


def test_without_a_template_there_is_no_chat(tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="has no chat template; use /v1/completions"):
        PromptReader(tokenizer).chat({"messages": [{"role": "user", "content": "a"}]})
