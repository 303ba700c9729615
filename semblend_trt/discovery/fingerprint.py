"""Content-defined anchors of a token sequence, chosen by winnowing.

Schleimer, Wilkerson, Aiken, "Winnowing: Local Algorithms for Document Fingerprinting" (SIGMOD 2003): of every 17
consecutive gram hashes the smallest is kept, the rightmost of equal ones. The choice depends on the window's tokens
only, so sequences that share a run of 32 tokens keep the same anchor inside it, wherever the run stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TokenArray: TypeAlias = npt.NDArray[np.int32]
HashArray: TypeAlias = npt.NDArray[np.uint64]
GramHash: TypeAlias = Callable[[TokenArray], HashArray]

GRAM_TOKENS = 16
WINDOW_GRAMS = 17
GUARANTEED_RUN = GRAM_TOKENS + WINDOW_GRAMS - 1

# A position and a gram's rank share one uint64, so that a minimum of ranks also carries the rightmost position.
_POSITION_BITS = 28
_POSITION_MASK = np.uint64((1 << _POSITION_BITS) - 1)
MAX_TOKENS = 1 << _POSITION_BITS
_RANK_BITS = 64 - _POSITION_BITS
# Grams of one repeated token rank behind all others: they say the least about where they stand.
_CONSTANT_RANK = np.uint64((1 << _RANK_BITS) - 1)
_VARIED_RANK_MASK = np.uint64((1 << (_RANK_BITS - 1)) - 1)

_MASK_64 = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15  # odd, so that multiplying by it loses no bit
# splitmix64's finaliser (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Anchors of one sequence: `hashes` uint64 [n] of the grams that start at `positions` int64 [n], ascending."""

    hashes: HashArray
    positions: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.positions)

    def thinned(self, max_repeats: int) -> Fingerprints:
        """Keeps at most `max_repeats` anchors of one hash: the first half of them and the last.

        Text that repeats itself then costs no more than text that does not, and its ends still align.
        """
        order = np.argsort(self.hashes, kind="stable")
        ordered = self.hashes[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(ordered) else order
        sizes = np.diff(np.append(starts, len(ordered)))
        if not len(sizes) or sizes.max() <= max_repeats:
            return self
        rank = np.arange(len(ordered)) - np.repeat(starts, sizes)
        from_end = np.repeat(sizes, sizes) - rank
        kept = (rank < max_repeats - max_repeats // 2) | (from_end <= max_repeats // 2)
        chosen = np.sort(order[kept])
        return Fingerprints(self.hashes[chosen], self.positions[chosen])


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
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > np.iinfo(np.int32).max:
            raise ValueError(f"token ids span {low}..{high}; they must lie in 0..{np.iinfo(np.int32).max}")
    return np.ascontiguousarray(array, dtype=np.int32)


def gram_hashes(tokens: TokenArray) -> HashArray:
    """Hashes of all grams of GRAM_TOKENS tokens: uint64 [n - GRAM_TOKENS + 1].

    The polynomial sum of token[i + j] * BASE**(GRAM_TOKENS - 1 - j) modulo 2**64, built by doubling the gram's length,
    then mixed so that every bit depends on every token.
    """
    hashes: HashArray = tokens.astype(np.uint64)
    length, power = 1, _BASE
    while length < GRAM_TOKENS:
        hashes = hashes[:-length] * np.uint64(power) + hashes[length:]
        length, power = 2 * length, power * power & _MASK_64
    hashes = (hashes ^ (hashes >> np.uint64(30))) * _MIX_1
    hashes = (hashes ^ (hashes >> np.uint64(27))) * _MIX_2
    hashes ^= hashes >> np.uint64(31)
    return hashes


def fingerprint(tokens: TokenArray, hash_grams: GramHash = gram_hashes) -> Fingerprints:
    """Chooses the anchors of `tokens` (int32 [n], from `as_token_array`), about one in 9 tokens of ordinary text.

    Any two sequences that share a run of at least GUARANTEED_RUN tokens, not all equal, keep the same anchor at the
    same place of that run. A stretch of one repeated token keeps its first and last gram only. None for shorter input.
    """
    if len(tokens) < GUARANTEED_RUN:
        return Fingerprints(np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64))
    hashes = hash_grams(tokens)
    constant = _constant_grams(tokens)
    ranks = np.where(constant, _CONSTANT_RANK, hashes & _VARIED_RANK_MASK)
    positions = np.arange(len(hashes), dtype=np.uint64)
    keys = (ranks << np.uint64(_POSITION_BITS)) | (_POSITION_MASK - positions)
    smallest = _window_minimum(keys)
    smallest = smallest[(smallest >> np.uint64(_POSITION_BITS)) != _CONSTANT_RANK]
    chosen = (_POSITION_MASK - (smallest & _POSITION_MASK)).astype(np.int64)
    chosen = chosen[np.concatenate(([True], chosen[1:] != chosen[:-1]))] if len(chosen) else chosen
    ends = _constant_stretch_ends(constant)
    if len(ends):
        chosen = np.union1d(chosen, ends)
    return Fingerprints(hashes[chosen], chosen)


def _constant_grams(tokens: TokenArray) -> npt.NDArray[np.bool_]:
    changes = np.concatenate(([0], np.cumsum(tokens[1:] != tokens[:-1])))
    return np.asarray(changes[GRAM_TOKENS - 1 :] == changes[: len(changes) - GRAM_TOKENS + 1])


def _constant_stretch_ends(constant: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    edges = np.flatnonzero(np.diff(constant, prepend=False, append=False))
    firsts, lasts = edges[0::2], edges[1::2] - 1
    long = lasts - firsts >= WINDOW_GRAMS - 1
    return np.concatenate((firsts[long], lasts[long]))


def _window_minimum(keys: HashArray) -> HashArray:
    """Minimum of every WINDOW_GRAMS consecutive keys: [n - WINDOW_GRAMS + 1]."""
    minimum, length = keys, 1
    while 2 * length <= WINDOW_GRAMS:
        minimum = np.minimum(minimum[:-length], minimum[length:])
        length *= 2
    rest = WINDOW_GRAMS - length
    return np.minimum(minimum[: len(minimum) - rest], minimum[rest:])
