"""Answers of the OpenAI API: their forms, and how much of a growing text may be shown."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine_wrapper.embedded.request import CompletionOutput, RequestOutput
from engine_wrapper.embedded.server import AnswerForm, TextSoFar, usage_of

OUTPUT = RequestOutput(
    request_id=1,
    prompt=None,
    prompt_token_ids=[1, 2, 3, 4, 5],
    outputs=[CompletionOutput("two", [6, 7], "stop")],
    cached_tokens=1,
    reused_tokens=2,
    computed_tokens=3,
    time_to_first_token=0.1,
    finished=True,
)


def shown(parts: list[str], stops: tuple[str, ...] = ()) -> tuple[list[str], TextSoFar]:
    """The deltas of an answer that grows by `parts`, as far as it goes."""
    text, deltas, whole = TextSoFar(stops), [], ""
    for at, part in enumerate(parts):
        whole += part
        deltas.append(text.delta(whole, is_last=at == len(parts) - 1))
        if text.is_stopped:
            break
    return deltas, text


@given(st.lists(st.text("ab\n", max_size=4), min_size=1), st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3))
@example(["a", "ab"], ["aab"])
def test_deltas_add_up_to_the_text_before_its_first_stop(parts: list[str], stops: list[str]) -> None:
    deltas, text = shown(parts, tuple(stops))
    whole = "".join(parts)
    ends = [at for at in map(whole.find, stops) if at >= 0]
    # A stop that ends early is seen early, though one that begins before it may come: the text shown holds neither.
    assert "".join(deltas) == text.shown
    assert whole.startswith(text.shown)
    assert not any(stop in text.shown for stop in stops)
    assert text.is_stopped == bool(ends)
    if not ends:
        assert text.shown == whole


def test_half_a_character_is_held_back() -> None:
    text = TextSoFar()
    assert text.delta("a\ufffd", is_last=False) == "a"
    assert text.delta("aé", is_last=False) == "é"
    assert text.delta("aé\ufffd", is_last=True) == "\ufffd"


def test_what_may_become_a_stop_is_held_back() -> None:
    deltas, text = shown(["one\n", "two\n", "\nthree"], ("\n\n",))
    assert deltas == ["one", "\ntwo", ""]
    assert text.is_stopped


def test_usage_says_where_the_prompts_tokens_came_from() -> None:
    assert usage_of(OUTPUT) == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1, "reused_tokens": 2, "computed_tokens": 3},
    }


@pytest.mark.parametrize("is_chat", [False, True])
def test_whole_answers_and_chunks_have_the_apis_form(is_chat: bool) -> None:
    form = AnswerForm("tiny", is_chat)
    whole = form.whole("two", "stop", OUTPUT)
    lines = [form.chunk("t", None, is_first=True), form.chunk("wo", "stop", is_first=False), form.usage_chunk(OUTPUT)]
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert all(line.endswith(b"\n\n") for line in lines)
    assert {answer["id"] for answer in [whole, *chunks]} == {whole["id"]}
    assert all(before["created"] == after["created"] for before, after in pairwise([whole, *chunks]))
    assert whole["usage"] == chunks[-1]["usage"]
    assert chunks[-1]["choices"] == []
    if is_chat:
        assert whole["object"] == "chat.completion"
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": "two"}
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:2]]
        assert deltas == [{"role": "assistant", "content": "t"}, {"content": "wo"}]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    else:
        assert {answer["object"] for answer in [whole, *chunks]} == {"text_completion"}
        assert [answer["choices"][0]["text"] for answer in [whole, *chunks[:2]]] == ["two", "t", "wo"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:2]] == [None, "stop"]
