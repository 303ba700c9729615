"""The index of sketches: its estimates equal those of a loop over all sketches, after any changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.fleet.owner_sets import words_in_use
from semblend_trt.fleet.sketch import Sketch, overlap, prompt_fingerprints, sketch_of
from semblend_trt.fleet.sketch_index import FEWEST_MATCHES, SketchIndex

KEY = bytes(range(16))
WORKERS = 3
_TEXTS = np.random.default_rng(0).integers(0, 150_000, (8, 400), dtype=np.int32)


def naive_share(sketches, prompt) -> float:
    """An anchor that a worker holds counts once, for as many as a donor of the lowest level shows one of."""
    share, matches = 0.0, 0
    for entry, level in zip(prompt.entries.tolist(), prompt.levels.tolist(), strict=True):
        seen = [each.level for each in sketches if each.level <= level and entry in each.entries]
        if seen:
            matches += 1
            share += 1 / int(prompt.eligible[min(seen)])
    return min(share, 1.0) if matches >= FEWEST_MATCHES else 0.0


donors = st.tuples(
    st.integers(0, WORKERS - 1),
    st.integers(0, 1),
    st.lists(st.integers(0, 7), min_size=1, max_size=4),
    st.sampled_from([8, 32, 256]),
)
deeds = st.lists(
    st.one_of(
        st.tuples(st.just("add"), donors),
        st.tuples(st.just("remove"), st.integers(0, 50)),
        st.tuples(st.just("forget"), st.integers(0, WORKERS - 1)),
    ),
    max_size=25,
)


@given(deeds, st.lists(st.integers(0, 7), min_size=1, max_size=6))
@settings(max_examples=80)
def test_estimates_equal_those_of_a_loop_over_all_sketches(history, asked) -> None:
    index = SketchIndex(1 << 20)
    held = []
    for deed, what in history:
        if deed == "add":
            worker, namespace, texts, entries = what
            sketch = sketch_of(np.concatenate([_TEXTS[each] for each in texts]), KEY, entries)
            held.append((worker, namespace, sketch, index.add(namespace, worker, sketch)))
        elif deed == "remove" and held:
            index.remove(held.pop(what % len(held))[3])
        elif deed == "forget":
            index.forget(what)
            held = [each for each in held if each[0] != what]
        index.tidy()
    prompt = prompt_fingerprints(np.concatenate([_TEXTS[each] for each in asked]), KEY)
    for namespace in range(2):
        found = index.search(namespace, WORKERS, prompt)
        for worker in range(WORKERS):
            sketches = [sketch for owner, of, sketch, _ in held if (owner, of) == (worker, namespace)]
            assert found[worker] == pytest.approx(naive_share(sketches, prompt))


@given(st.lists(st.integers(0, 7), min_size=1, max_size=8), st.sampled_from([4, 32, 256]))
@settings(max_examples=40)
def test_one_donors_share_is_its_sketchs_overlap(texts, entries) -> None:
    sketch = sketch_of(np.concatenate([_TEXTS[each] for each in texts]), KEY, entries)
    prompt = prompt_fingerprints(_TEXTS[:3].reshape(-1), KEY)
    index = SketchIndex(1 << 20)
    index.add(0, 0, sketch)
    expected = overlap(sketch, prompt)
    if expected * prompt.eligible[sketch.level] >= FEWEST_MATCHES:
        assert index.search(0, 1, prompt)[0] == pytest.approx(expected)


def random_sketch(rng: np.random.Generator, entries: int = 200) -> Sketch:
    return Sketch(0, entries, rng.integers(0, 1 << 32, entries, dtype=np.uint32))


def test_what_is_forgotten_is_swept_away_and_its_room_used_again() -> None:
    index, rng = SketchIndex(1 << 14), np.random.default_rng(1)
    for _ in range(40):  # 40 times 60 donors of 200 entries are more than fit at once
        for _ in range(60):
            assert index.add(0, 0, random_sketch(rng)) is not None
        index.forget(0)
        for _ in range(16):
            index.tidy()
        assert len(index) == 0


def test_nothing_is_left_of_texts_whose_holders_are_all_forgotten() -> None:
    index, rng = SketchIndex(1 << 20), np.random.default_rng(6)
    for sketch in [random_sketch(rng, 2000) for _ in range(30)]:
        for worker in rng.choice(9, 3, replace=False).tolist():
            index.add(0, worker, sketch)
    for worker in range(9):
        index.forget(worker)
    for _ in range((len(index._table.slots) >> 12) + 1):
        index.tidy()
    assert words_in_use(index._sets) == index._table.used[0] == len(index) == 0
    assert sorted(index._free) == list(range(1, 64))


def test_owners_are_given_back_when_their_last_donor_goes() -> None:
    index, rng = SketchIndex(1 << 14), np.random.default_rng(2)
    for namespace in range(1000):
        index.remove(index.add(namespace, namespace % 7, random_sketch(rng)))
    assert len(index) == 0
    assert len(index._owners.slots) == 64


def test_many_owners_at_once_are_all_found() -> None:
    index, rng = SketchIndex(1 << 18), np.random.default_rng(3)
    text = _TEXTS[0]
    for worker in range(300):
        index.add(0, worker, sketch_of(text, KEY))
        index.add(1 + worker, worker, random_sketch(rng))
    prompt = prompt_fingerprints(text, KEY)
    assert index.search(0, 300, prompt).tolist() == [1.0] * 300


def test_entries_that_all_have_other_holders_are_found_however_many_there_are() -> None:
    index, rng = SketchIndex(1 << 18), np.random.default_rng(5)
    prompt = prompt_fingerprints(_TEXTS.reshape(-1), KEY)
    held = rng.random((100, len(prompt))) < 0.5
    postings = [index.add(0, worker, Sketch(0, 1000, prompt.entries[each])) for worker, each in enumerate(held)]
    assert index.search(0, 100, prompt) == pytest.approx(held.mean(axis=1))
    for posting in postings[::2]:
        index.remove(posting)
    held[::2] = False
    assert index.search(0, 100, prompt) == pytest.approx(held.mean(axis=1))
    for posting in postings[1::2]:
        index.remove(posting)
    assert words_in_use(index._sets) == index._table.used[0] == len(index) == 0


def test_a_full_index_takes_no_more() -> None:
    index, rng = SketchIndex(500), np.random.default_rng(4)
    kept = [index.add(0, 0, random_sketch(rng)) for _ in range(3)]
    assert [each is not None for each in kept] == [True, True, False]
    index.remove(kept[0])
    assert index.add(0, 0, random_sketch(rng)) is not None


def test_one_chance_meeting_says_nothing() -> None:
    prompt = prompt_fingerprints(_TEXTS.reshape(-1), KEY)
    index = SketchIndex(1 << 10)
    index.add(0, 0, Sketch(0, 1, prompt.entries[:1]))
    index.add(0, 1, Sketch(0, 2, prompt.entries[:2]))
    assert index.search(0, 2, prompt).tolist() == [0.0, pytest.approx(2 / len(prompt))]


def test_entries_that_a_sketchs_level_cannot_have_count_nothing() -> None:
    prompt = prompt_fingerprints(_TEXTS.reshape(-1), KEY)
    index = SketchIndex(1 << 10)
    index.add(0, 0, Sketch(1, 20, prompt.entries[prompt.levels == 0][:20]))
    assert index.search(0, 1, prompt).tolist() == [0.0]
