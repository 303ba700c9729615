"""Embedders: texts as vectors. Two compare words by their hashes, in loops that numba compiles; two run a model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from semblend_trt.compiled import entry, inner
from semblend_trt.config import EmbedderKind
from semblend_trt.errors import ConfigurationError
from semblend_trt.model_tokenizer import tokenizer_file
from semblend_trt.semantic.sentence_model import GRAPH_INPUTS, graph_of, missing_extra, sentence_model
from semblend_trt.transformers_version import imported

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenizers import Tokenizer

_Hashes = npt.NDArray[np.uint64]
_Vector = npt.NDArray[np.float32]

WINDOW_TOKENS = 256
SPECIAL_TOKENS = 2
OVERLAP_TOKENS = 64
# Windows computed together; more would only take more memory.
BATCH_WINDOWS = 16

# A hash's lowest bits hold the word's length, at most this.
_LENGTH_MASK = 15
_FULL_LENGTH = 8
_ENTRIES = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# FNV-1a, 64 bits (draft-eastlake-fnv).
_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_FIRST_UNSPACED = np.uint32(0x2E80)
_ALL_BITS = np.uint64(0xFFFFFFFFFFFFFFFF)


class Embedder:
    """Turns texts into vectors whose inner product is their similarity."""

    dim: int

    def embed(self, texts: Sequence[str]) -> _Vector:
        """Return vectors float32 [len(texts), dim] of unit length; a text without a word gets zeros."""
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for text, vector in zip(texts, vectors, strict=True):
            self._write(text, vector)
        return vectors

    def _write(self, text: str, vector: _Vector) -> None:
        """Write the text's vector over zeros."""
        raise NotImplementedError


def embedder_for(kind: EmbedderKind, model: str | Path | None = None) -> Embedder:
    """Make an embedder. Not for a serving thread: it may read a model of 90 MB. `model` is a folder or a hub id; None
    finds all-MiniLM-L6-v2 on this machine. Nothing is downloaded. Raises ConfigurationError for OFF, and for a missing
    package or model, with the extra to install."""
    if kind is EmbedderKind.OFF:
        raise ConfigurationError("embedder off embeds nothing; name another")
    if kind is EmbedderKind.STATIC:
        return StaticEmbedder()
    if kind is EmbedderKind.JACCARD:
        return JaccardEmbedder()
    if kind is EmbedderKind.MINILM:
        return MiniLmEmbedder(model)
    return OnnxEmbedder(model, on_gpu=kind is EmbedderKind.ONNX_GPU)


# -- words ------------------------------------------------------------------------------------------------------------
@inner
def _mixed(value: np.uint64) -> np.uint64:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@inner
def _is_letter(character: np.uint32) -> bool:
    if character < 128:
        return bool((48 <= character <= 57) or (97 <= character <= 122))
    # Below U+2000 nearly all are letters; U+2000 to U+2E7F are punctuation.
    return bool(0xC0 <= character < 0x2000)


@inner
def _named(value: np.uint64, length: int) -> np.uint64:
    return (_mixed(value) & ~np.uint64(_LENGTH_MASK)) | np.uint64(min(length, _LENGTH_MASK))


@entry
def _word_hashes(characters: npt.NDArray[np.uint32]) -> _Hashes:
    """Return every word's hash in order, uint64 [words]; `characters` are code points in lower case."""
    hashes = np.empty(len(characters), dtype=np.uint64)
    found, length, value = 0, 0, _FNV_OFFSET
    for at in range(len(characters)):
        character = characters[at]
        if _is_letter(character):
            value = (value ^ np.uint64(character)) * _FNV_PRIME
            length += 1
            continue
        if length:
            hashes[found] = _named(value, length)
            found, length, value = found + 1, 0, _FNV_OFFSET
        if character >= _FIRST_UNSPACED and at + 1 < len(characters) and characters[at + 1] >= _FIRST_UNSPACED:
            pair = (_FNV_OFFSET ^ np.uint64(character)) * _FNV_PRIME
            # Two such characters say about as much as a word of four letters.
            hashes[found] = _named((pair ^ np.uint64(characters[at + 1])) * _FNV_PRIME, 4)
            found += 1
    if length:
        hashes[found] = _named(value, length)
        found += 1
    return hashes[:found]


