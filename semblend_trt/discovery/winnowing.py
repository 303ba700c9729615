"""The loops behind `fingerprint`, compiled. A sequence is gone through in blocks that stay in the processor's cache.

Loops over arrays take the arrays already shifted, so that the compiler makes vector instructions of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import entry, inner
from semblend_trt.discovery.raw_memory import equal_tokens, trailing_zeros

GRAM_TOKENS = 16
WINDOW_GRAMS = 17

_Tokens = npt.NDArray[np.int32]
_Hashes = npt.NDArray[np.uint64]
_Ranks = npt.NDArray[np.uint32]
_Positions = npt.NDArray[np.int64]

RANK_BASE = 0x9E3779B1
_RANK_1, _RANK_2, _RANK_4, _RANK_8 = (np.uint32(pow(RANK_BASE, power, 1 << 32)) for power in (1, 2, 4, 8))
# Grams of one repeated token rank behind all others: they say the least about where they stand.
_CONSTANT = np.uint32(0xFFFFFFFF)
_LAST_VARIED = np.uint32(0xFFFFFFFE)
_TOP_HALF = np.uint64(32)
_BLOCK, _LANES = 2048, 32


@inner
def gram_hash(tokens: _Tokens, start: int) -> np.uint64:
    """Hash of the gram that starts at `start`, as `fingerprint` makes it."""
    first, second = np.uint32(0), np.uint32(0)
    for at in range(start, start + 8):
        first = np.uint32((first + np.uint32(tokens[at])) * _RANK_1)
        second = np.uint32((second + np.uint32(tokens[at + 8])) * _RANK_1)
    return np.uint64(first) << _TOP_HALF | np.uint64(second)


@inner
def _join(joined: _Ranks, left: _Ranks, right: _Ranks, power: np.uint32, count: int) -> None:
    for at in range(count):
        joined[at] = left[at] * power + right[at]


@inner
def _least(least: _Ranks, left: _Ranks, right: _Ranks, count: int) -> None:
    for at in range(count):
        least[at] = min(left[at], right[at])


@inner
def _greatest(greatest: _Ranks, left: _Ranks, right: _Ranks, count: int) -> None:
    for at in range(count):
        greatest[at] = max(left[at], right[at])


@inner
def _rank(tokens: _Tokens, count: int, ranks: _Ranks, spare: _Ranks) -> bool:
    """Ranks of the first `count` grams: the sum of token[start + j] * RANK_BASE**(GRAM_TOKENS - j) modulo 2**32, made
    from sums over 1, 2, 4 and 8 tokens; the largest number for one repeated token.

    Returns whether a gram of one repeated token may be among them.
    """
    size = count + GRAM_TOKENS - 1
    for at in range(size):
        spare[at] = np.uint32(tokens[at]) * _RANK_1
    _join(ranks, spare, spare[1:], _RANK_1, size - 1)
    _join(spare, ranks, ranks[2:], _RANK_2, size - 3)
    _join(ranks, spare, spare[4:], _RANK_4, size - 7)
    _join(spare, ranks, ranks[8:], _RANK_8, count)
    for at in range(count):
        ranks[at] = min(spare[at], _LAST_VARIED)
    if not _may_repeat_token(tokens, tokens[1:], tokens[8:], count):
        return False
    equal = 1
    for at in range(1, size):
        equal = equal + 1 if tokens[at] == tokens[at - 1] else 1
        if equal >= GRAM_TOKENS:
            ranks[at - GRAM_TOKENS + 1] = _CONSTANT
    return True


@inner
def _may_repeat_token(tokens: _Tokens, second: _Tokens, ninth: _Tokens, count: int) -> bool:
    found = np.int32(0)
    for at in range(count):
        found |= np.int32((tokens[at] == second[at]) & (tokens[at] == ninth[at]))
    return found != 0


@inner
def _minima(ranks: _Ranks, window: int, size: int, one: _Ranks, other: _Ranks) -> tuple[_Ranks, _Ranks]:
    """The least of every `window` (2 and more) of `size` consecutive ranks, and the array that is not needed for it."""
    size, length = size - 1, 2
    _least(one, ranks, ranks[1:], size)
    while length < window:
        step = min(length, window - length)
        size, length = size - step, length + step
        _least(other, one, one[step:], size)
        one, other = other, one
    return one, other


@inner
def _maxima(ranks: _Ranks, window: int, size: int, one: _Ranks, other: _Ranks) -> _Ranks:
    """The greatest of every `window` (2 and more) of `size` consecutive ranks."""
    size, length = size - 1, 2
    _greatest(one, ranks, ranks[1:], size)
    while length < window:
        step = min(length, window - length)
        size, length = size - step, length + step
        _greatest(other, one, one[step:], size)
        one, other = other, one
    return one


@inner
def _chosen(tokens: _Tokens, window: int) -> tuple[_Positions, bool]:
    """Positions of the grams that are the least of some window, ascending, but of none of one repeated token.

    A gram is one when it equals the greatest of the minima of the windows that hold it. And whether there may be grams
    of one repeated token.
    """
    grams, side = len(tokens) - GRAM_TOKENS + 1, window - 1
    room = _BLOCK + 2 * side + _LANES
    ranks, spare = np.zeros(room, dtype=np.uint32), np.zeros(room, dtype=np.uint32)
    one, other = np.zeros(room, dtype=np.uint32), np.zeros(room, dtype=np.uint32)
    positions, kept, repeats = np.empty(grams, dtype=np.int64), 0, False
    for first in range(0, grams, _BLOCK):
        count = min(_BLOCK, grams - first)
        low, high = max(0, first - side), min(grams, first + count + side)
        lead, size = low - (first - side), count + 2 * side
        repeats |= _rank(tokens[low:], high - low, ranks[lead:], spare)
        # Windows that reach beyond the ends have the minimum 0, which is the greatest of none.
        for at in range(lead + high - low, size):
            ranks[at] = 0
        minima, free = _minima(ranks, window, size, one, other)
        opened = _maxima(minima, window, size - side, free, spare)
        left, right = opened.ctypes.data, ranks.ctypes.data + 4 * side
        for at in range(0, count, _LANES):
            bits = equal_tokens(left + 4 * at, right + 4 * at)
            if count - at < _LANES:
                bits &= (1 << (count - at)) - 1
            while bits:
                gram = at + trailing_zeros(bits)
                bits &= bits - 1
                positions[kept] = first + gram
                kept += ranks[gram + side] != _CONSTANT
    return positions[:kept], repeats


@inner
def _stretch_ends(tokens: _Tokens) -> _Positions:
    """First and last gram of every stretch of one repeated token that fills a window of grams, ascending."""
    least = GRAM_TOKENS + WINDOW_GRAMS - 1
    ends = np.empty(2 * (len(tokens) // least + 1), dtype=np.int64)
    count, begin = 0, 0
    for at in range(1, len(tokens) + 1):
        if at == len(tokens) or tokens[at] != tokens[begin]:
            if at - begin >= least:
                ends[count], ends[count + 1] = begin, at - GRAM_TOKENS
                count += 2
            begin = at
    return ends[:count]


@inner
def _merged(left: _Positions, right: _Positions) -> _Positions:
    """Both ascending lists as one, each position once."""
    both = np.empty(len(left) + len(right), dtype=np.int64)
    count, at, of = 0, 0, 0
    while at < len(left) or of < len(right):
        if of == len(right) or (at < len(left) and left[at] < right[of]):
            position = left[at]
            at += 1
        else:
            position = right[of]
            of += 1
        if count == 0 or both[count - 1] != position:
            both[count] = position
            count += 1
    return both[:count]


@inner
def _may_repeat(hashes: _Hashes, most: int) -> bool:
    """False when surely no hash stands more than `most` times; counted by a part of the hash, so that it is quick."""
    size = 256
    while size < len(hashes):
        size *= 2
    counts = np.zeros(size, dtype=np.int32)
    for index in range(len(hashes)):
        slot = np.int64(hashes[index] >> _TOP_HALF) & (size - 1)
        counts[slot] += 1
        if counts[slot] > most:
            return True
    return False


@inner
def _thinned(hashes: _Hashes, positions: _Positions, most: int) -> tuple[_Hashes, _Positions]:
    """Keeps at most `most` anchors of one hash, the first half of them and the last, in place."""
    count, size = len(hashes), 16
    while size < 2 * count:
        size *= 2
    # The first anchor of every hash, by hash; for every anchor that first one, and how many stand before it.
    table = np.full(size, -1, dtype=np.int32)
    leaders, before = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    totals = np.zeros(count, dtype=np.int64)
    for index in range(count):
        slot = np.int64(hashes[index] >> _TOP_HALF) & (size - 1)
        while table[slot] >= 0 and hashes[table[slot]] != hashes[index]:
            slot = (slot + 1) & (size - 1)
        if table[slot] < 0:
            table[slot] = index
        leaders[index] = table[slot]
        before[index] = totals[leaders[index]]
        totals[leaders[index]] += 1
    last, kept = most // 2, 0
    for index in range(count):
        hashes[kept], positions[kept] = hashes[index], positions[index]
        kept += (before[index] < most - last) | (totals[leaders[index]] - before[index] <= last)
    return hashes[:kept], positions[:kept]


@entry
def anchors(tokens: _Tokens, window: int, max_repeats: int) -> tuple[_Hashes, _Positions]:
    """Hashes uint64 [n] and positions int64 [n] of the anchors of int32 [>= window + 15] tokens by windows of `window`
    grams, thinned to `max_repeats` a hash.
    """
    positions, repeats = _chosen(tokens, window)
    if repeats:
        positions = _merged(positions, _stretch_ends(tokens))
    hashes = np.empty(len(positions), dtype=np.uint64)
    for index in range(len(positions)):
        hashes[index] = gram_hash(tokens, positions[index])
    if _may_repeat(hashes, max_repeats):
        hashes, positions = _thinned(hashes, positions, max_repeats)
    return hashes, positions
