"""A long text as overlapping windows that a sentence model can read, and their vectors as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt
    from tokenizers import Tokenizer

WINDOW_TOKENS = 256
SPECIAL_TOKENS = 2
OVERLAP_TOKENS = 64

# Windows that are computed together; more of them would only take more memory.
BATCH_WINDOWS = 16


def window_tokenizer(folder: Path) -> Tokenizer:
    """The model's tokenizer, which neither cuts nor pads. Raises ConfigurationError without a readable one."""
    from tokenizers import Tokenizer

    from semblend_trt.errors import ConfigurationError

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigurationError(f"the embedder's tokenizer {path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def windows_of(text: str, tokenizer: Tokenizer) -> list[str]:
    """Parts of `text` of at most 254 tokens each, cut between words; the next begins 64 tokens before one ends.

    Every character but white space is in one of them. An empty text has none.
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
    """Unit vectors float32 [len(texts), dim]: the normalised mean of each text's windows, in whatever order they stand.

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


def _word_start(words: list[int | None], at: int, least: int) -> int:
    """The first token of the word that holds token `at`; `at` itself where the word begins before `least`."""
    start = at
    while words[start] is not None and words[start] == words[start - 1]:
        start -= 1
        if start < least:
            return at
    return start
