"""What two answers prove of their divergence is never more than it is, and all of it where all is told."""

import json
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.cold_runs import MAX_TOKENS, least_kl, likelihood_fields, likelihoods_in

GREEDY = {"prompt": "a", "temperature": 0, "max_tokens": 8}


def likeliest(probabilities, count):
    order = np.argsort(-probabilities)[:count]
    return {f"token_id:{token}": log(probabilities[token]) for token in order}


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.floats(0.05, 4))
def test_what_is_proved_is_at_most_the_divergence_and_all_of_it_where_all_is_told(seed, count, spread):
    rng = np.random.default_rng(seed)
    cold, first = (np.exp(rng.normal(0, spread, 8)) for _ in range(2))
    cold, first = cold / cold.sum(), first / first.sum()
    true = float(np.sum(cold * np.log(cold / first)))
    proved = least_kl([("a", likeliest(first, count))], [("a", likeliest(cold, count))])
    assert 0 <= proved <= true + 1e-4
    if count == 8:
        assert proved == pytest.approx(true, abs=1e-4)


HALF, NINE = {"a": log(0.5), "b": log(0.5)}, {"a": log(0.9), "b": log(0.1)}
ONE = 0.5 * log(0.5 / 0.9) + 0.5 * log(0.5 / 0.1)


@pytest.mark.parametrize(
    ("first", "cold", "expected"),
    [
        ("aaa", "aaa", ONE),
        ("aba", "aaa", ONE * 2 / 3),  # what follows another token is compared with nothing
        ("b", "aaaa", ONE / 4),
        ("aaaa", "aa", ONE),
    ],
)
def test_tokens_are_compared_up_to_the_first_that_differs(first, cold, expected):
    found = least_kl([(token, NINE) for token in first], [(token, HALF) for token in cold])
    assert found == pytest.approx(expected, abs=1e-4)


def test_tokens_that_have_no_likeliest_in_common_prove_nothing():
    assert least_kl([("a", {"a": -0.1})], [("b", {"b": -0.1})]) == 0


def completion(**told):
    return json.dumps({"choices": [{"text": "ab", "logprobs": told}]}).encode()


def test_completions_and_chats_tell_the_same():
    rows = [{"token": each, "top_logprobs": [{"token": "a", "logprob": -0.5}]} for each in "ab"]
    chat = json.dumps({"choices": [{"logprobs": {"content": rows}}]}).encode()
    plain = completion(tokens=["a", "b"], top_logprobs=[{"a": -0.5}, {"a": -0.5}])
    assert likelihoods_in(chat) == likelihoods_in(plain) == [("a", {"a": -0.5}), ("b", {"a": -0.5})]


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"{}", b"[]", b'{"choices": []}', b'{"choices": [{"text": "a", "logprobs": null}]}', b"[" * 100_000),
        completion(tokens=[], top_logprobs=[]),
        completion(tokens=["a"], top_logprobs=[]),
        *(completion(tokens=["a"], top_logprobs=[each]) for each in (None, {"a": None}, {"a": "1"}, {"a": 800})),
        completion(tokens=["a"], top_logprobs=[{"a": float("nan")}]),
    ],
)
def test_what_tells_no_likelihoods_is_refused(answer):
    with pytest.raises(ValueError, match="tells no likelihoods"):
        likelihoods_in(answer)


@pytest.mark.parametrize(
    ("change", "is_judged"),
    [
        ({}, True),
        ({"temperature": 1.0, "top_k": 1, "n": 1}, True),
        ({"temperature": 1.0, "seed": 0}, False),
        ({"n": 2}, False),
        ({"max_tokens": MAX_TOKENS + 1}, False),
        ({"max_tokens": None}, False),
        ({"logprobs": 0}, False),
        ({"prompt_logprobs": 1}, False),
    ],
)
def test_only_short_greedy_answers_are_asked_for_likelihoods(change, is_judged):
    assert bool(likelihood_fields(GREEDY | change)) == is_judged


def test_chats_are_asked_in_their_own_way():
    fields = likelihood_fields({"messages": [], "temperature": 0, "max_completion_tokens": 8})
    assert fields == {"logprobs": True, "top_logprobs": 20, "return_tokens_as_token_ids": True}
