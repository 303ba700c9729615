"""Content-defined anchors of a token sequence, chosen by winnowing.

Schleimer, Wilkerson, Aiken, "Winnowing: Local Algorithms for Document Fingerprinting" (SIGMOD 2003): of every 17
consecutive grams of 16 tokens, those with the smallest rank become anchors. Only the window's tokens decide: sequences
that share a run of 32 tokens keep the same anchor inside it, at any position. The smallest rank of a wider window is
also the smallest of each window of 17 that holds it. So a lookup for longer runs needs only some of the same
anchors."""

from __future__ import annotations

import threading
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

TokenArray: TypeAlias = npt.NDArray[np.int32]
HashArray: TypeAlias = npt.NDArray[np.uint64]
Positions: TypeAlias = npt.NDArray[np.int64]
_Ranks: TypeAlias = npt.NDArray[np.uint32]
_Flags: TypeAlias = npt.NDArray[np.bool_]
_NO_ENDS: Positions = np.empty(0, dtype=np.int64)

GRAM_TOKENS, WINDOW_GRAMS = 16, 17
_MOST_COMPARED = 1 << 15  # tokens at once
GUARANTEED_RUN = GRAM_TOKENS + WINDOW_GRAMS - 1
# Fewer anchors hardly speed a lookup up, and its bounds would hide more runs.
WIDEST_RUN = 64
MAX_TOKENS = 1 << 28
# Anchors kept per hash and sequence.
MAX_REPEATS = 8

RANK_BASE = 0x9E3779B1
_FACTORS = [np.uint32(pow(RANK_BASE, length, 1 << 32)) for length in (1, 2, 4, 8)]
# Grams of one repeated token rank last: they say least about their position.
_CONSTANT = np.uint32(0xFFFFFFFF)
_HALF, _ODD = np.uint64(32), np.uint64(0x9E3779B97F4A7C15)
# Grams ranked together; the intermediate arrays stay in the processor's cache.
_BLOCK = 1 << 15
_ROOM = _BLOCK + 4 * WIDEST_RUN


class _Scratch(threading.local):
    """A thread's arrays for one block: to allocate them for every block takes longer than the arithmetic."""

    def __init__(self) -> None:
        self.ranks, self.halves, self.minima, self.one, self.other = np.empty((5, _ROOM), dtype=np.uint32)


_scratch = _Scratch()


class Fingerprints(NamedTuple):
    """Anchors of one sequence: `hashes` uint64 [n] of the grams that start at `positions` int64 [n], ascending."""

    hashes: HashArray
    positions: Positions

    def only(self, flags: _Flags) -> Fingerprints:
        """Return the anchors with a flag."""
        return Fingerprints(self.hashes[flags], self.positions[flags])

    def surplus(self, most: int, ends: Positions = _NO_ENDS) -> _Flags:
        """Flag anchors beyond the `most` of their hash and text; of these the first half and the last stay."""
        keys, positions = self
        is_surplus: _Flags = np.zeros(len(keys), dtype=np.bool_)
        if len(keys) <= most:
            return is_surplus
        if len(ends):
            keys = keys + np.searchsorted(ends, positions, side="right").astype(np.uint64) * _ODD
        ordered = np.sort(keys)
        if not (ordered[most:] == ordered[:-most]).any():
            return is_surplus
        _, group, totals = np.unique(keys, return_inverse=True, return_counts=True)
        order = np.argsort(group, kind="stable")
        before = np.empty(len(keys), dtype=np.int64)
        before[order] = np.arange(len(keys)) - np.repeat(np.cumsum(totals) - totals, totals)
        last = most // 2
        return (before >= most - last) & (totals[group] - before > last)


def as_token_array(tokens: npt.ArrayLike) -> TokenArray:
    """Return `tokens` as a contiguous int32 [n] array.

    Raises ValueError unless they are fewer than MAX_TOKENS integers in 0 .. 2**31 - 1, in one dimension."""
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
    return np.ascontiguousarray(array, dtype=np.int32)


