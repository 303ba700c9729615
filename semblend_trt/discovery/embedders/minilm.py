"""all-MiniLM-L6-v2, or another sentence model, through sentence-transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.discovery.embedders.sentence_model import missing_extra, sentence_model
from semblend_trt.discovery.embedders.windows import BATCH_WINDOWS, pooled, window_tokenizer
from semblend_trt.errors import ConfigurationError
from semblend_trt.transformers_version import imported

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt


class MiniLmEmbedder:
    """A sentence-transformer on the CPU. Texts longer than its window are read as overlapping windows and averaged.

    Raises ConfigurationError without sentence-transformers, or without the model's files on this machine.
    """

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
        self._tokenizer = window_tokenizer(files.folder)
        self.identity = files.identity
        self.dim = int(self._model.encode(["a"], show_progress_bar=False).shape[1])

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors float32 [len(texts), dim] of unit length; a text without a word gets zeros."""
        return pooled(texts, self._tokenizer, self.dim, self._embed_windows)

    def _embed_windows(self, windows: list[str]) -> npt.NDArray[np.float32]:
        vectors = self._model.encode(
            windows, batch_size=BATCH_WINDOWS, show_progress_bar=False, normalize_embeddings=True
        )
        return np.asarray(vectors, dtype=np.float32)
