"""The semantic index against a plain search: across namespaces, on text, and after every change."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from semblend_trt.semantic import index as index_module
from semblend_trt.semantic.index import NamespaceIndex, SemanticIndex
from semblend_trt.semantic.word_embedders import StaticEmbedder
from tests.pages import ROOT

EXCERPT = ROOT / "validation" / "assets" / "excerpt.txt"
DIM = 32


def unit(seed: int, count: int = 1) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def names(count: int) -> list[str]:
    return [str(number) for number in range(count)]


class AgainstPlainSearch(RuleBasedStateMachine):
    """Adds, replaces and removes in any order; small namespaces are exact but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.index = SemanticIndex(DIM)
        self.held: dict[str, tuple[str, np.ndarray]] = {}

    @rule(key=st.sampled_from("ab"), name=st.integers(0, 30), seed=st.integers(0, 10_000))
    def add(self, key, name, seed):
        self.index.add(key, [str(name)], unit(seed))
        self.held[str(name)] = (key, unit(seed)[0])

    @rule(name=st.integers(0, 30))
    def remove(self, name):
        assert self.index.remove(str(name)) == (self.held.pop(str(name), None) is not None)

    @rule(key=st.sampled_from("abc"), seed=st.integers(0, 10_000), count=st.integers(1, 8))
    def find(self, key, seed, count):
        query = unit(seed)[0]
        expected = sorted((float(vector @ query) for owner, vector in self.held.values() if owner == key), reverse=True)
        found = self.index.find(key, query, count)
        np.testing.assert_allclose([similarity for _, similarity in found], expected[:count], atol=1e-3)
        assert all(self.held[entry_id][0] == key for entry_id, _ in found)

    @invariant()
    def as_many_as_held(self):
        assert len(self.index) == len(self.held)


AgainstPlainSearch.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAgainstPlainSearch = AgainstPlainSearch.TestCase


def test_an_odd_size_is_refused():
    with pytest.raises(ValueError, match="vectors of 383 numbers"):
        SemanticIndex(383)


def test_threads_may_add_remove_and_find_at_once(monkeypatch):
    monkeypatch.setattr(index_module, "EXACT_ENTRIES", 100)
    index = SemanticIndex(DIM)
    failures = []

    def work(worker: int) -> None:
        vectors = unit(worker, 200)
        try:
            for number, vector in enumerate(vectors):
                index.add("space", [f"{worker}-{number}"], vector[None])
                if number % 3 == 0:
                    assert index.remove(f"{worker}-{number}")
                else:
                    assert index.find("space", vector, 1)[0][0] == f"{worker}-{number}"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(index) == 3 * 133


@pytest.fixture(params=["together", "clustered"])
def coded(monkeypatch, request) -> tuple[NamespaceIndex, np.ndarray]:
    """A namespace with codes, all together or in ten clusters that are all searched, and its vectors. A seventh of the
    vectors is compared after the codes."""
    monkeypatch.setattr(index_module, "EXACT_ENTRIES", 700)
    monkeypatch.setattr(index_module, "CLUSTER_ENTRIES", 100)
    index, vectors = NamespaceIndex(DIM), unit(1, 1000)
    with monkeypatch.context() as few:
        few.setattr(index_module, "COMPARED", 1000 if request.param == "together" else 800)
        index.add(names(1000), vectors)
    assert index._is_clustered == (request.param == "clustered")
    return index, vectors


def recall(index: NamespaceIndex, vectors: np.ndarray, queries: np.ndarray) -> float:
    """The share of the ten nearest of each query that is found; ties with the tenth count."""
    right = 0
    for query in queries:
        least = np.sort(vectors @ query)[-10] - 1e-6
        found = {int(entry_id) for entry_id, _ in index.find(query, 10)}
        right += int((vectors[sorted(found)] @ query >= least).sum())
    return right / (10 * len(queries))


