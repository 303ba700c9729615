"""A request's tokens, as lists for a connector and as an array for ours."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine_wrapper.embedded.request import LlmRequest
from engine_wrapper.embedded.sampling import SamplingParams

IDS = st.lists(st.integers(0, 999), min_size=1, max_size=20)


@given(IDS, IDS, st.data())
def test_the_array_and_the_lists_hold_the_same_tokens(prompt, generated, data):
    request = LlmRequest(1, prompt, SamplingParams(), max_new_tokens=len(generated))
    for token in generated:
        request.add_new_token(token)
    tokens = prompt + generated
    assert request.get_tokens(0) == list(request.all_tokens) == tokens
    assert request.prompt_token_array.tolist() == prompt
    begin = data.draw(st.integers(0, len(tokens)))
    end = data.draw(st.integers(begin, len(tokens)))
    assert request.tokens(begin, end) == tokens[begin:end]
    assert request.token_array(end).tolist() == tokens[:end]
    assert request.token_array(end).dtype == np.int32


def test_what_a_connector_is_given_is_its_own():
    request = LlmRequest(1, [1, 2, 3], SamplingParams(), max_new_tokens=4)
    request.get_tokens(0).append(4)
    request.tokens(0, 3).clear()
    assert request.get_tokens(0) == [1, 2, 3]
    assert request.get_num_tokens() == 3
