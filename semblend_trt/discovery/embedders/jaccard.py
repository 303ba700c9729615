"""The set of words as a sketch: the inner product of two sketches estimates the Jaccard index of the two sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.discovery.embedders.hashing import sketch
from semblend_trt.discovery.embedders.words import words_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

DIM = 1024


class JaccardEmbedder:
    """One-bit minwise hashing (Broder 1997; Li and König 2010) with 1,024 hash functions. Deterministic, thread safe.

    Entry i is +-1/32, its sign a bit of the i-th hash function's least value over the set. Two sets agree in that value
    with the probability of their Jaccard index J, and the signs of different values are independent, so the inner
    product has the mean J and a standard deviation of at most 1/32.
    """

    identity = "jaccard-1024-v1"
    dim = DIM

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors float32 [len(texts), 1024] of unit length; a text without a word gets zeros."""
        vectors = np.zeros((len(texts), DIM), dtype=np.float32)
        for text, vector in zip(texts, vectors, strict=True):
            sketch(words_of(text).hashes, vector)
        return vectors
