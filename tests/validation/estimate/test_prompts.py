"""What prompts are read from, and that lines without one are counted and cost no other line."""

import inspect
import io
import json
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.random_models import byte_tokenizer
from validation.estimate.prompts import Encoder, PromptLog, encoded

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
RENDERED = "system\nBe brief.<|end|>user\nWhy?<|end|>"
ENCODER = Encoder()


def log_of(content, *options, encoder=ENCODER):
    if isinstance(content, list):
        content = "".join(json.dumps(each) + "\n" for each in content)
    content = content.encode() if isinstance(content, str) else content
    return PromptLog(io.BufferedReader(io.BytesIO(content), 1 << 20), encoder, *options)


def contents(log):
    return [each.content if isinstance(each.content, str) else each.content.tolist() for each in log]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"model": "m", "messages": CHAT}, [RENDERED]),
        ({"custom_id": "1", "method": "POST", "body": {"messages": CHAT}}, [RENDERED]),
        ({"id": "x", "messages": json.dumps(CHAT), "response": {"choices": []}}, [RENDERED]),
        ({"proxy_server_request": json.dumps({"body": {"messages": CHAT}})}, [RENDERED]),
        ({"system": "Be brief.", "messages": CHAT[1:]}, [RENDERED]),
        ({"instructions": "Be brief.", "input": CHAT[1:]}, [RENDERED]),
        (CHAT, [RENDERED]),
        ({"messages": [CHAT[0], {"role": "user", "content": [{"type": "text", "text": "Wh"}, "y?"]}]}, [RENDERED]),
        ({"messages": None, "prompt": "Why?"}, ["Why?"]),
        ({"prompt": ["Why?", "How?"]}, ["Why?", "How?"]),
        ({"prompt": [1, 2, 3]}, [[1, 2, 3]]),
        ({"prompt": [[1, 2], [3]]}, [[1, 2], [3]]),
        ({"prompt": "shown", "prompt_token_ids": [4, 5]}, [[4, 5]]),
        ({"text": "Why?"}, ["Why?"]),
        ({"input": "Why?"}, ["Why?"]),
        ("Why?", ["Why?"]),
        ('[{"a": 1}]', ['[{"a": 1}]']),
    ],
)
def test_each_form_of_a_request_is_read(line, expected):
    log = log_of([line])
    assert contents(log) == expected
    assert log.skipped.sentence() == ""


def test_tools_and_calls_are_part_of_a_chat():
    calls = [{"function": {"name": "find", "arguments": "{}"}}]
    chat = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "found"}]
    anthropic = [
        {"role": "assistant", "content": [{"type": "tool_use", "name": "find", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "found"}]}]},
    ]
    responses = [{"type": "function_call", "name": "find"}, {"type": "function_call_output", "output": "found"}]
    lines = [{"messages": chat, "tools": calls}, {"messages": anthropic}, {"input": responses}]
    for found in contents(log_of(lines)):
        assert "find" in str(found)
        assert "found" in str(found)


def test_a_log_of_vllm_is_read_in_its_old_form_and_its_new():
    log = log_of(
        "INFO 07-01 [api_server.py:1] Started server process\n"
        "INFO 07-01 [logger.py:42] Received request cmpl-1: prompt: 'It\\'s\\nme', params: SamplingParams(n=1), "
        "prompt_token_ids: None, lora_request: None.\n"
        'INFO 07-01 [logger.py:42] Received request cmpl-2: prompt: "It\'s", params: SamplingParams(n=1), '
        "prompt_token_ids: [7, 8], lora_request: None.\n"
        "DEBUG 07-01 [request_logger.py:54] Request chat-3 details: prompt: None, prompt_token_ids: [9], "
        "prompt_embeds shape: None.\n"
        "INFO 07-01 [logger.py:42] Received request cmpl-4: prompt: 'cut o\n"
        "INFO 07-01 [request_logger.py:64] Received request 5: params: SamplingParams(n=1), lora_request: None.\n"
    )
    assert contents(log) == ["It's\nme", [7, 8], [9]]
    assert log.skipped.counts == {"cut off": 1}
    assert log.skipped.first == {"cut off": 5}


