"""The semantic index against a plain search: across namespaces, and after every change."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from semblend_trt.semantic.index import SemanticIndex

DIM = 32


def unit(seed: int, count: int = 1) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class AgainstPlainSearch(RuleBasedStateMachine):
    """Adds, replaces and removes in any order; a search is exact but for rounding."""

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


def test_threads_may_add_remove_and_find_at_once():
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