def fingerprint(
    tokens: TokenArray, max_repeats: int = MAX_REPEATS, shortest: int = GUARANTEED_RUN, ends: Positions = _NO_ENDS
) -> Fingerprints:
    """Choose the anchors of `tokens` (int32 [n], from `as_token_array`).

    In ordinary text about one token in 9 begins an anchor, and one in 25 for runs of 64 tokens. Sequences that share a
    run of at least `shortest` tokens, not all equal, keep the same anchor at its same place. This also holds when one
    of them had a smaller `shortest`. `shortest` is at least GUARANTEED_RUN; above WIDEST_RUN it counts as that. Shorter
    input has no anchors.

    A stretch of one repeated token keeps its first and last gram only. Each hash keeps at most `max_repeats` anchors,
    the first half and the last: so repetitive text costs no more than other text, and its ends still align.

    `ends` (int64 [texts - 1], ascending) are the borders of texts, which do not influence each other's anchors."""
    shortest = min(shortest, WIDEST_RUN)
    if len(tokens) < shortest:
        return Fingerprints(np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64))
    window = shortest - GRAM_TOKENS + 1
    repeated = _repeated_token(tokens, ends)
    hashes, positions = [], []
    for first in range(0, len(tokens) - GRAM_TOKENS + 1, _BLOCK):
        # A gram's windows reach beyond the block.
        low = max(0, first - window + 1)
        ranks = _rank(tokens[low : first + _BLOCK + window + GRAM_TOKENS - 2])
        if repeated is None:
            chosen = _chosen(ranks, window, ends - low)
        else:
            constant, outer = (flags[low : low + len(ranks)] for flags in repeated)
            ranks[constant] = _CONSTANT
            chosen = _chosen(ranks, window, ends - low) & ~constant | outer
        found = np.flatnonzero(chosen[first - low : first - low + _BLOCK]) + (first - low)
        halves = _scratch.halves
        hashes.append(halves[found].astype(np.uint64) << _HALF | halves[found + GRAM_TOKENS // 2])
        positions.append(found + low)
    anchors = Fingerprints(np.concatenate(hashes), np.concatenate(positions))
    return anchors if max_repeats >= len(tokens) else anchors.only(~anchors.surplus(max_repeats, ends))


def _rank(tokens: TokenArray) -> _Ranks:
    """Rank grams: the sums of token[start + j] * RANK_BASE**(GRAM_TOKENS - j) modulo 2**32; those over 8 stay there."""
    rooms = (_scratch.other, _scratch.one, _scratch.halves, _scratch.ranks)
    sums: _Ranks = np.multiply(tokens.view(np.uint32), _FACTORS[0], out=_scratch.one[: len(tokens)])
    for length, factor, room in zip((1, 2, 4, 8), _FACTORS, rooms, strict=True):
        joined = np.multiply(sums[:-length], factor, out=room[: len(sums) - length])
        joined += sums[length:]
        sums = joined
    return sums


def _chosen(ranks: _Ranks, window: int, ends: Positions) -> _Flags:
    """Flag the least of any `window` ranks of one text: it equals the greatest minimum of the windows that hold it."""
    minima = _scratch.minima[: len(ranks) + window - 1]
    minima[window - 1 : len(ranks)] = _reduce(np.minimum, ranks, window)
    # Windows that reach beyond a text's end get the minimum 0, which is never the greatest.
    minima[: window - 1] = minima[len(ranks) :] = 0
    if len(ends):
        reaching = (ends[:, None] - np.arange(1, window + GRAM_TOKENS - 1)).reshape(-1) + window - 1
        minima[reaching[(reaching >= 0) & (reaching < len(minima))]] = 0
    greatest = _reduce(np.maximum, minima, window)
    chosen: _Flags = greatest == ranks
    # Zero tokens on both sides of an end make a gram of rank 0.
    return chosen & (greatest > 0) if len(ends) else chosen


def _reduce(ufunc: np.ufunc, values: _Ranks, window: int) -> _Ranks:
    """Apply `ufunc` to every `window` consecutive values, in the scratch arrays."""
    length, room, spare = 1, _scratch.one, _scratch.other
    while length < window:
        step = min(length, window - length)
        values = ufunc(values[:-step], values[step:], out=room[: len(values) - step])
        room, spare = spare, room
        length += step
    return values


def _repeated_token(tokens: TokenArray, ends: Positions) -> tuple[_Flags, _Flags] | None:
    """Flag grams of one repeated token, and the ends of GUARANTEED_RUN such tokens or more; None without one."""
    # Such a gram holds 8 equal tokens from a multiple of 8 on.
    parts = tokens[: len(tokens) // 8 * 8].reshape(-1, 8)
    alike = parts[:, 0] == parts[:, 7]
    if not alike.any() or not (parts[alike] == parts[alike, :1]).all(axis=1).any():
        return None
    changes = np.flatnonzero(tokens[1:] != tokens[:-1]) + 1
    edges = np.unique(np.concatenate([[0], changes, ends, [len(tokens)]]))
    begins, lengths = edges[:-1], np.diff(edges)
    grams = len(tokens) - GRAM_TOKENS + 1
    constant = np.repeat(edges[1:], lengths)[:grams] - np.arange(grams) >= GRAM_TOKENS
    outer, long = np.zeros(grams, dtype=np.bool_), lengths >= GUARANTEED_RUN
    outer[begins[long]] = outer[(begins + lengths)[long] - GRAM_TOKENS] = True
    return constant, outer


def equal_tokens(left: TokenArray, right: TokenArray, step: int) -> int:
    """Return the number of equal leading tokens; compare `step` first, then four times the last step."""
    length, done = min(len(left), len(right)), 0
    while done < length:
        end = min(done + min(step, _MOST_COMPARED), length)
        differ = left[done:end] != right[done:end]
        first = int(differ.argmax())
        if differ[first]:
            return done + first
        done, step = end, step * 4
    return length
