"""Winnowing: shared runs share anchors, anchors are sparse, odd input is bounded or refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.discovery import fingerprint as module
from semblend_trt.discovery.fingerprint import GRAM_TOKENS, GUARANTEED_RUN, as_token_array, fingerprint
from tests.semblend_trt.samples import text as random_tokens

MAX_ID = 2**31 - 1


def every_anchor(tokens):
    return fingerprint(tokens, max_repeats=1 << 20)


def reference_sums(tokens, length):
    """Of every `length` tokens the polynomial in RANK_BASE modulo 2**32, in Python integers."""
    sums = []
    for start in range(len(tokens) - length + 1):
        value = 0
        for token in tokens[start : start + length].tolist():
            value = (value + token) * module.RANK_BASE & 0xFFFFFFFF
        sums.append(value)
    return sums


def reference_positions(tokens, window):
    """Every minimum of every window of grams, for tokens without a stretch of one repeated token."""
    ranks = reference_sums(tokens, GRAM_TOKENS)
    chosen = set()
    for begin in range(len(ranks) - window + 1):
        least = min(ranks[begin : begin + window])
        chosen |= {at for at in range(begin, begin + window) if ranks[at] == least}
    return sorted(chosen)


# Around 32,768 grams a block ends.
@pytest.mark.parametrize("length", [GUARANTEED_RUN, GUARANTEED_RUN + 1, 64, 300, 6_000, 32_782, 32_783, 32_784, 33_000])
@pytest.mark.parametrize("vocabulary", [2, 50, MAX_ID + 1])
@pytest.mark.parametrize("shortest", [GUARANTEED_RUN, 47, module.WIDEST_RUN, 1_000])
def test_anchors_are_the_window_minima_and_those_for_longer_runs_some_of_the_others(length, vocabulary, shortest):
    tokens, halves = random_tokens(2, length, vocabulary), GRAM_TOKENS // 2
    anchors = fingerprint(tokens, 1 << 20, shortest)
    widest = min(shortest, module.WIDEST_RUN)
    assert anchors.positions.tolist() == reference_positions(tokens, widest - GRAM_TOKENS + 1) * (length >= widest)
    assert set(anchors.positions.tolist()) <= set(every_anchor(tokens).positions.tolist())
    sums = reference_sums(tokens, halves)
    assert anchors.hashes.tolist() == [sums[at] << 32 | sums[at + halves] for at in anchors.positions]


@pytest.mark.promise("reuse", "A look-up finds every run of...")
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 4),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(GUARANTEED_RUN, 80),
    st.booleans(),
)
def test_a_shared_run_keeps_the_same_anchor_wherever_it_stands(seed, vocabulary, left, right, length, wide):
    rng = np.random.default_rng(seed)
    run = rng.integers(0, vocabulary, length, dtype=np.int32)
    if len(set(run.tolist())) == 1:
        run[length // 2] += 1
    anchored = []
    for before, shortest in ((left, GUARANTEED_RUN), (right, length if wide else GUARANTEED_RUN)):
        noise = rng.integers(0, vocabulary, before, dtype=np.int32)
        anchors = fingerprint(np.concatenate([noise, run, noise]), 1 << 20, shortest)
        relative = anchors.positions - before
        inside = (relative >= 0) & (relative <= length - GRAM_TOKENS)
        anchored.append(set(zip(anchors.hashes[inside].tolist(), relative[inside].tolist(), strict=True)))
    assert anchored[0] & anchored[1]


@pytest.mark.parametrize("around", [0, 100])
@pytest.mark.parametrize("length", [GUARANTEED_RUN, 5_000, 100_000])
def test_a_stretch_of_one_token_is_anchored_at_its_ends_alone(length, around):
    text = random_tokens(4, around)
    anchors = fingerprint(np.concatenate([text, np.full(length, 99_999, dtype=np.int32), text]))
    last = around + length - GRAM_TOKENS
    assert [at for at in anchors.positions.tolist() if around <= at <= last] == sorted({around, last})


@pytest.mark.parametrize("max_repeats", [1, 2, 3, 8])
def test_thinning_keeps_the_first_and_last_of_each_hash(max_repeats):
    tokens = np.tile(random_tokens(5, 60), 9)
    anchors, thinned = every_anchor(tokens), fingerprint(tokens, max_repeats)
    last = max_repeats // 2
    for gram in set(anchors.hashes.tolist()):
        every = anchors.positions[anchors.hashes == gram].tolist()
        kept = thinned.positions[thinned.hashes == gram].tolist()
        ends = every[: max_repeats - last] + every[len(every) - last :]
        assert kept == (every if len(every) <= max_repeats else ends)


@pytest.mark.parametrize("bad", [[-1], [MAX_ID + 1], [0.5], ["a"], [[1, 2]], 7, [True]])
def test_bad_token_ids_are_refused(bad):
    with pytest.raises(ValueError, match=r"token id|shape"):
        as_token_array(np.asarray(bad))


@pytest.mark.parametrize(
    "good", [[], [0, MAX_ID], np.arange(6, dtype=np.int64)[::2], (1, 2, 3), np.frombuffer(bytes(8), dtype=np.int32)]
)
def test_good_token_ids_become_contiguous_int32(good):
    array = as_token_array(good)
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    assert array.tolist() == [int(token) for token in good]


@pytest.mark.parametrize("seed", range(40))
def test_texts_behind_each_other_have_the_anchors_that_each_has_alone(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 5, 31, 32, 33, 60, 200, 700, 33_000 if seed % 10 == 0 else 9], rng.integers(1, 9))
    texts = [random_tokens(rng.integers(1 << 32), length, int(rng.choice([1, 2, 3, 1_000]))) for length in lengths]
    texts = [np.tile(text, 4) for text in texts] if seed % 3 == 0 else texts
    ends = np.cumsum([len(text) for text in texts])
    every = fingerprint(np.concatenate(texts), ends=ends[:-1])
    stops = np.searchsorted(every.positions, ends)
    for text, start, end, stop in zip(texts, [0, *stops], ends, stops, strict=False):
        alone = fingerprint(text)
        assert every.hashes[start:stop].tolist() == alone.hashes.tolist()
        assert (every.positions[start:stop] - (end - len(text))).tolist() == alone.positions.tolist()
