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
    GRAPH_FILE,
    SPECIAL_TOKENS,
    WINDOW_TOKENS,
    OnnxEmbedder,
    SentenceEmbedder,
    embedder_for,
    export,
    graph_of,
    sentence_model,
    windows_of,
)

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


class Lengths(SentenceEmbedder):
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


MISSING = [name for name in ("sentence_transformers", "onnxruntime", "onnxscript") if find_spec(name) is None]

SENTENCES = ["A man is eating food.", "Someone eats a piece of bread."]
SENTENCES += ["The central bank raised interest rates on Tuesday."]
LONG = " ".join(f"On day {day} the crew of hangar {day * 7 % 13} mended {day * 3 % 11} engines." for day in range(120))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder of the model on this machine, with its graph."""
    if MISSING:
        pytest.skip(f"skipped: not installed: {', '.join(MISSING)}")
    try:
        model = sentence_model(None, "onnx", "onnx")
    except ConfigurationError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("embedder")
    for each in model.folder.iterdir():
        (folder / each.name).symlink_to(each)
    export(model, folder / GRAPH_FILE)
    return folder


@pytest.fixture(scope="module")
def both(exported):
    return embedder_for(EmbedderKind.ONNX, exported), embedder_for(EmbedderKind.MINILM, exported)


def test_graph_and_torch_agree_to_a_thousandth_in_cosine_distance(both):
    onnx, torch_based = both
    texts = [*SENTENCES, LONG, "", "word " * 600, "语言模型共享文档。" * 100]
    ours, theirs = onnx.embed(texts), torch_based.embed(texts)
    assert ours.shape == theirs.shape == (len(texts), 384)
    assert not ours[4].any()
    assert not theirs[4].any()
    kept = [number for number in range(len(texts)) if number != 4]
    distances = 1 - np.einsum("ij,ij->i", ours[kept], theirs[kept])
    assert np.all(distances <= 1e-3), distances


def test_like_is_nearer_than_unlike(both):
    eating, bread, bank = both[0].embed(SENTENCES)
    assert eating @ bread > 0.5
    assert eating @ bank < 0.2


def test_documents_in_another_order_are_near(both):
    parts = [LONG, "Lamps, bolts and flutes are kept in annex Oslo. " * 40, "Anna Berg lives in Dartford. " * 60]
    forward, backward = both[0].embed(["\n".join(parts), "\n".join(reversed(parts))])
    assert forward @ backward > 0.95


def test_without_a_graph_in_the_folder_one_is_made_once(exported, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def copied(model, path):
        made.append(path)
        path.parent.mkdir(parents=True)
        path.write_bytes((exported / GRAPH_FILE).read_bytes())

    monkeypatch.setattr("semblend_trt.semantic.embedders.export", copied)
    model = sentence_model(None, "onnx", "onnx")
    assert graph_of(model) == graph_of(model) == tmp_path / "semblend_trt" / f"{model.digest}.onnx"
    assert len(made) == 1


def test_a_damaged_graph_is_named(exported, tmp_path):
    for each in exported.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / GRAPH_FILE).unlink()
    (tmp_path / GRAPH_FILE).write_bytes(b"no graph")
    with pytest.raises(ConfigurationError, match="is no graph that ONNX Runtime can run"):
        OnnxEmbedder(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_onnx_gpu_names_its_extra():
    with pytest.raises(ConfigurationError, match=r"pip install 'semblend-trt\[onnx-gpu\]'"):
        OnnxEmbedder(on_gpu=True)