def test_a_plain_text_has_a_prompt_a_line():
    found = list(log_of("\ufeffWhy?\r\n\n  \nHow?"))
    assert [(each.line, each.content) for each in found] == [(1, "Why?"), (4, "How?")]


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
BAD = [
    (b'{"messages": [{"ro', "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"9" * 10_000, "not JSON"),
    (b'{"prompt": "\xff\xfe"}', "not text in UTF-8"),
    (b'{"prompt": "a\x00"}', "not text in UTF-8"),
    (b'{"prompt": "\\ud800"}', "not text in UTF-8"),
    (b'{"prompt": ""}', "empty"),
    (b'{"prompt": " "}', "empty"),
    (b'{"messages": []}', "empty"),
    (b'{"prompt": ["a", ""]}', "empty"),
    (b"{}", "without a prompt"),
    (b"null", "without a prompt"),
    (b"7", "without a prompt"),
    (b'{"prompt": 7}', "without a prompt"),
    (b'{"prompt": [1.5]}', "without a prompt"),
    (b'{"prompt": [1, "a"]}', "without a prompt"),
    (b'{"messages": [{"role": "user", "content": 7}]}', "without a prompt"),
    (b'{"body": {"body": {"body": {"body": {"body": {"prompt": "deep"}}}}}}', "without a prompt"),
    (b'{"prompt": [-1]}', "with token ids that are none"),
    (b'{"prompt": [true]}', "with token ids that are none"),
    (b'{"prompt": [99999999999999999999]}', "with token ids that are none"),
    (json.dumps({"messages": [{"role": "user", "content": [IMAGE]}]}).encode(), "with images or other input than text"),
]


@pytest.mark.promise("commands", "`semblend-trt estimate` shows and writes no...")
@pytest.mark.parametrize(("line", "reason"), BAD, ids=[f"{why} {at}" for at, (_, why) in enumerate(BAD)])
def test_a_line_without_a_prompt_is_counted_and_the_next_one_read(line, reason):
    log = log_of(b'{"prompt": "first"}\n' + line + b'\n{"prompt": "last"}\n')
    assert contents(log)[-1] == "last"
    assert dict(log.skipped.counts) == {reason: 1}
    assert log.skipped.first == {reason: 2}
    assert log.skipped.sentence() == f"Passed over: 1 {reason} (first in line 2)."


def test_a_line_too_long_is_passed_over_without_being_held(monkeypatch):
    monkeypatch.setattr("semblend_trt.files.MAX_LINE_BYTES", 1 << 20)
    content = json.dumps({"prompt": "a" * (5 << 20)}).encode() + b'\n{"prompt": "b"}'
    log = log_of(content)
    assert contents(log) == ["b"]
    assert log.skipped.counts == {"longer than 1 MiB": 1}
    assert log.skipped.bytes == len(content)


NESTED = [
    '{"messages": [{"role": "user", "content": "Why?"}], "tools": %s}',
    '{"messages": [{"role": "user", "content": "Why?", "tool_calls": %s}]}',
    '{"prompt": "Why?", "model": %s}',
    '{"prompt": "Why?", "cache_salt": %s}',
    '{"input": [{"type": "function_call", "arguments": %s}]}',
    '{"messages": [{"role": "user", "content": [{"type": "tool_use", "input": %s}]}]}',
    '{"messages": [{"role": "user", "content": [%s]}]}',
    '{"body": %s}',
]

DEEPER = [("[", "]"), ('{"a":', "}"), ('{"type": "tool_result", "content": [', "]}")]


@pytest.mark.promise("donors", "No file that a command is...")
@pytest.mark.parametrize("line", NESTED)
@pytest.mark.parametrize(("opens", "closes"), DEEPER, ids=["list", "object", "both"])
def test_no_depth_ends_the_log(line, opens, closes, request):
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(limit := len(inspect.stack(0)) + 250)
    depths = range(1, limit + 100)
    deep = [line % (opens * depth + "1" + closes * depth) for depth in depths]
    log = log_of("\n".join([*deep, '{"prompt": "last"}']))
    found = contents(log)
    assert found[-1] == "last"
    assert len(found) - 1 + sum(log.skipped.counts.values()) == len(depths)
    if "tools" in line:  # they are written again, from deeper in the stack than they were read
        assert log.skipped.counts["nested too deeply"]


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_no_bytes_make_it_fail(lines):
    for form in ("jsonl", "vllm", "text"):
        log = log_of(b"\n".join(lines), form)
        assert len(list(log)) + sum(log.skipped.counts.values()) <= sum(map(len, lines))


def test_models_and_salts_keep_prompts_apart():
    bodies = [{"model": model, "cache_salt": salt} for model in ("m", "n") for salt in (None, "s")]
    found = list(log_of([{**body, "prompt": "a"} for body in bodies]))
    assert len({each.namespace for each in found}) == 4


def test_prompts_keep_their_order_and_ids_whatever_they_are():
    """Texts, chats and token ids stand in one batch, and there are several batches."""
    lines = [{"prompt": f"number {n}"} if n % 3 else {"prompt": [n, n]} for n in range(600)]
    lines[7] = {"messages": CHAT}
    found = list(encoded(log_of(lines), ENCODER))
    assert [prompt.line for prompt, _ in found] == list(range(1, 601))
    for prompt, ids in found:
        alone = ENCODER.encode([prompt])[0]
        assert ids.dtype == np.int32
        assert ids.tolist() == alone.tolist()
    assert found[0][1].tolist() == [0, 0]


@pytest.mark.parametrize("schema", ["parameters", "input_schema"])
def test_tools_of_other_apis_are_those_of_a_chat(tmp_path, schema):
    byte_tokenizer("{{ tools | tojson }}").save_pretrained(tmp_path)
    tool = {"name": "find", "description": "Finds.", schema: {"type": "object"}}
    both = {"type": "function", "function": {**tool, "parameters": {"type": "object"}}}, tool
    lines = [{"messages": CHAT, "tools": [each]} for each in both]
    first, second = contents(log_of(lines, encoder=Encoder(str(tmp_path))))
    assert first == second
    assert '"name": "find"' in str(first)


def test_a_models_tokenizer_brings_its_template(tmp_path):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    )
    byte_tokenizer(template).save_pretrained(tmp_path)
    encoder = Encoder(str(tmp_path))
    log = log_of([{"messages": [{"role": role, "content": "x"}]} for role in ("user", "tool")], encoder=encoder)
    ((prompt, ids),) = encoded(log, encoder)
    assert prompt.content == "<user>x<a>"
    assert len(ids) == len("<user>x<a>")
    assert log.skipped.counts == {"refused: template": 1}