@entry
def _project(hashes: _Hashes, counts: npt.NDArray[np.int64], vector: _Vector) -> None:
    """Write the projected word weights into `vector` (zeros before), with unit length."""
    dim = np.uint64(len(vector))
    sums = np.zeros(len(vector), dtype=np.float64)
    for word in range(len(hashes)):
        length = min(int(hashes[word] & np.uint64(_LENGTH_MASK)), _FULL_LENGTH)
        weight = (1.0 + np.log(float(counts[word]))) * length / _FULL_LENGTH
        bits = hashes[word]
        for _ in range(_ENTRIES):
            bits = _mixed(bits + _GOLDEN)
            sums[(bits >> np.uint64(1)) % dim] += weight if bits & np.uint64(1) else -weight
    norm = 0.0
    for value in sums:
        norm += value * value
    if norm > 0.0:
        for at in range(len(vector)):
            vector[at] = sums[at] / np.sqrt(norm)


@entry
def _sketch(hashes: _Hashes, vector: _Vector) -> None:
    """Write one sign per hash function, `len(vector)` of them: that of the function's least value over `hashes`."""
    if not len(hashes):
        return
    size = 1.0 / np.sqrt(float(len(vector)))
    for function in range(len(vector)):
        seed = _mixed(np.uint64(function + 1) * _GOLDEN)
        least = _ALL_BITS
        for word in hashes:
            least = min(least, _mixed(word ^ seed))
        # The lowest bit does not decide which value is the least.
        vector[function] = size if least & np.uint64(1) else -size


def _words_of(text: str) -> tuple[_Hashes, npt.NDArray[np.int64]]:
    """Return the different words of `text`: ascending hashes, and how often each occurs, int64 [words].

    A word is a run of letters and digits in lower case. Scripts without spaces (from U+2E80) give pairs."""
    characters = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    hashes, counts = np.unique(_word_hashes(characters), return_counts=True)
    return hashes, counts


class StaticEmbedder(Embedder):
    """Compares words, neither their order nor their meaning. Deterministic and thread safe. A word's hash chooses 8 of
    the 384 entries and their signs; it adds (1 + ln count) * min(length, 8) / 8 to each. Such a sparse random
    projection (Achlioptas 2003; Li, Hastie and Church 2006) changes inner products by about 1 / sqrt(384). Length is
    used for rarity, since short words are frequent in most languages."""

    dim = 384

    def _write(self, text: str, vector: _Vector) -> None:
        _project(*_words_of(text), vector)


class JaccardEmbedder(Embedder):
    """One-bit minwise hashing (Broder 1997; Li and König 2010) with 1,024 hash functions. Deterministic, thread safe.

    Entry i is +-1/32, signed by a bit of the i-th hash function's least value over the words. Two sets share that value
    with probability J, their Jaccard index. Inner products have mean J and standard deviation 1/32 at most."""

    dim = 1024

    def _write(self, text: str, vector: _Vector) -> None:
        _sketch(_words_of(text)[0], vector)


# -- a sentence model -------------------------------------------------------------------------------------------------
class SentenceEmbedder(Embedder):
    """Gives a text the mean of its windows' vectors, with unit length."""

    def __init__(self, cutter: Tokenizer) -> None:
        self._cutter = cutter
        self.dim = int(self.embed_windows(["a"]).shape[1])

    def _write(self, text: str, vector: _Vector) -> None:
        windows = windows_of(text, self._cutter)
        for start in range(0, len(windows), BATCH_WINDOWS):
            vector += self.embed_windows(windows[start : start + BATCH_WINDOWS]).sum(axis=0)
        if norm := float(np.linalg.norm(vector)):
            vector /= norm

    def embed_windows(self, windows: list[str]) -> _Vector:
        """Return unit vectors float32 [windows, dim] of at most BATCH_WINDOWS windows."""
        raise NotImplementedError


