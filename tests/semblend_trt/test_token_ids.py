"""Token ids behave as the sequence they stand for, and travel as one block of bytes."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.token_ids import TokenIds

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(IDS, st.integers(-25, 25), st.integers(-25, 25))
def test_is_the_sequence_it_was_made_of(ids: list[int], start: int, stop: int) -> None:
    tokens = TokenIds(ids)
    assert list(tokens) == ids
    assert len(tokens) == len(ids)
    assert tokens == ids
    assert tokens == tuple(ids)
    assert tokens[start:stop] == ids[start:stop]
    assert all(type(token) is int for token in tokens)
    assert np.asarray(tokens).tolist() == ids
    assert np.asarray(tokens, dtype=np.int64).dtype == np.int64


@given(IDS, IDS)
def test_equality_and_hash_agree(left: list[int], right: list[int]) -> None:
    assert (TokenIds(left) == TokenIds(right)) == (left == right)
    assert hash(TokenIds(left)) == hash(TokenIds(tuple(left)))
    assert TokenIds(left) != "text"
    assert TokenIds(left) != 7


@given(IDS)
def test_copies_and_pickles_are_equal(ids: list[int]) -> None:
    tokens = TokenIds(ids)
    assert pickle.loads(pickle.dumps(tokens)) == tokens
    assert copy.deepcopy(tokens) == tokens
    assert TokenIds(iter(ids)) == tokens


def test_nobody_can_change_them() -> None:
    source = np.arange(5, dtype=np.int32)
    tokens = TokenIds(source)
    source[0] = 99
    assert tokens[0] == 0
    for view in (np.asarray(tokens), np.asarray(pickle.loads(pickle.dumps(tokens)))):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 7


def test_pickle_is_about_four_bytes_a_token() -> None:
    assert len(pickle.dumps(TokenIds(range(10_000)))) < 41_000


@pytest.mark.parametrize("bad", [[-1], [2**31], [0.5], [[1, 2]], ["a"]])
def test_what_is_no_token_id_is_refused(bad: list[object]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        TokenIds(bad)
