"""The index of sketches: its estimates equal those of a loop over all sketches; shared text is found in a sketch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.discovery.fingerprint import fingerprint
from semblend_trt.fleet import sketch_index
from semblend_trt.fleet.sketch import MAX_ENTRIES, MAX_LEVEL, MAX_SKETCH_BYTES, Sketch, keyed, sketch_key, sketch_of
from semblend_trt.fleet.sketch_index import SketchIndex
from tests.semblend_trt.fleet.conftest import overlap
from tests.semblend_trt.samples import prompt_fingerprints
from tests.semblend_trt.samples import text as random_tokens

KEY = bytes(range(16))
WORKERS = 3
donors = st.tuples(
    st.integers(0, WORKERS - 1), st.lists(st.integers(0, 7), min_size=1, max_size=4), st.sampled_from([8, 32, 256])
)
deeds = st.lists(st.tuples(st.just("add"), donors) | st.tuples(st.just("remove"), st.integers(0, 50)), max_size=25)
_TEXTS = np.random.default_rng(0).integers(0, 150_000, (8, 400), dtype=np.int32)


def naive_share(sketches, prompt):
    """An anchor that a worker holds counts once, for as many as a donor of the lowest level shows one of."""
    share, matches = 0.0, 0
    for entry, level in zip(prompt.entries.tolist(), prompt.levels.tolist(), strict=True):
        seen = [each.level for each in sketches if each.level <= level and entry in each.entries]
        if seen:
            matches += 1
            share += 1 / int(prompt.eligible[min(seen)])
    return min(share, 1.0) if matches >= sketch_index.FEWEST_MATCHES else 0.0


def is_whole(index):
    """Every set that is kept is used as often as it says, and all others are free."""
    numbers, uses = np.unique(index._arrays.table[index._arrays.table != 0] & np.uint64(0xFFFFFFFF), return_counts=True)
    return (
        np.flatnonzero(index._arrays.sets[:, sketch_index._USES] > 0).tolist() == numbers.tolist()
        and index._arrays.sets[numbers.astype(int), sketch_index._USES].tolist() == uses.tolist()
        and index._arrays.state[[sketch_index._TAKEN, sketch_index._LEFT]].tolist()
        == [uses.sum(), len(index._arrays.sets) - 2 - len(numbers)]
    )


@pytest.mark.promise(
    "fleet", "The directory says who holds how much of a prompt; text that two donors hold counts once"
)
@given(deeds, st.lists(st.integers(0, 7), min_size=1, max_size=6))
@settings(max_examples=80)
def test_estimates_equal_those_of_a_loop_over_all_sketches(history, asked):
    index = SketchIndex()
    held = []
    for deed, what in history:
        if deed == "add":
            worker, texts, entries = what
            sketch = sketch_of(np.concatenate([_TEXTS[each] for each in texts]), KEY, entries)
            held.append((worker, sketch, index.add(worker, sketch)))
        elif held:
            index.remove(held.pop(what % len(held))[2])
    prompt = prompt_fingerprints(np.concatenate([_TEXTS[each] for each in asked]), KEY)
    found = index.search(WORKERS, prompt)
    for worker in range(WORKERS):
        assert found[worker] == pytest.approx(naive_share([each for of, each, _ in held if of == worker], prompt))
    assert is_whole(index)


@given(st.integers(0, 1 << 32), st.floats(0.1, 0.9))
@settings(max_examples=30)
def test_a_full_table_loses_nothing_when_donors_go(seed, share):
    """Few entries, some of them twice in a sketch: as many slots are taken as may be, and probes wrap around."""
    rng, index = np.random.default_rng(seed), SketchIndex()
    prompt = prompt_fingerprints(_TEXTS.reshape(-1), KEY)
    entries = np.concatenate([prompt.entries, rng.integers(0, 1 << 32, 700, dtype=np.uint32)])[:450]
    held = []
    for _ in range(60):
        if held and rng.random() < share / 2:
            index.remove(held.pop(rng.integers(len(held)))[2])
        worker, level = int(rng.integers(WORKERS)), int(rng.integers(3))
        sketch = Sketch(level, 60, rng.choice(entries, 60))
        held.append((worker, sketch, index.add(worker, sketch)))
    assert len(index._arrays.table) == 1024
    found = index.search(WORKERS, prompt)
    for worker in range(WORKERS):
        assert found[worker] == pytest.approx(naive_share([each for of, each, _ in held if of == worker], prompt))
    assert is_whole(index)
    for *_, posting in held:
        index.remove(posting)
    assert not index._arrays.table.any()
    assert is_whole(index)


def test_entries_that_all_have_other_holders_are_found_however_many_there_are():
    index, rng = SketchIndex(), np.random.default_rng(5)
    prompt = prompt_fingerprints(_TEXTS.reshape(-1), KEY)
    held = rng.random((100, len(prompt.entries))) < 0.5
    postings = [index.add(worker, Sketch(0, 1000, prompt.entries[each])) for worker, each in enumerate(held)]
    assert index.search(100, prompt) == pytest.approx(held.mean(axis=1))
    for posting in postings[::2]:
        index.remove(posting)
    held[::2] = False
    assert index.search(100, prompt) == pytest.approx(held.mean(axis=1))
    for posting in postings[1::2]:
        index.remove(posting)
    assert not index.search(100, prompt).any()
    assert is_whole(index)


def test_one_chance_meeting_and_entries_that_a_sketchs_level_cannot_have_say_nothing():
    prompt = prompt_fingerprints(_TEXTS.reshape(-1), KEY)
    index = SketchIndex()
    index.add(0, Sketch(0, 1, prompt.entries[:1]))
    index.add(1, Sketch(0, 2, prompt.entries[:2]))
    index.add(2, Sketch(1, 20, prompt.entries[prompt.levels == 0][:20]))
    assert index.search(3, prompt).tolist() == [0.0, pytest.approx(2 / len(prompt.entries)), 0.0]


SALTED = sketch_key("namespace", "salt")


def test_the_hash_is_siphash():
    low, high = np.frombuffer(bytes(range(16)), dtype="<u8")
    message = np.frombuffer(bytes(range(8)), dtype="<u8").copy()
    assert keyed(message, low, high).tobytes() == bytes.fromhex("6224939a79f5f593")


@given(st.integers(0, 30_000), st.integers(1, MAX_ENTRIES), st.integers(0, 99))
@settings(max_examples=40)
def test_a_sketch_is_the_sample_of_its_level(length, entries, seed):
    tokens = random_tokens(seed, length)
    sketch = sketch_of(tokens, SALTED, entries)
    low, high = np.frombuffer(SALTED, dtype="<u8")
    values = keyed(fingerprint(tokens).hashes, low, high).tolist()
    assert sketch.anchors == len(values)
    sample = [value & 0xFFFFFFFF for value in values if value >> (64 - sketch.level) == 0]
    assert sketch.entries.tolist() == sample[:entries]
    assert len(sample) <= entries or sketch.level == MAX_LEVEL
    assert not sketch.level or sum(value >> (65 - sketch.level) == 0 for value in values) > entries
    again = Sketch.from_bytes(sketch.to_bytes())
    assert (again.level, again.anchors, again.entries.tolist()) == (sketch.level, sketch.anchors, sample[:entries])
    assert len(sketch.to_bytes()) <= MAX_SKETCH_BYTES


@pytest.mark.promise("fleet", "Sketches of one tenant say nothing...")
@pytest.mark.parametrize("salt", [None, "", "other", "salt ", "salt"])
def test_other_tenants_and_namespaces_see_nothing(salt):
    tokens, other = random_tokens(1, 8000), sketch_key("other" if salt == "salt" else "namespace", salt)
    assert other != SALTED
    assert overlap(sketch_of(tokens, SALTED), prompt_fingerprints(tokens, other)) == 0.0


def test_bad_sizes_keys_and_tokens_are_refused():
    for entries in (0, MAX_ENTRIES + 1):
        with pytest.raises(ValueError, match="entries"):
            sketch_of(random_tokens(1, 100), SALTED, entries)
    with pytest.raises(ValueError, match="16 bytes"):
        sketch_of(random_tokens(1, 100), b"short")
    with pytest.raises(ValueError, match="token ids"):
        prompt_fingerprints([-1] * 40, SALTED)


@given(st.binary(max_size=64))
def test_bytes_from_outside_are_checked(data):
    good = sketch_of(random_tokens(1, 400), SALTED).to_bytes()
    for candidate in (data, good[:4] + data, good + data[:1] * 5, good[: len(data)]):
        try:
            sketch = Sketch.from_bytes(candidate)
        except ValueError:
            continue
        assert sketch.to_bytes() == candidate