class MiniLmEmbedder(SentenceEmbedder):
    """A sentence-transformer on the CPU. Raises ConfigurationError without the package or the model's files."""

    def __init__(self, model: str | Path | None = None) -> None:
        try:
            kind = imported("SentenceTransformer", "sentence_transformers")
        except ImportError:
            missing_extra("minilm", "sentence-transformers", "embedder")
        files = sentence_model(model, "minilm", "embedder")
        try:
            self._model = kind(str(files.folder), device="cpu", local_files_only=True)
        except Exception as error:
            raise ConfigurationError(f"embedder minilm: {files.folder} is no sentence model: {error}") from error
        super().__init__(tokenizer_file(files.folder))

    def embed_windows(self, windows: list[str]) -> _Vector:
        vectors = self._model.encode(
            windows, batch_size=BATCH_WINDOWS, show_progress_bar=False, normalize_embeddings=True
        )
        return np.asarray(vectors, dtype=np.float32)


class OnnxEmbedder(SentenceEmbedder):
    """Equals `MiniLmEmbedder` to 1e-3 in cosine distance; ONNX Runtime runs it on half of the cores. Raises
    ConfigurationError without ONNX Runtime, its CUDA part for `on_gpu`, or the model's files."""

    def __init__(self, model: str | Path | None = None, *, on_gpu: bool = False) -> None:
        name, extra = ("onnx_gpu", "onnx-gpu") if on_gpu else ("onnx", "onnx")
        try:
            import onnxruntime
        except ImportError:
            missing_extra(name, "onnxruntime", extra)
        provider = "CUDAExecutionProvider" if on_gpu else "CPUExecutionProvider"
        if provider not in onnxruntime.get_available_providers():
            missing_extra(name, f"onnxruntime with {provider}", extra)
        files = sentence_model(model, name, extra)
        graph = graph_of(files)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = max(1, (os.cpu_count() or 1) // 2)
        # A thread that spins while it waits would take a core from the engine.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(str(graph), options, providers=[provider])
        except Exception as error:
            raise ConfigurationError(f"{graph} is no graph that ONNX Runtime can run: {error}; delete it") from error
        if self._session.get_providers()[0] != provider:
            needed = f"a CUDA device and libraries that onnxruntime {onnxruntime.__version__} can use"
            missing_extra(name, needed, extra)
        self._tokenizer = tokenizer_file(files.folder)
        self._tokenizer.enable_truncation(WINDOW_TOKENS)
        self._tokenizer.enable_padding()
        super().__init__(tokenizer_file(files.folder))

    def embed_windows(self, windows: list[str]) -> _Vector:
        encodings = self._tokenizer.encode_batch(windows)
        columns = [each.ids for each in encodings], [each.attention_mask for each in encodings]
        (vectors,) = self._session.run(None, dict(zip(GRAPH_INPUTS, np.array(columns, dtype=np.int64), strict=True)))
        return np.asarray(vectors, dtype=np.float32)


def windows_of(text: str, tokenizer: Tokenizer) -> list[str]:
    """Cut `text` between words into windows of at most 254 tokens; each begins 64 tokens before the last one ends.
    Every character but white space is in a window. An empty text has none."""
    (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
    offsets, words = encoding.offsets, encoding.word_ids
    most, count = WINDOW_TOKENS - SPECIAL_TOKENS, len(offsets)
    windows, begin = [], 0
    while begin < count:
        end = min(begin + most, count)
        if end < count:
            end = _word_start(words, end, begin + 1)
        windows.append(text[offsets[begin][0] : offsets[end - 1][1]])
        if end == count:
            break
        begin = _word_start(words, max(end - OVERLAP_TOKENS, begin + 1), begin + 1)
    return windows


def _word_start(words: list[int | None], at: int, least: int) -> int:
    """Return the first token of the word that holds token `at`; `at` itself where the word begins before `least`."""
    start = at
    while words[start] is not None and words[start] == words[start - 1]:
        start -= 1
        if start < least:
            return at
    return start
