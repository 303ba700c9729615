"""Embedders: what their vectors say, how long texts are cut, and the messages about missing packages and models."""

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from semblend_trt.config import EmbedderKind
from semblend_trt.errors import ConfigurationError
from semblend_trt.semantic import embedders
from semblend_trt.semantic.embedders import BATCH_WINDOWS, SPECIAL_TOKENS, WINDOW_TOKENS, embedder_for, windows_of

WORDS = st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=40)
PLAIN = [EmbedderKind.STATIC, EmbedderKind.JACCARD]


@pytest.mark.parametrize("kind", PLAIN)
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


def random_words(seed, count):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abcdefghij"), rng.integers(1, 12))) for _ in range(count)]


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), count=st.integers(0, 700))
def test_windows_cover_every_word_and_overlap(tokenizer, seed, count):
    words = random_words(seed, count)
    windows = windows_of(" ".join(words), tokenizer)
    position = 0
    for window in windows:
        assert len(tokenizer.encode(window, add_special_tokens=False).ids) <= WINDOW_TOKENS - SPECIAL_TOKENS
        parts = window.split()
        starts = [at for at in range(position + 1) if words[at : at + len(parts)] == parts]
        assert starts, "the window skips words, or cuts one"
        position = max(starts) + len(parts)
    assert position == count
    for one, other in itertools.pairwise(windows):
        assert other.split()[0] in one.split()


def test_one_endless_word_is_cut(tokenizer):
    tokenizer.model.max_input_chars_per_word = 10_000
    windows = windows_of("ab" * 1000, tokenizer)
    assert len(windows) > 1
    assert sum(map(len, windows)) >= 2000
    assert all(len(window) <= 2 * (WINDOW_TOKENS - SPECIAL_TOKENS) for window in windows)


class Lengths(embedders.SentenceEmbedder):
    """A window's vector is its length and how often it has the letter a."""

    def __init__(self, cutter):
        self.sizes = []
        super().__init__(cutter)

    def embed_windows(self, windows):
        self.sizes.append(len(windows))
        return np.array([[len(window), window.count("a")] for window in windows], dtype=np.float32)


def test_a_text_is_the_mean_of_its_windows_which_come_in_small_batches(tokenizer):
    embedder = Lengths(tokenizer)
    embedder.sizes.clear()
    text = " ".join(random_words(5, 4000))
    count = len(windows_of(text, tokenizer))
    assert count > 2 * BATCH_WINDOWS
    vectors = embedder.embed([text, "", "a", " \n "])
    assert max(embedder.sizes) == BATCH_WINDOWS
    assert sum(embedder.sizes) == count + 1
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 0, 1, 0], rtol=1e-6)
