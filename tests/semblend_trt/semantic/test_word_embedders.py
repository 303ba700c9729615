"""The embedders without a model, and the messages about missing packages and models."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.config import EmbedderKind
from semblend_trt.errors import ConfigurationError
from semblend_trt.semantic.embedder import embedder_for

WORDS = st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=40)
PLAIN = [EmbedderKind.STATIC, EmbedderKind.JACCARD]


@pytest.mark.parametrize("kind", PLAIN)
@given(words=WORDS, seed=st.integers(0, 1000))
def test_vectors_have_unit_length_and_no_order(kind, words, seed):
    embedder = embedder_for(kind)
    shuffled = np.random.default_rng(seed).permutation(np.array(words, dtype=object)).tolist()
    vectors = embedder.embed([" ".join(words), " ".join(shuffled), " ".join(words).upper().lower()])
    assert vectors.shape == (3, embedder.dim)
    assert vectors.dtype == np.float32
    lengths = np.linalg.norm(vectors, axis=1)
    assert np.all((np.abs(lengths - 1) < 1e-5) | (lengths == 0))
    np.testing.assert_array_equal(vectors[0], embedder.embed([" ".join(words)])[0])
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("text", ["", "   ", "?!, -- \n", "\ud800"])
def test_a_text_without_words_is_zero(kind, text):
    assert not embedder_for(kind).embed([text]).any()


@pytest.mark.parametrize("kind", PLAIN)
def test_a_shared_document_is_near_and_another_is_not(kind):
    rng = np.random.default_rng(0)
    document, other, instruction = (
        " ".join(f"w{number}x{number * 7 % 97}" for number in rng.integers(0, 50_000, count))
        for count in (800, 800, 100)
    )
    donor, request, stranger = embedder_for(kind).embed([document, instruction + " " + document, other])
    assert donor @ request > 0.8
    assert abs(donor @ stranger) < 0.2


@settings(max_examples=60)
@given(left=st.integers(0, 300), both=st.integers(1, 300), right=st.integers(0, 300), first=st.integers(0, 10**6))
def test_jaccard_vectors_estimate_the_jaccard_index(left, both, right, first):
    names = [f"n{number}" for number in range(first, first + left + both + right)]
    one, other = embedder_for(EmbedderKind.JACCARD).embed([" ".join(names[: left + both]), " ".join(names[left:])])
    # Six standard deviations.
    assert abs(one @ other - both / (left + both + right)) <= 6 / 32


def test_chinese_text_without_spaces_is_compared_by_pairs():
    one, moved, other = embedder_for(EmbedderKind.STATIC).embed(
        ["今天天气很好我们去公园散步", "我们去公园散步今天天气很好", "股票市场昨日大幅下跌投资者担忧"]
    )
    assert one @ moved > 0.8
    assert one @ other < 0.3


def test_off_is_no_embedder():
    with pytest.raises(ConfigurationError, match="off embeds nothing"):
        embedder_for(EmbedderKind.OFF)


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [
        ("minilm", "sentence_transformers", "embedder"),
        ("onnx", "onnxruntime", "onnx"),
        ("onnx_gpu", "onnxruntime", "onnx-gpu"),
    ],
)
def test_a_missing_package_names_the_extra(monkeypatch, kind, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'semblend-trt\[{extra}\]'"):
        embedder_for(EmbedderKind(kind))


@pytest.mark.parametrize("kind", ["minilm", "onnx"])
def test_a_model_that_is_not_here_is_named(kind, tmp_path):
    pytest.importorskip("sentence_transformers" if kind == "minilm" else "onnxruntime")
    with pytest.raises(ConfigurationError, match=r"model\.safetensors"):
        embedder_for(EmbedderKind(kind), tmp_path)
