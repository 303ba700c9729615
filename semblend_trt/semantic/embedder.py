"""Embedders: the interface, the kinds, and how the one in the settings is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from semblend_trt.config import EmbedderKind
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt


class Embedder(Protocol):
    """Turns texts into vectors whose inner product is their similarity."""

    @property
    def dim(self) -> int: ...

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors float32 [len(texts), dim] of unit length; a text without a word gets zeros."""
        ...


def embedder_for(kind: EmbedderKind, model: str | Path | None = None) -> Embedder:
    """Makes an embedder. Not for a serving thread: it may read a model of 90 MB.

    `model` is a folder or a hub id for the kinds that run a model; None finds all-MiniLM-L6-v2 on this machine. Nothing
    is downloaded. Raises ConfigurationError for OFF, and for a missing package or model, naming the extra to install.
    """
    if kind in (EmbedderKind.STATIC, EmbedderKind.JACCARD):
        from semblend_trt.semantic.word_embedders import JaccardEmbedder, StaticEmbedder

        return StaticEmbedder() if kind is EmbedderKind.STATIC else JaccardEmbedder()
    if kind is EmbedderKind.OFF:
        raise ConfigurationError("embedder off embeds nothing; name another")
    from semblend_trt.semantic.sentence_embedders import MiniLmEmbedder, OnnxEmbedder

    if kind is EmbedderKind.MINILM:
        return MiniLmEmbedder(model)
    return OnnxEmbedder(model, on_gpu=kind is EmbedderKind.ONNX_GPU)
