"""Prompts and sampling parameters are checked; of equal logits the first is taken."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_wrapper.embedded.request import SamplingParams, largest_of, token_ids_of
from semblend_trt.errors import ConfigurationError

VOCABULARY = 1000
IDS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20)


@given(IDS, st.sampled_from([list, tuple, np.array, lambda ids: [np.int64(each) for each in ids]]))
def test_every_sequence_of_integers_is_read_alike(ids, as_given):
    given = as_given(ids)
    found = token_ids_of(given, None, VOCABULARY)
    assert found == ids
    assert all(type(token) is int for token in found)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1, 2.0], "integer token ids"),
        ((1, None), "integer token ids"),
        ([1, -1], "token id -1"),
        ([VOCABULARY, 5], f"token id {VOCABULARY}"),
        ([1, 1 << 70], f"token id {1 << 70}"),
        ((1, -(1 << 33)), "token id -8589934592"),
    ],
)
def test_anything_else_is_refused_with_what_is_wrong(prompt, message):
    with pytest.raises(ConfigurationError, match=message):
        token_ids_of(prompt, None, VOCABULARY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be an integer >= 1"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list of token ids"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids holds -1"),
        ({"forced_token_ids": []}, "forced_token_ids has 0 tokens; it must have 1 to max_tokens"),
        ({"forced_token_ids": [1, 2, 3], "max_tokens": 2}, "forced_token_ids has 3 tokens"),
    ],
)
def test_a_field_out_of_range_is_refused(fields, message):
    with pytest.raises(ConfigurationError) as refusal:
        SamplingParams(**fields)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_the_first_of_equal_logits_is_taken_in_every_row(device):
    logits = torch.randn(7, 50_257, generator=torch.Generator().manual_seed(0))
    for row in range(7):
        logits[row, [100 * row + 5, 40_000, 50_256]] = 9.5
    assert largest_of(logits.to(device)) == [(9.5, 100 * row + 5) for row in range(7)]
