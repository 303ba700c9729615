"""Prompts of the OpenAI API as token ids: texts, ids and chats; other values are refused."""

import asyncio
import threading
from functools import partial

import pytest

from semblend_trt.chats import PromptError
from semblend_trt.prompts import SHORT_BODY_BYTES, PromptReader, PromptTooLongError, ReadingThreads

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ raise_exception('no') if tools }}<a>"


@pytest.fixture
def reader(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE, raising=False)
    return PromptReader(tokenizer)


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [64, 65, 66], [[64, 65, 66]]])
def test_a_completion_is_a_text_or_ids(reader, tokenizer, prompt):
    assert tokenizer.encode("abc") == [64, 65, 66]
    assert reader.completion({"prompt": prompt}) == [64, 65, 66]


def test_a_chat_goes_through_the_template(reader, tokenizer):
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": parts}, {"role": "assistant"}]
    assert reader.chat({"messages": messages}) == tokenizer.encode("<system>a<user>b\nc<assistant><a>")


@pytest.mark.parametrize(
    "prompt", [None, 5, [], ["a", "b"], [[1], [2]], [1, "a"], [1.5], [True], {"a": 1}, "\ud800", [[]]]
)
def test_other_prompts_are_refused(reader, prompt):
    with pytest.raises(PromptError):
        reader.completion({"prompt": prompt})


@pytest.mark.parametrize("name", ["truncate_prompt_tokens", "prompt_embeds", "suffix", "add_special_tokens"])
def test_fields_that_make_another_prompt_are_refused_by_name(reader, name):
    with pytest.raises(PromptError, match=name):
        reader.completion({"prompt": "a", name: 3})


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (None, "messages: Input should be a valid list"),
        ([], "messages: List should have at least 1 item"),
        ([{"content": "a"}], "messages.0.role: Field required"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0.type: Input should be 'text'"),
    ],
)
def test_other_chats_are_refused(reader, messages, problem):
    with pytest.raises(PromptError, match=problem):
        reader.chat({"messages": messages})


class Watched:
    """A tokenizer that must not be asked."""

    chat_template = TEMPLATE

    def get_vocab(self):
        return {"a": 0, "the longest": 1}

    def get_chat_template(self, *_):
        return TEMPLATE

    def apply_chat_template(self, messages, **_):
        return "".join(message["content"] for message in messages)

    def encode(self, text, **_):
        assert len(text) <= 2 * len("the longest")
        return [0]


@pytest.mark.parametrize("size", [22, 23])
def test_what_cannot_fit_is_not_read(size):
    reader, text = PromptReader(Watched(), max_tokens=2), "a" * size
    chat = partial(reader.chat, {"messages": [{"role": "user", "content": text}]})
    for read in (chat, *(partial(reader.completion, {"prompt": each}) for each in (text, [1] * (size - 20)))):
        if size == 22:
            assert read()
        else:
            with pytest.raises(PromptTooLongError, match=r"more than the (22|2) "):
                read()


def test_short_prompts_wait_for_no_long_one(tokenizer):
    begun, go_on = threading.Event(), threading.Event()

    def wait(_):
        begun.set()
        return go_on.wait(10)

    async def read():
        threads = ReadingThreads(tokenizer)
        long = asyncio.ensure_future(threads.read(SHORT_BODY_BYTES + 1, wait))
        while not begun.is_set():
            await asyncio.sleep(0)
        short = await threads.read(SHORT_BODY_BYTES, lambda reader: reader.completion({"prompt": "abc"}))
        assert (short, long.done()) == ([64, 65, 66], False)
        go_on.set()
        await long
        threads.close()

    asyncio.run(read())
