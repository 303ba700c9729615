"""A prompt of the OpenAI API has the tokens that the engine would compute, or is refused by name."""

import asyncio
import contextlib
import io
import json
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.prompts import (
    SHORT_BODY_BYTES,
    ChatError,
    PromptError,
    PromptReader,
    PromptTooLongError,
    ReadingThreads,
    render_chat,
)
from tests.random_models import byte_tokenizer
from tests.semblend_trt.chat_bodies import READ, REFUSED, TEMPLATES, USER
from validation.estimate.prompts import HEAD_BYTES, Encoder, PromptLog, encoded

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ raise_exception('no') if tools }}<a>"


@pytest.fixture
def reader(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE, raising=False)
    return PromptReader(tokenizer)


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [64, 65, 66], [[64, 65, 66]]])
def test_a_completion_is_a_text_or_ids(reader, tokenizer, prompt):
    assert tokenizer.encode("abc") == [64, 65, 66]
    assert reader.completion({"prompt": prompt}) == [64, 65, 66]


OTHERS = [None, 5, [], ["a", "b"], [[1], [2]], [1, "a"], [1.5], [True], {"a": 1}, "\ud800", [[]]]
CHANGING = ("truncate_prompt_tokens", "prompt_embeds", "suffix", "add_special_tokens")


@pytest.mark.parametrize(
    ("body", "told"),
    [*(({"prompt": each}, "prompt") for each in OTHERS), *(({"prompt": "a", each: 3}, each) for each in CHANGING)],
)
def test_other_prompts_and_fields_that_make_one_are_refused(reader, body, told):
    with pytest.raises(PromptError, match=told):
        reader.completion(body)


def encode_short(text, **_):
    assert len(text) <= 2 * len("the longest")
    return [0]


# It must not be asked for the tokens of long texts.
WATCHED = SimpleNamespace(
    chat_template=TEMPLATE,
    get_vocab=lambda: {"a": 0, "the longest": 1},
    get_chat_template=lambda *_: TEMPLATE,
    apply_chat_template=lambda messages, **_: "".join(message["content"] for message in messages),
    encode=encode_short,
)


@pytest.mark.parametrize("size", [22, 23])
def test_what_cannot_fit_is_not_read(size):
    reader, text = PromptReader(WATCHED, max_tokens=2), "a" * size
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


WHOLE = "{{ messages | tojson }}"
MACRO = "{% macro w(i) %}{% for c in i %}{% endfor %}{% endmacro %}"


def rendered(body, template):
    return render_chat(body, byte_tokenizer(template))[0]


@pytest.mark.promise("fleet", "Placement, the embedded server and the...")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_alike_is_refused_by_name(name):
    body, expected = REFUSED[name]
    for template in (WHOLE, *TEMPLATES.values()):
        with pytest.raises(ChatError) as refused:
            rendered(body, template)
        assert refused.value.name == expected


@pytest.mark.parametrize(
    ("template", "takes_parts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for c in m['content'] %}{% endfor %}{% endfor %}", True),
        ("{% set x = messages[1:] %}{% for m in x %}{% for c in m.content | list %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}", True),
        (MACRO + "{% for m in messages %}{{ w(m.content) }}{% endfor %}", True),
        (MACRO + "{% for m in messages %}{{ w(i=m.content) }}{% endfor %}", True),
        ("{% macro w(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ w(tools) }}", False),
        ("{% set a, b = messages, 1 %}{% for m in a %}{% for c in m.content %}{% endfor %}{% endfor %}", False),
        ("{% for k, m in messages %}{% for c in content %}{% endfor %}{% endfor %}", False),
    ],
)
def test_templates_that_go_through_a_content_get_its_parts(template, takes_parts):
    body, seen = READ["content as parts"], "{{ messages[0].content is string }}"
    # What the template itself does with them is not rendered.
    assert rendered(body, f"{{% if false %}}{template}{{% endif %}}{seen}") == str(not takes_parts)


def test_a_tokenizer_without_a_template_and_one_of_gpt_oss_are_named():
    for template, name in ((None, "no_template"), ("<|channel|>" + WHOLE, "own_code")):
        with pytest.raises(ChatError) as refused:
            rendered({"messages": [USER]}, template)
        assert refused.value.name == name


@pytest.mark.promise("fleet", "Placement, the embedded server and the...")
def test_placement_and_the_estimate_read_the_same_tokens(tmp_path):
    for kind, template in TEMPLATES.items():
        tokenizer = byte_tokenizer(template)
        tokenizer.save_pretrained(tmp_path / kind)
        encoder, reader = Encoder(str(tmp_path / kind)), PromptReader(tokenizer)
        bodies = [body for body in READ.values() if body is not READ["special tokens"]]
        lines = "".join(json.dumps(body) + "\n" for body in bodies).encode()
        log = PromptLog(io.BufferedReader(io.BytesIO(lines), HEAD_BYTES), encoder)
        found = {prompt.line: ids.tolist() for prompt, ids in encoded(log, encoder)}
        for line, body in enumerate(bodies, 1):
            try:
                assert reader.chat(body) == found.pop(line)
            except ChatError:
                assert line not in found
        assert found == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "id", "function"]), inner)
    ),
    max_leaves=6,
)
FIELDS = ["role", "content", "tool_calls", "name", "reasoning", "tool_call_id", "task", "tools"]


@given(
    st.lists(st.dictionaries(st.sampled_from(FIELDS), JSON), max_size=3),
    st.dictionaries(st.sampled_from(["tools", "documents", "chat_template_kwargs", "kv_transfer_params"]), JSON),
)
def test_no_body_makes_it_fail(messages, fields):
    body = {"messages": [{"role": "user", **each} for each in messages], **fields}
    with contextlib.suppress(ChatError):
        rendered(body, TEMPLATES["macro"])
