"""The search benchmark: its truth is the truth, its vectors are unit vectors, its rows are written."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from kernels.benchmarks.rows import Results
from semblend_trt.benchmarks import semantic_search
from semblend_trt.benchmarks.semantic_search import NEAREST, Truth, compare, measure
from semblend_trt.benchmarks.semantic_vectors import DIM, Topics, embedded_passages


def test_truth_is_that_of_one_plain_search():
    topics = Topics.made(3000, seed=0)
    vectors, queries = topics.vectors(3000, seed=2), topics.vectors(20, seed=1)
    truth = Truth(queries)
    for first in range(0, 3000, 700):
        truth.add(vectors[first : first + 700], first)
    expected = np.argsort(-(queries @ vectors.T), axis=1)[:, :NEAREST]
    np.testing.assert_array_equal(truth.ids, expected)
    assert truth.recall([row.tolist() for row in expected]) == 1.0
    assert truth.recall([row[:5].tolist() for row in expected]) == 0.5
    assert truth.recall([[] for _ in expected]) == 0.0
    assert math.isnan(truth.recall([[] for _ in expected], least=2.0))


def test_vectors_are_of_unit_length_and_seeded():
    topics = Topics.made(5000, seed=0)
    vectors = topics.vectors(500, seed=3)
    assert vectors.shape == (500, DIM)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(vectors, Topics.made(5000, seed=0).vectors(500, seed=3))
    assert not np.array_equal(vectors, topics.vectors(500, seed=4))


def test_rows_say_time_and_recall(monkeypatch, tmp_path):
    monkeypatch.setattr(semantic_search, "QUERIES", 20)
    results = Results()
    measure(4000, results)
    results.write(tmp_path, "semantic_search")
    time, recall = json.loads((tmp_path / "semantic_search.json").read_text())
    assert (time["name"], time["unit"], time["goal"]) == ("semantic_p99_ms_4k", "ms", 1.0)
    assert time["value"] > 0
    assert "synthetic" in time["baseline"]
    assert (recall["name"], recall["value"]) == ("semantic_recall_4k", 1.0)


def test_the_comparison_shows_every_library(monkeypatch, capsys):
    topics = Topics.made(2000, seed=0)
    compare("synthetic", topics.vectors(2000, seed=2), topics.vectors(20, seed=1))
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("ours", "IndexFlatIP", "usearch", "IndexHNSWFlat"))


def test_passages_of_a_text_are_found_by_those_that_overlap_them(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"word{number}" for number in rng.integers(0, 5000, 10_000)))
    vectors, queries = embedded_passages(path, 50, 10)
    assert vectors.shape == (50, DIM)
    assert np.all((queries @ vectors.T).max(axis=1) > 0.5)
    with pytest.raises(ValueError, match="too few for 500 passages"):
        embedded_passages(path, 500, 10)
