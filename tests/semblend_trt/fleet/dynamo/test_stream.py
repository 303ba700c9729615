"""A request that goes on elsewhere asks for the rest, and tells of the whole."""

import numpy as np
import pytest

from semblend_trt.fleet.dynamo.relay import AskedRequest


def request(**fields):
    return {"token_ids": [5, 6, 7], "stop_conditions": {"max_tokens": 4, "min_tokens": 1}} | fields


def taken(asked, *pieces):
    return [asked.take(piece) for piece in pieces]


@pytest.mark.parametrize("tokens", [[5, 6, 7], np.array([5, 6, 7], "<i4").tobytes()])
def test_the_next_worker_is_asked_for_the_rest_and_usage_is_that_of_the_whole(tokens):
    came = request(token_ids=tokens, model="m")
    asked = AskedRequest(came)
    assert asked.next_request() is came
    taken(asked, {"token_ids": [8]}, {"token_ids": [9, 10]})
    rest = {"max_tokens": 1, "min_tokens": 0}
    assert asked.next_request() == {"token_ids": [5, 6, 7, 8, 9, 10], "stop_conditions": rest, "model": "m"}
    assert asked.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert not asked.is_whole
    last = {"token_ids": [11], "finish_reason": "stop"}
    last["completion_usage"] = {"prompt_tokens": 6, "completion_tokens": 1, "total_tokens": 7}
    assert taken(asked, last) == [True]
    assert last["completion_usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert asked.is_whole


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_options": {"n": 2}},
        {"sampling_options": {"best_of": 2}},
        {"sampling_options": {"guided_decoding": {"json": {}}}},
        {"output_options": {"prompt_logprobs": 0}},
    ],
)
def test_what_an_engine_alone_knows_is_not_continued_once_it_has_begun(fields):
    asked = AskedRequest(request(**fields))
    assert asked.is_continuable
    taken(asked, {"token_ids": [8, 9, 10, 11]})
    assert (asked.is_continuable, asked.is_whole) == (False, False)


def test_the_salt_is_the_engines():
    assert AskedRequest(request(routing={"cache_salt": "a"})).salt == "dynamo-cache-salt:a"
    assert AskedRequest(request(routing={"cache_salt": None})).salt is None
    assert AskedRequest(request(routing=None)).salt is None
