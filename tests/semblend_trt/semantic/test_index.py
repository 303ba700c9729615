"""The semantic index against a plain search: across namespaces, and after every change."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from semblend_trt.semantic.index import SemanticIndex

DIM = 32


def unit(seed, count=1):
    vectors = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class AgainstPlainSearch(RuleBasedStateMachine):
    """Adds, replaces and removes in any order; a search is exact but for rounding."""

    def __init__(self):
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
        assert len(found) == min(count, len(expected))
        np.testing.assert_allclose([similarity for _, similarity in found], expected[:count], atol=1e-3)
        assert all(self.held[entry_id][0] == key for entry_id, _ in found)


AgainstPlainSearch.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAgainstPlainSearch = AgainstPlainSearch.TestCase
