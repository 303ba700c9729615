"""Sampling parameters are checked, and a request's tokens depend on its logits and seed alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_wrapper.embedded.sampling import SamplingParams, candidates, largest_of, sample
from semblend_trt.errors import ConfigurationError


def logits_of(seed, size=50):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def draw(params, rows):
    generator = params.generator()
    return [sample(row, params, generator) for row in rows]


# -- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be an integer >= 1"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1; it must be an integer >= 0"),
        ({"seed": -1}, "seed is -1; it must be an integer in 0"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list of token ids"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids holds -1"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids holds 'a'"),
        ({"forced_token_ids": []}, "forced_token_ids has 0 tokens; it must have 1 to max_tokens"),
        ({"forced_token_ids": [1, 2, 3], "max_tokens": 2}, "forced_token_ids has 3 tokens"),
    ],
)
def test_a_field_out_of_range_is_refused(fields, message):
    with pytest.raises(ConfigurationError) as refusal:
        SamplingParams(**fields)
    assert str(refusal.value).startswith(message)


def test_the_bounds_themselves_are_allowed():
    SamplingParams(max_tokens=1, temperature=0, top_p=1, top_k=0, seed=0)
    SamplingParams(seed=2**63 - 1, top_p=1e-9, temperature=1e-9)
    params = SamplingParams(stop_token_ids=[4, 5], forced_token_ids=[1, 2], max_tokens=2)  # type: ignore[arg-type]
    assert (params.stop_token_ids, params.forced_token_ids) == ((4, 5), (1, 2))


# -- sampling ---------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1000))
def test_a_tiny_temperature_takes_the_largest(seed):
    logits = logits_of(seed)
    for params in (SamplingParams(temperature=2.0, top_k=1), SamplingParams(temperature=5e-324)):
        assert draw(params, [logits]) == [int(logits.argmax())]


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_the_first_of_equal_logits_is_taken_in_every_row(device):
    logits = torch.randn(7, 50_257, generator=torch.Generator().manual_seed(0))
    for row in range(7):
        logits[row, [100 * row + 5, 40_000, 50_256]] = 9.5
    assert largest_of(logits.to(device)) == [(9.5, 100 * row + 5) for row in range(7)]


def test_a_row_that_is_not_finite_leaves_its_neighbours_alone():
    logits = torch.zeros(3, 10)
    logits[0, 4], logits[1, 3], logits[2, 7] = 1.0, math.nan, 2.0
    first, (broken, _), last = largest_of(logits)
    assert (first, last) == ((1.0, 4), (2.0, 7))
    assert math.isnan(broken)


def test_the_batch_is_fetched_once(monkeypatch):
    fetched: list[torch.Size] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: fetched.append(tensor.shape) or tolist(tensor))
    assert [token for _, token in largest_of(torch.eye(4))] == [0, 1, 2, 3]
    assert len(fetched) == 1


@given(seed=st.integers(0, 2**63 - 1), temperature=st.floats(0.1, 3.0), top_p=st.floats(0.1, 1.0))
def test_the_same_seed_draws_the_same_tokens(seed, temperature, top_p):
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    rows = [logits_of(step) for step in range(8)]
    assert draw(params, rows) == draw(params, rows)


def test_seeds_differ_and_no_seed_is_a_new_one():
    rows = [logits_of(step) for step in range(32)]
    seeded = [draw(SamplingParams(temperature=1.5, seed=seed), rows) for seed in (1, 2)]
    unseeded = [draw(SamplingParams(temperature=1.5), rows) for _ in range(2)]
    assert len({tuple(tokens) for tokens in seeded + unseeded}) == 4


def test_draws_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    params = SamplingParams(temperature=1.4, seed=3)
    tokens = torch.tensor(draw(params, [logits] * 20_000))
    frequencies = torch.bincount(tokens, minlength=4) / len(tokens)
    torch.testing.assert_close(frequencies, (logits / 1.4).softmax(0), atol=0.015, rtol=0)


@given(seed=st.integers(0, 1000), top_k=st.integers(0, 60), top_p=st.floats(0.05, 1.0))
def test_candidates_are_the_most_probable_and_reach_top_p(seed, top_k, top_p):
    logits = logits_of(seed)
    probabilities, tokens = candidates(logits, SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p))
    allowed = min(top_k, 50) or 50
    kept = (logits.double() / 0.8).sort(descending=True).values[:allowed].softmax(0)
    assert 1 <= len(tokens) <= allowed
    assert len(set(tokens.tolist())) == len(tokens)
    torch.testing.assert_close(probabilities, kept[: len(tokens)], atol=1e-6, rtol=0)
    if top_p < 1.0 and len(tokens) < allowed:
        assert probabilities.sum() >= top_p - 1e-6
    assert probabilities[:-1].sum() < top_p + 1e-6


@pytest.mark.parametrize("uniform", [0.0, 1.0])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(monkeypatch, uniform):
    monkeypatch.setattr(torch, "rand", lambda *size, **options: torch.tensor(uniform, dtype=torch.float64))
    logits = torch.full((20,), -torch.inf)
    logits[3], logits[11] = 2.0, 1.0
    assert draw(SamplingParams(temperature=1.0, seed=0), [logits]) == [11 if uniform else 3]
