"""Content-defined anchors of a token sequence, chosen by winnowing.

Schleimer, Wilkerson, Aiken, "Winnowing: Local Algorithms for Document Fingerprinting" (SIGMOD 2003): of every 17
consecutive grams of 16 tokens the one of the smallest rank is kept, or all of that rank. The choice depends on the
window's tokens only, so sequences that share a run of 32 tokens keep the same anchor inside it, wherever the run
stands. The smallest of a wider window is also that of the windows of 17 in it that hold it: who looks for longer runs
only needs fewer of the same anchors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.winnowing import GRAM_TOKENS, WINDOW_GRAMS, anchors

TokenArray: TypeAlias = npt.NDArray[np.int32]
HashArray: TypeAlias = npt.NDArray[np.uint64]

GUARANTEED_RUN = GRAM_TOKENS + WINDOW_GRAMS - 1
# With still fewer anchors a lookup would hardly be quicker, and bounds would hide more.
WIDEST_RUN = 64
MAX_TOKENS = 1 << 28
# Anchors of one hash kept of one sequence.
MAX_REPEATS = 8


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Anchors of one sequence: `hashes` uint64 [n] of the grams that start at `positions` int64 [n], ascending."""

    hashes: HashArray
    positions: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.positions)


def as_token_array(tokens: npt.ArrayLike) -> TokenArray:
    """Returns `tokens` as a contiguous int32 [n] array.

    Raises ValueError for anything but one dimension of integers in 0 .. 2**31 - 1, or for MAX_TOKENS and more of them.
    """
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"token ids have shape {list(array.shape)}; one dimension is needed")
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"token ids are {array.dtype}; integers are needed")
    if array.size >= MAX_TOKENS:
        raise ValueError(f"{array.size} token ids; at most {MAX_TOKENS - 1} can be indexed")
    if array.size:
        low, largest = int(array.min()), np.iinfo(np.int32).max
        if low < 0 or (array.dtype != np.int32 and int(array.max()) > largest):
            raise ValueError(f"token ids span {low}..{int(array.max())}; they must lie in 0..{largest}")
    array = np.ascontiguousarray(array, dtype=np.int32)
    # Compiled functions are compiled again for arrays that may not be written.
    return array if array.flags.writeable else array.copy()


def fingerprint(tokens: TokenArray, max_repeats: int = MAX_REPEATS, shortest: int = GUARANTEED_RUN) -> Fingerprints:
    """Chooses the anchors of `tokens` (int32 [n], from `as_token_array`): of ordinary text about one in 9 tokens, for
    runs of 64 tokens one in 25.

    Two sequences that share a run of at least `shortest` tokens (at least GUARANTEED_RUN; above WIDEST_RUN as that),
    not all equal, keep the same anchor at the same place of that run; also when one sequence's anchors are those for a
    smaller `shortest`. A stretch of one repeated token keeps its first and last gram only. Of one hash, the first half
    of `max_repeats` anchors and the last half are kept: text that repeats itself then costs no more than text that does
    not, and its ends still align. No anchors for shorter input.
    """
    shortest = min(shortest, WIDEST_RUN)
    if len(tokens) < shortest:
        return Fingerprints(np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64))
    return Fingerprints(*anchors(tokens, shortest - GRAM_TOKENS + 1, max_repeats))
