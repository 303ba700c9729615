"""The index of sketches: its estimates equal those of a loop over all sketches; namespaces are told apart."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.errors import NamespaceError
from semblend_trt.fleet.sketch import Sketch, sketch_of
from semblend_trt.fleet.sketch_index import FEWEST_MATCHES, KnownNamespaces, SketchIndex
from semblend_trt.namespace import content_value
from tests.semblend_trt.samples import BASE_NAMESPACE, NAMESPACE, prompt_fingerprints

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
    st.lists(st.integers(0, 7), min_size=1, max_size=4),
    st.sampled_from([8, 32, 256]),
)
deeds = st.lists(
    st.tuples(st.just("add"), donors) | st.tuples(st.just("remove"), st.integers(0, 50)),
    max_size=25,
)


def is_whole(index: SketchIndex) -> bool:
    """Every set that is kept is used, as often as it says, and none is kept twice."""
    numbers, uses = np.unique(index._table[index._table != 0] & np.uint64(0xFFFFFFFF), return_counts=True)
    used = {int(number): int(count) for number, count in zip(numbers, uses, strict=True) if number > 1}
    kept = {number: index._uses[number] for number in index._numbers.values() if number > 1}
    return used == kept and len(index._sets) == 2 + len(kept) + len(index._free) and index._used[0] == uses.sum()


@given(deeds, st.lists(st.integers(0, 7), min_size=1, max_size=6))
@settings(max_examples=80)
def test_estimates_equal_those_of_a_loop_over_all_sketches(history, asked) -> None:
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


def random_sketch(rng: np.random.Generator, entries: int = 200) -> Sketch:
    return Sketch(0, entries, rng.integers(0, 1 << 32, entries, dtype=np.uint32))


def test_the_room_of_what_is_gone_is_used_again() -> None:
    index, rng = SketchIndex(), np.random.default_rng(1)
    for _ in range(40):  # more entries by far than one table of this size holds
        for posting in [index.add(0, random_sketch(rng)) for _ in range(20)]:
            index.remove(posting)
    assert len(index._table) <= 1 << 14
    assert index._numbers == {b"": 1}
    assert is_whole(index)


def test_all_holders_of_a_text_share_a_set_and_are_all_found() -> None:
    index, rng = SketchIndex(), np.random.default_rng(3)
    text, other = _TEXTS[0], random_sketch(rng)
    for worker in range(300):
        index.add(worker, sketch_of(text, KEY))
        index.add(worker, random_sketch(rng))
    assert len(index._numbers) == 1 + 1 + 300
    prompt = prompt_fingerprints(text, KEY)
    assert index.search(300, prompt).tolist() == [1.0] * 300
    assert index.search(300, prompt_fingerprints(_TEXTS[1], KEY)).tolist() == [0.0] * 300
    assert not set(other.entries.tolist()) & set(prompt.entries.tolist())


def test_entries_that_all_have_other_holders_are_found_however_many_there_are() -> None:
    index, rng = SketchIndex(), np.random.default_rng(5)
    prompt = prompt_fingerprints(_TEXTS.reshape(-1), KEY)
    held = rng.random((100, len(prompt))) < 0.5
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


def test_one_chance_meeting_says_nothing() -> None:
    prompt = prompt_fingerprints(_TEXTS.reshape(-1), KEY)
    index = SketchIndex()
    index.add(0, Sketch(0, 1, prompt.entries[:1]))
    index.add(1, Sketch(0, 2, prompt.entries[:2]))
    assert index.search(2, prompt).tolist() == [0.0, pytest.approx(2 / len(prompt))]


def test_entries_that_a_sketchs_level_cannot_have_count_nothing() -> None:
    prompt = prompt_fingerprints(_TEXTS.reshape(-1), KEY)
    index = SketchIndex()
    index.add(0, Sketch(1, 20, prompt.entries[prompt.levels == 0][:20]))
    assert index.search(1, prompt).tolist() == [0.0]


@pytest.fixture
def known():
    return KnownNamespaces(max_namespaces=3)


def test_ranks_of_one_donor_are_one_namespace(known) -> None:
    values = NAMESPACE.to_dict()
    values["tensor_parallel"] |= {"tp_size": 2, "tp_rank": 0}
    other = NAMESPACE.to_dict()
    other["tensor_parallel"] |= {"tp_size": 2, "tp_rank": 1}
    first, second = known.enter(values), known.enter(other)
    assert first is second
    assert first.donors == 2
    known.leave(first)
    assert known.met_by(None) == [first]
    known.leave(second)
    assert known.met_by(None) == []
    assert known.enter(NAMESPACE.to_dict()) is not first


def test_a_request_meets_its_own_salt_only_and_most_donors_first(known) -> None:
    acme = known.enter(BASE_NAMESPACE.for_request("acme", None).to_dict())
    none = known.enter(BASE_NAMESPACE.for_request(None, None).to_dict())
    other = known.enter(dataclasses.replace(BASE_NAMESPACE, model="other").for_request(None, None).to_dict())
    known.enter(dataclasses.replace(BASE_NAMESPACE, model="other").for_request(None, None).to_dict())
    assert known.met_by("acme") == [acme]
    assert known.met_by("Acme") == []
    assert known.met_by(None) == [other, none]


def test_one_model_under_two_names_is_one_namespace(known) -> None:
    revisions = {"model_revision": content_value("0f"), "tokenizer_revision": content_value("1f")}
    first, second = (
        known.enter(dataclasses.replace(BASE_NAMESPACE, model=name, **revisions).to_dict()) for name in ("one", "two")
    )
    assert first is second


def test_a_namespace_with_another_tenants_key_is_refused(known) -> None:
    for salt, foreign in (("acme", "other"), (None, "acme"), ("acme", None)):
        values = BASE_NAMESPACE.for_request(salt, None).to_dict()
        values["extra"]["tenant_key"] = BASE_NAMESPACE.for_request(foreign, None).extra["tenant_key"]
        with pytest.raises(NamespaceError, match="tenant key"):
            known.enter(values)
    known.enter(BASE_NAMESPACE.for_request("", None).to_dict())


def test_there_is_a_most(known) -> None:
    for salt in "abc":
        known.enter(BASE_NAMESPACE.for_request(salt, None).to_dict())
    with pytest.raises(NamespaceError, match="more than 3"):
        known.enter(BASE_NAMESPACE.for_request("d", None).to_dict())
    known.enter(BASE_NAMESPACE.for_request("a", None).to_dict())
