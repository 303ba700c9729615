"""What is accepted as a prompt, and a request's tokens: as lists for a connector and as an array for ours."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_wrapper.embedded.request import LlmRequest, as_prompts, token_ids_of
from engine_wrapper.embedded.sampling import SamplingParams
from semblend_trt.errors import ConfigurationError

VOCABULARY = 1000
IDS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20)


@given(IDS, st.sampled_from([list, tuple, np.array, lambda ids: [np.int64(each) for each in ids]]))
def test_every_sequence_of_integers_is_read_alike(ids, as_given):
    given = as_given(ids)
    listed, array = token_ids_of(given, None, VOCABULARY)
    assert listed == ids
    assert listed is not given
    assert all(type(token) is int for token in listed)
    assert array.dtype == np.int32
    assert array.tolist() == ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1, 2.0], "integer token ids"),
        ([1, "2"], "integer token ids"),
        ((1, None), "integer token ids"),
        ([1, -1], "token id -1"),
        ([VOCABULARY, 5], f"token id {VOCABULARY}"),
        ([1, 1 << 31], f"token id {1 << 31}"),
        ([1, 1 << 70], "beyond the model's ids"),
        ((1, -(1 << 33)), "token id -8589934592"),
    ],
)
def test_anything_else_is_refused_with_what_is_wrong(prompt, message):
    with pytest.raises(ConfigurationError, match=message):
        token_ids_of(prompt, None, VOCABULARY)


def test_one_prompt_or_several():
    assert as_prompts("text") == ["text"]
    assert as_prompts([1, 2]) == [[1, 2]]
    assert as_prompts((4, 5)) == [[4, 5]]
    assert as_prompts(([1], "text")) == [[1], "text"]
    with pytest.raises(ConfigurationError, match="empty"):
        as_prompts([])


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
