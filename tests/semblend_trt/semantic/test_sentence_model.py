"""Windows over long texts: nothing is left out, none is too long, none begins within a word."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from semblend_trt.semantic.sentence_model import (
    BATCH_WINDOWS,
    SPECIAL_TOKENS,
    WINDOW_TOKENS,
    pooled,
    windows_of,
)

MOST = WINDOW_TOKENS - SPECIAL_TOKENS


@pytest.fixture(scope="module")
def tokenizer():
    """Words in pieces of at most two letters, as WordPiece cuts them."""
    letters = "abcdefghij"
    pieces = [*letters, *(a + b for a in letters for b in letters)]
    names = ["[UNK]", *pieces, *("##" + piece for piece in pieces)]
    made = Tokenizer(models.WordPiece({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return made


def random_words(seed, count):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abcdefghij"), rng.integers(1, 12))) for _ in range(count)]


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), count=st.integers(0, 700))
def test_windows_cover_every_word_and_overlap(tokenizer, seed, count):
    words = random_words(seed, count)
    windows = windows_of(" ".join(words), tokenizer)
    position = 0
    for window in windows:
        assert len(tokenizer.encode(window, add_special_tokens=False).ids) <= MOST
        parts = window.split()
        starts = [at for at in range(position + 1) if words[at : at + len(parts)] == parts]
        assert starts, "the window skips words, or cuts one"
        position = max(starts) + len(parts)
    assert position == count
    for one, other in itertools.pairwise(windows):
        assert other.split()[0] in one.split()


def test_a_text_of_one_window_is_whole(tokenizer):
    assert windows_of("a b c", tokenizer) == ["a b c"]
    assert windows_of("", tokenizer) == []
    assert windows_of(" \n ", tokenizer) == []


def test_one_endless_word_is_cut_all_the_same(tokenizer):
    tokenizer.model.max_input_chars_per_word = 10_000
    windows = windows_of("ab" * 1000, tokenizer)
    assert len(windows) > 1
    assert "".join(windows[:1]).startswith("ab")
    assert sum(map(len, windows)) >= 2000
    assert all(len(window) <= 2 * MOST for window in windows)


def test_pooling_takes_windows_in_any_order_and_in_small_batches(tokenizer):
    sizes = []

    def embed(windows):
        sizes.append(len(windows))
        return np.array([[len(window), window.count("a")] for window in windows], dtype=np.float32)

    text = " ".join(random_words(5, 4000))
    count = len(windows_of(text, tokenizer))
    assert count > 2 * BATCH_WINDOWS
    vectors = pooled([text, "", "a"], tokenizer, 2, embed)
    assert max(sizes) == BATCH_WINDOWS
    assert sum(sizes) == count + 1
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 0, 1], rtol=1e-6)
