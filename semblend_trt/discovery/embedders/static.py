"""A static embedding: hashed words, weighted by how often they stand there and how long they are. No model is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.discovery.embedders.hashing import project
from semblend_trt.discovery.embedders.words import words_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

DIM = 384


class StaticEmbedder:
    """Words only: neither their order nor their meaning. Deterministic and thread safe.

    A word adds (1 + ln count) * min(length, 8) / 8, with a sign, to 8 of the 384 entries, all taken from its hash: a
    sparse random projection (Achlioptas 2003; Li, Hastie and Church 2006), whose inner products differ from those of
    the word weights themselves by about 1 / sqrt(384). Short words are the frequent ones in most languages, so length
    stands in for the rarity that nothing here has learnt.
    """

    identity = "static-384-v1"
    dim = DIM

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors float32 [len(texts), 384] of unit length; a text without a word gets zeros."""
        vectors = np.zeros((len(texts), DIM), dtype=np.float32)
        for text, vector in zip(texts, vectors, strict=True):
            words = words_of(text)
            project(words.hashes, words.counts, vector)
        return vectors
