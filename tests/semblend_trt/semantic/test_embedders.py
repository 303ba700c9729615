"""Embedders: what their vectors say, how long texts are cut, the messages about missing packages and models,
and the exported graph against the model that it was made from, with the real weights of all-MiniLM-L6-v2."""

import itertools
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from semblend_trt.config import EmbedderKind
from semblend_trt.errors import ConfigurationError
from semblend_trt.semantic.embedders import (
    BATCH_WINDOWS,
    SPECIAL_TOKENS,
    WINDOW_TOKENS,
    OnnxEmbedder,
    SentenceEmbedder,
    embedder_for,
    graph_of,
    sentence_model,
)

WORDS = st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=40)
PLAIN = [EmbedderKind.STATIC, EmbedderKind.JACCARD]
MISSING = [name for name in ("sentence_transformers", "onnxruntime", "onnxscript") if find_spec(name) is None]
SENTENCES = ["A man is eating food.", "Someone eats a piece of bread."]
SENTENCES += ["The central bank raised interest rates on Tuesday."]
LONG = " ".join(f"On day {day} the crew of hangar {day * 7 % 13} mended {day * 3 % 11} engines." for day in range(120))


@pytest.mark.parametrize("kind", PLAIN)
@settings(max_examples=40)
@given(words=WORDS, seed=st.integers(0, 1000))
def test_vectors_have_unit_length_and_no_order(kind, words, seed):
    embedder = embedder_for(kind)
    shuffled = np.random.default_rng(seed).permutation(np.array(words, dtype=object)).tolist()
    vectors = embedder.embed([" ".join(words), " ".join(shuffled)])
    assert vectors.shape == (2, embedder.dim)
    assert vectors.dtype == np.float32
    lengths = np.linalg.norm(vectors, axis=1)
    assert np.all((np.abs(lengths - 1) < 1e-5) | (lengths == 0))
    np.testing.assert_array_equal(vectors[0], embedder.embed([" ".join(words)])[0])
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)


@pytest.mark.parametrize("kind", PLAIN)
def test_a_shared_document_is_near_and_another_is_not(kind):
    rng = np.random.default_rng(0)
    numbers = (rng.integers(0, 50_000, count) for count in (800, 800, 100))
    document, other, instruction = (" ".join(f"w{each}x{each * 7 % 97}" for each in some) for some in numbers)
    donor, request, stranger = embedder_for(kind).embed([document, instruction + " " + document, other])
    assert donor @ request > 0.8
    assert abs(donor @ stranger) < 0.2
    assert not embedder_for(kind).embed(["", "   ", "?!, -- \n", "\ud800"]).any()
    # Compared by pairs.
    one, moved = embedder_for(kind).embed(["今天天气很好我们去公园散步", "我们去公园散步今天天气很好"])
    assert one @ moved > 0.6


@settings(max_examples=60)
@given(left=st.integers(0, 300), both=st.integers(1, 300), right=st.integers(0, 300), first=st.integers(0, 10**6))
def test_jaccard_vectors_estimate_the_jaccard_index(left, both, right, first):
    names = [f"n{number}" for number in range(first, first + left + both + right)]
    one, other = embedder_for(EmbedderKind.JACCARD).embed([" ".join(names[: left + both]), " ".join(names[left:])])
    # Six standard deviations.
    assert abs(one @ other - both / (left + both + right)) <= 6 / 32


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [
        (EmbedderKind.MINILM, "sentence_transformers", "embedder"),
        (EmbedderKind.ONNX, "onnxruntime", "onnx"),
        (EmbedderKind.ONNX_GPU, "onnxruntime", "onnx-gpu"),
    ],
)
def test_a_missing_package_or_model_is_named(monkeypatch, tmp_path, kind, package, extra):
    with pytest.raises(ConfigurationError, match="off embeds nothing"):
        embedder_for(EmbedderKind.OFF)
    if kind is not EmbedderKind.ONNX_GPU:
        pytest.importorskip(package)
        with pytest.raises(ConfigurationError, match=r"model\.safetensors"):
            embedder_for(kind, tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'semblend-trt\[{extra}\]'"):
        embedder_for(kind)


@pytest.fixture(scope="module")
def tokenizer():
    """Words in pieces of at most two letters, as WordPiece cuts them."""
    letters = "abcdefghij"
    pieces = [*letters, *(a + b for a in letters for b in letters)]
    names = ["[UNK]", *pieces, *("##" + piece for piece in pieces)]
    made = Tokenizer(models.WordPiece({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return made


class Lengths(SentenceEmbedder):
    """A window's vector is its length and how often it has the letter a."""

    def __init__(self, cutter):
        self.batches = []
        super().__init__(cutter)

    def embed_windows(self, windows):
        self.batches.append(windows)
        return np.array([[len(window), window.count("a")] for window in windows], dtype=np.float32)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), count=st.integers(0, 9000))
def test_a_text_is_the_mean_of_windows_that_cover_it_and_overlap(tokenizer, seed, count):
    rng, embedder = np.random.default_rng(seed), Lengths(Tokenizer.from_str(tokenizer.to_str()))
    text = " ".join("".join(rng.choice(list("abcdefghij"), rng.integers(1, 12))) for _ in range(count // 10))
    vectors, end = embedder.embed([text, " \n "]), 0
    assert all(len(batch) <= BATCH_WINDOWS for batch in embedder.batches)
    for window in itertools.chain(*embedder.batches[1:]):
        assert len(tokenizer.encode(window, add_special_tokens=False).ids) <= WINDOW_TOKENS - SPECIAL_TOKENS
        start = text.index(window, max(end - len(window), 0))
        assert start < end or end == 0
        end = start + len(window)
    assert end == len(text)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [bool(text), 0], rtol=1e-6)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The cache folder in which the graph of the model on this machine is made."""
    if MISSING:
        pytest.skip(f"skipped: not installed: {', '.join(MISSING)}")
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        try:
            embedder_for(EmbedderKind.ONNX)
        except ConfigurationError as error:
            pytest.skip(str(error))
        yield folder


def test_graph_and_torch_agree_to_a_thousandth_in_cosine_distance(cache):
    texts = [*SENTENCES, LONG, "", "word " * 600, "语言模型共享文档。" * 100]
    ours, theirs = (embedder_for(kind).embed(texts) for kind in (EmbedderKind.ONNX, EmbedderKind.MINILM))
    assert ours.shape == theirs.shape == (len(texts), 384)
    distances = 1 - np.einsum("ij,ij->i", ours, theirs)
    assert (distances <= 1e-3).tolist() == [True, True, True, True, False, True, True], distances
    assert not np.any([ours[4], theirs[4]])


def test_a_graph_is_made_once_and_a_damaged_one_is_named(cache, monkeypatch, tmp_path):
    (made,) = (cache / "semblend_trt").iterdir()
    assert graph_of(sentence_model(None, "onnx", "onnx")) == made
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "semblend_trt").mkdir()
    (tmp_path / "semblend_trt" / made.name).write_bytes(b"no graph")
    with pytest.raises(ConfigurationError, match="is no graph that ONNX Runtime can run"):
        OnnxEmbedder()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_onnx_gpu_names_its_extra():
    with pytest.raises(ConfigurationError, match=r"pip install 'semblend-trt\[onnx-gpu\]'"):
        OnnxEmbedder(on_gpu=True)
