"""What a body asks of the engine, and what it is refused for."""

from __future__ import annotations

from typing import Any

import pytest

from engine_wrapper.embedded.sampling import SamplingParams
from engine_wrapper.embedded.server import read_body
from semblend_trt.fleet.router.refusals import RequestRefusedError

# As clients send them that know of these fields and want nothing of them.
NEUTRAL = {"logprobs": False, "top_logprobs": 0, "presence_penalty": 0.0, "min_p": 0.0, "min_tokens": 0, "echo": False}


def test_where_nothing_is_said_the_apis_defaults_hold() -> None:
    fields = read_body({"prompt": "a", "temperature": None, "stop": None, "n": 1, "user": "somebody", **NEUTRAL})
    assert fields.sampling_params(16) == SamplingParams(max_tokens=16, temperature=1.0)
    assert not fields.stream
    assert not fields.includes_usage
    assert fields.stop_texts == ()


def test_what_is_said_becomes_sampling_parameters() -> None:
    body = {"max_tokens": 3, "temperature": 0, "top_p": 0.5, "top_k": 4, "seed": 5, "ignore_eos": True}
    fields = read_body({**body, "stop_token_ids": [6], "stop": "x", "stream_options": {"include_usage": True}})
    assert fields.sampling_params(16) == SamplingParams(3, 0.0, 0.5, 4, 5, (6,), True)
    assert fields.stop_texts == ("x",)
    assert fields.includes_usage


def test_a_chat_may_call_its_bound_otherwise() -> None:
    assert read_body({"max_completion_tokens": 7}).sampling_params(16).max_tokens == 7


@pytest.mark.parametrize(
    ("body", "reason", "message"),
    [
        ({"n": 2}, "unsupported_field", "n is not supported by this engine; leave it out"),
        ({"logprobs": 5}, "unsupported_field", "logprobs is not supported"),
        ({"logprobs": 0}, "unsupported_field", "logprobs is not supported"),
        ({"n": True}, "unsupported_field", "n is not supported"),
        ({"prompt_logprobs": 0}, "unsupported_field", "prompt_logprobs is not supported"),
        ({"min_p": 0.1}, "unsupported_field", "min_p is not supported"),
        ({"min_tokens": 1}, "unsupported_field", "min_tokens is not supported"),
        ({"lora_request": {"lora_name": "red"}}, "unsupported_field", "lora_request is not supported"),
        ({"guided_json": {}}, "unsupported_field", "guided_json is not supported"),
        ({"response_format": {"type": "json_object"}}, "unsupported_field", "response_format is not supported"),
        ({"temperature": "hot"}, "bad_field", "temperature: Input should be a valid number"),
        ({"temperature": -1}, "bad_field", "temperature is -1.0; it must be a number >= 0"),
        ({"max_tokens": 0}, "bad_field", "max_tokens is 0; it must be an integer >= 1"),
        ({"stop": [""]}, "bad_field", r"stop"),
        ({"cache_salt": 5}, "bad_field", "cache_salt: Input should be a valid string"),
    ],
)
def test_what_cannot_be_done_is_named(body: dict[str, Any], reason: str, message: str) -> None:
    with pytest.raises(RequestRefusedError, match=message) as refused:
        read_body(body).sampling_params(16)
    assert (refused.value.status, refused.value.reason) == (400, reason)
