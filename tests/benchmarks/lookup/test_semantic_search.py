"""The search benchmarks: their truth is the truth, their vectors are what they say, their rows are written."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from benchmarks.lookup.semantic_search import (
    DIM,
    LEAST_CHARACTERS,
    NEAREST,
    Collection,
    Topics,
    embedded_passages,
    filled,
    measure,
    nearest_products,
    recall,
    synthetic_vectors,
    timed,
)
from validation.results import Results


@pytest.fixture
def text(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"word{number}" for number in rng.integers(0, 5000, 4000)))
    return path


def test_truth_is_that_of_one_plain_search():
    collection = synthetic_vectors(3000, 20)
    products = collection.queries @ collection.vectors.T
    expected = np.argsort(-products, axis=1)[:, :NEAREST]
    wanted = np.take_along_axis(products, expected, axis=1)
    nearest = nearest_products(collection)
    np.testing.assert_allclose(nearest, wanted, atol=1e-6)
    twice = np.repeat(expected[:, :5], 2, axis=1)  # what is named twice counts once
    for found, share in ((expected, 1.0), (expected[:, :5], 0.5), (twice, 0.5)):
        np.testing.assert_array_equal(recall(collection, nearest, found.tolist()), share)
    np.testing.assert_array_equal(recall(collection, nearest, [[] for _ in expected]), 0.0)
    assert np.isnan(recall(collection, nearest, [[] for _ in expected], least=2.0)).all()


def test_an_entry_as_near_as_the_tenth_counts_and_one_less_near_does_not():
    vectors = np.eye(DIM, dtype=np.float32)[:30]
    query = np.zeros((1, DIM), dtype=np.float32)
    query[0, :9], query[0, 9:20], query[0, 20:30] = 0.3, 0.1, 0.099
    axes = Collection("axes", vectors, query)
    for tenth, share in ((19, 1.0), (20, 0.9)):
        assert recall(axes, nearest_products(axes), [[*range(9), tenth]]) == share


def test_vectors_are_of_unit_length_and_seeded():
    topics = Topics.made(5000, seed=0)
    vectors = topics.vectors(500, seed=3)
    assert vectors.shape == (500, DIM)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(vectors, Topics.made(5000, seed=0).vectors(500, seed=3))
    assert not np.array_equal(vectors, topics.vectors(500, seed=4))


def test_rows_say_time_and_recall_and_what_was_searched(tmp_path, text):
    results = Results()
    measure(synthetic_vectors(4000, 20), results)
    measure(embedded_passages(text, 100, 20), results)
    results.write(tmp_path, "semantic_search")
    rows = {row["name"]: row for row in json.loads((tmp_path / "semantic_search.json").read_text())}
    assert set(rows) == {f"semantic_{kind}_{size}" for kind in ("p99_ms", "recall") for size in ("4k", "0k")}
    time, recall = rows["semantic_p99_ms_4k"], rows["semantic_recall_4k"]
    assert (time["unit"], time["goal"], recall["goal"]) == ("ms", 1.0, 0.98)
    assert time["value"] > 0
    assert "4000 synthetic vectors" in time["baseline"]
    assert recall["value"] > 0.99
    assert "100 different passages" in rows["semantic_p99_ms_0k"]["baseline"]


def test_passages_do_not_overlap_and_queries_are_not_stored(text):
    collection = embedded_passages(text, 60, 21)
    assert collection.vectors.shape == (60, DIM)
    assert collection.queries.shape == (21, DIM)
    assert re.search(r"^60 different passages of \d+ characters of text.txt, none overlapping", collection.source)
    nearest = (collection.queries @ collection.vectors.T).max(axis=1)
    # Words here are drawn at random: what shares half of its words with a passage is nearer to it than anything else.
    assert nearest[::2].max() < 0.45 < nearest[1::2].min()


def test_a_text_too_short_is_refused(text):
    with pytest.raises(ValueError, match=f"too few for 510 passages of {LEAST_CHARACTERS}"):
        embedded_passages(text, 500, 20)


def test_without_a_text_passages_are_made_after_the_excerpt():
    collection = embedded_passages(None, 300, 20)
    assert "300 different passages" in collection.source
    assert "made after the shipped excerpt" in collection.source
    found, _ = timed(filled(collection.vectors), collection.queries)
    assert recall(collection, nearest_products(collection), found).mean() > 0.99