def passages(text: str, length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Static vectors of `count` passages, and of the next 100."""
    cut = [text[at * length : (at + 1) * length] for at in range(count + 100)]
    vectors = StaticEmbedder().embed(cut)
    return vectors[:count], vectors[count:]


def test_codes_find_passages_of_the_excerpt(monkeypatch):
    monkeypatch.setattr(index_module, "EXACT_ENTRIES", 1000)
    vectors, queries = passages(EXCERPT.read_text("utf-8"), 100, 1500)
    index = NamespaceIndex(384)
    index.add(names(1500), vectors)
    # 150 of 1,500 are compared after the codes; taken without them, they would hold a tenth of the neighbours.
    assert recall(index, vectors, queries) >= 0.98
    monkeypatch.setattr(index_module, "CANDIDATES_PER_HIT", 1)
    monkeypatch.setattr(index_module, "LEAST_CANDIDATES", 10)
    assert 0.4 < recall(index, vectors, queries) < 0.95


def test_any_change_leaves_what_a_plain_search_finds(coded):
    index, vectors = coded
    rng = np.random.default_rng(4)
    held = dict(zip(names(1000), vectors, strict=True))
    fresh = iter(unit(5, 2000))
    for step in range(400):
        if rng.random() < 0.6 and held:
            entry_id = sorted(held)[rng.integers(len(held))]
            index.remove(entry_id)
            del held[entry_id]
        else:
            count = int(rng.integers(1, 4))
            added = {f"{step}-{number}": next(fresh) for number in range(count)}
            index.add(list(added), np.stack(list(added.values())))
            held |= added
        assert len(index) == len(held)
    entry_ids, now = list(held), np.stack(list(held.values()))
    for query in unit(6, 50):
        found = index.find(query, 5)
        assert {entry_id for entry_id, _ in found} == {entry_ids[at] for at in np.argsort(-(now @ query))[:5]}
        for entry_id, similarity in found:
            assert similarity == pytest.approx(float(held[entry_id] @ query), abs=1e-3)


def test_growth_makes_more_clusters_and_keeps_every_entry(monkeypatch):
    monkeypatch.setattr(index_module, "EXACT_ENTRIES", 700)
    monkeypatch.setattr(index_module, "CLUSTER_ENTRIES", 100)
    monkeypatch.setattr(index_module, "COMPARED", 1000)
    index, vectors, clusters = NamespaceIndex(DIM), unit(7, 5500), []
    for start in range(0, 5500, 500):
        index.add(names(5500)[start : start + 500], vectors[start : start + 500])
        clusters.append(index._codes.nlist if index._is_clustered else 0 if index._codes is not None else None)
    # Codes beyond 700, clusters beyond 1,000, and again at 6,500, the first number above 4 * 1,500.
    assert clusters == [None, 0, *[15] * 9]
    index.add([f"more-{number}" for number in range(1000)], unit(8, 1000))
    assert index._codes.nlist == 65
    assert index._codes.ntotal == index._vectors.ntotal == len(index) == 6500
    for number in range(0, 5500, 100):
        assert index.find(vectors[number], 1)[0][0] == str(number)


def test_codes_far_into_a_long_list_are_taken_out(monkeypatch):
    monkeypatch.setattr(index_module, "EXACT_ENTRIES", 700)
    index, vectors = NamespaceIndex(DIM), unit(9, 12_000)
    index.add(names(12_000), vectors)
    for number in (11_990, 5, 9_000):
        index.remove(str(number))
    for number in (11_989, 11_998, 11_999, 6, 9_001):  # three of the last took the places of those that went
        assert index.find(vectors[number], 1)[0][0] == str(number)
    assert {index.find(vectors[number], 1)[0][0] for number in (5, 9_000, 11_990)}.isdisjoint({"5", "9000", "11990"})


def test_an_index_of_codes_empties_and_fills_again(coded):
    index, vectors = coded
    for number in range(1000):
        index.remove(str(number))
        if number == 990:
            assert {entry_id for entry_id, _ in index.find(vectors[0], 50)} == set(names(1000)[991:])
    assert len(index) == 0
    index.add(["again"], vectors[:1])
    assert [entry_id for entry_id, _ in index.find(vectors[0], 5)] == ["again"]
