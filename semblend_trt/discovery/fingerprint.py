"""Content-defined anchors of a token sequence, chosen by winnowing.

Schleimer, Wilkerson, Aiken, "Winnowing: Local Algorithms for Document Fingerprinting" (SIGMOD 2003): of every 17
consecutive grams of 16 tokens, those with the smallest rank become anchors. Only the window's tokens decide: sequences
that share a run of 32 tokens keep the same anchor inside it, at any position. The smallest rank of a wider window is
also the smallest of each window of 17 that holds it. So a lookup for longer runs needs only some of the same
anchors."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from semblend_trt.compiled import compiled

TokenArray: TypeAlias = npt.NDArray[np.int32]
HashArray: TypeAlias = npt.NDArray[np.uint64]
Positions: TypeAlias = npt.NDArray[np.int64]
_Flags: TypeAlias = npt.NDArray[np.bool_]
_NO_ENDS: Positions = np.empty(0, dtype=np.int64)

GRAM_TOKENS, WINDOW_GRAMS = 16, 17
GUARANTEED_RUN = GRAM_TOKENS + WINDOW_GRAMS - 1
# Fewer anchors hardly speed a lookup up, and its bounds would hide more runs.
WIDEST_RUN = 64
MAX_TOKENS = 1 << 28
# Anchors kept per hash and sequence.
MAX_REPEATS = 8

RANK_BASE = 0x9E3779B1
_BASE, _RANK_BITS, _HALF = np.uint64(RANK_BASE), np.uint64(0xFFFFFFFF), np.uint64(32)
# The factor of a gram's first token.
_LEAVING = np.uint64(pow(RANK_BASE, GRAM_TOKENS, 1 << 32))
# Grams of one repeated token rank last: they say least about their position.
_CONSTANT = np.uint32(0xFFFFFFFF)
_ODD = np.uint64(0x9E3779B97F4A7C15)


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
    anchors = Fingerprints(*_winnowed(read_only(tokens), shortest - GRAM_TOKENS + 1, ends))
    return anchors if max_repeats >= len(tokens) else anchors.only(~anchors.surplus(max_repeats, ends))


@cache
def warm_up() -> None:
    """Compile the code, or load it from disk, so that no look-up waits for that."""
    tokens = read_only(np.arange(GUARANTEED_RUN, dtype=np.int32))
    fingerprint(tokens)
    equal_around(tokens, 0, tokens, 0)


def read_only(tokens: TokenArray) -> TokenArray:
    """Return a view that nothing writes through: code is compiled once for all of them."""
    view: TokenArray = tokens.view()
    view.flags.writeable = False
    return view


@compiled
def _winnowed(tokens: TokenArray, window: int, ends: Positions) -> tuple[HashArray, Positions]:
    """Return hashes and positions of the anchors of texts that are together `tokens`."""
    is_anchor = np.zeros(len(tokens), dtype=np.bool_)
    begin = 0
    for text in range(len(ends) + 1):
        end = ends[text] if text < len(ends) else len(tokens)
        _winnow(tokens[begin:end], window, is_anchor[begin:end])
        begin = end
    positions = np.flatnonzero(is_anchor)
    hashes = np.empty(len(positions), dtype=np.uint64)
    for index, first in enumerate(positions):
        middle = first + GRAM_TOKENS // 2
        hashes[index] = _sum(tokens[first:middle]) << _HALF | _sum(tokens[middle : first + GRAM_TOKENS])
    return hashes, positions


@compiled
def _sum(tokens: TokenArray) -> np.uint64:
    """Return the polynomial of some tokens in RANK_BASE, modulo 2**32."""
    total: np.uint64 = np.uint64(0)
    for token in tokens:
        total = (total + np.uint64(token)) * _BASE & _RANK_BITS
    return total


@compiled
def _winnow(tokens: TokenArray, window: int, is_anchor: _Flags) -> None:
    """Flag the least grams of every `window` grams of one text, and the ends of GUARANTEED_RUN equal tokens."""
    ranks = _ranks(tokens, is_anchor)
    least, place = _CONSTANT, 0  # the last one of the least grams
    for gram in range(len(ranks)):
        first, rank = gram + 1 - window, ranks[gram]
        if rank <= least:
            least, place = rank, gram
            is_anchor[gram] |= first >= 0 and rank < _CONSTANT
        if first == 0 or place < first:  # the first window, or the least grams have left it
            least = ranks[first : gram + 1].min()
            for each in range(first, gram + 1):
                if ranks[each] == least:
                    place = each
                    is_anchor[each] |= least < _CONSTANT


@compiled
def _ranks(tokens: TokenArray, is_anchor: _Flags) -> npt.NDArray[np.uint32]:
    """Return the ranks of a text's grams. Flag the first and the last one of GUARANTEED_RUN equal tokens or more."""
    ranks = np.empty(max(0, len(tokens) + 1 - GRAM_TOKENS), dtype=np.uint32)
    rank, run = np.uint64(0), 0
    for at in range(len(tokens)):
        if at >= GRAM_TOKENS:
            rank -= np.uint64(tokens[at - GRAM_TOKENS]) * _LEAVING
        rank = (rank + np.uint64(tokens[at])) * _BASE & _RANK_BITS
        run = run + 1 if at and tokens[at] == tokens[at - 1] else 1
        gram = at + 1 - GRAM_TOKENS
        if gram >= 0:
            ranks[gram] = _CONSTANT if run >= GRAM_TOKENS else np.uint32(rank)
        if run >= GUARANTEED_RUN and (at + 1 == len(tokens) or tokens[at + 1] != tokens[at]):
            is_anchor[at + 1 - run] = is_anchor[gram] = True
    return ranks


@compiled
def equal_around(left: TokenArray, at: int, right: TokenArray, place: int) -> tuple[int, int]:
    """Return the number of equal tokens from `left[at]` and `right[place]` on; if any, also the number before them.

    Both are `read_only`."""
    ahead = behind = 0
    while at + ahead < len(left) and place + ahead < len(right) and left[at + ahead] == right[place + ahead]:
        ahead += 1
    while ahead and behind < min(at, place) and left[at - behind - 1] == right[place - behind - 1]:
        behind += 1
    return ahead, behind
