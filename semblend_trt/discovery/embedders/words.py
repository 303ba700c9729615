"""The different words of a text and how often each stands in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.discovery.embedders.hashing import word_hashes

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Words:
    """Different words: `hashes` uint64 [words], ascending, with the word's length in the lowest four bits, and `counts`
    int64 [words]."""

    hashes: npt.NDArray[np.uint64]
    counts: npt.NDArray[np.int64]


def words_of(text: str) -> Words:
    """The words of `text`, whatever their order.

    A word is a run of letters and digits, in lower case. Scripts that put no space between words (U+2E80 and above)
    give every pair of neighbouring characters instead.
    """
    characters = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return Words(*np.unique(word_hashes(characters), return_counts=True))
