"""The loops behind `fingerprint`, compiled: gram hashes, window minima, repeated tokens, repeated hashes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import SOURCES_STAMP, entry, inner

GRAM_TOKENS = 16
WINDOW_GRAMS = 17

_Tokens = npt.NDArray[np.int32]
_Hashes = npt.NDArray[np.uint64]
_Ranks = npt.NDArray[np.uint32]
_Positions = npt.NDArray[np.int64]

BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses no bit
_OUT = np.uint64(pow(0x9E3779B97F4A7C15, GRAM_TOKENS + 1, 1 << 64))
_STREAMS = 4
# Grams of one repeated token rank behind all others: they say the least about where they stand.
_CONSTANT = np.uint32(0xFFFFFFFF)
_LAST_VARIED = np.uint32(0xFFFFFFFE)
_TOP_HALF = np.uint64(32)


@inner
def gram_hash(tokens: _Tokens, start: int) -> np.uint64:
    """Hash of the gram that starts at `start`: the sum of token[start + j] * BASE**(GRAM_TOKENS - j) modulo 2**64."""
    value = np.uint64(0)
    for at in range(start, start + GRAM_TOKENS):
        value = (value + np.uint64(tokens[at])) * BASE
    return value


@inner
def all_hashes(tokens: _Tokens) -> _Hashes:
    """Hashes of all grams, uint64 [n - GRAM_TOKENS + 1], each made from the one before it.

    Several stretches advance in turn, since a hash must wait for the one before it but not for another stretch's.
    """
    count = len(tokens) - GRAM_TOKENS + 1
    hashes = np.empty(count, dtype=np.uint64)
    size = count // _STREAMS
    if size:
        first, second, third, fourth = 0, size, 2 * size, 3 * size
        a, b = gram_hash(tokens, first), gram_hash(tokens, second)
        c, d = gram_hash(tokens, third), gram_hash(tokens, fourth)
        for step in range(size):
            hashes[first + step], hashes[second + step] = a, b
            hashes[third + step], hashes[fourth + step] = c, d
            if step + 1 < size:
                a = _rolled(a, tokens, first + step)
                b = _rolled(b, tokens, second + step)
                c = _rolled(c, tokens, third + step)
                d = _rolled(d, tokens, fourth + step)
    for at in range(size * _STREAMS, count):
        hashes[at] = gram_hash(tokens, at)
    return hashes


@inner
def _rolled(value: np.uint64, tokens: _Tokens, start: int) -> np.uint64:
    """The hash of the gram behind the one at `start`, whose hash is `value`."""
    enters = np.uint64(tokens[start + GRAM_TOKENS]) * BASE
    return value * BASE + (enters - np.uint64(tokens[start]) * _OUT)


@inner
def ranks_of(tokens: _Tokens, hashes: _Hashes) -> tuple[_Ranks, bool]:
    """What the smallest of is kept, uint32 [grams]: a hash's upper half, the largest number for one repeated token.

    And whether there may be grams of one repeated token.
    """
    count = len(hashes)
    ranks = np.empty(count, dtype=np.uint32)
    repeats = False
    for at in range(count):
        ranks[at] = min(np.uint32(hashes[at] >> _TOP_HALF), _LAST_VARIED)
        repeats |= (tokens[at] == tokens[at + 1]) & (tokens[at] == tokens[at + 8]) & (tokens[at] == tokens[at + 15])
    if repeats:
        equal = 1
        for at in range(1, len(tokens)):
            equal = equal + 1 if tokens[at] == tokens[at - 1] else 1
            if equal >= GRAM_TOKENS:
                ranks[at - GRAM_TOKENS + 1] = _CONSTANT
    return ranks, repeats


@inner
def window_minima(ranks: _Ranks) -> _Ranks:
    """Minimum of every WINDOW_GRAMS consecutive ranks: [n - WINDOW_GRAMS + 1]."""
    size = len(ranks)
    minima = np.empty(size, dtype=np.uint32)
    for at in range(size):
        minima[at] = ranks[at]
    length = 1
    while 2 * length <= WINDOW_GRAMS:
        size -= length
        for at in range(size):
            minima[at] = min(minima[at], minima[at + length])
        length *= 2
    rest = WINDOW_GRAMS - length
    size -= rest
    for at in range(size):
        minima[at] = min(minima[at], minima[at + rest])
    return minima[:size]


@inner
def chosen_positions(ranks: _Ranks) -> _Positions:
    """Positions of the rightmost minimum of every window, ascending, each once; none for windows of one token."""
    minima = window_minima(ranks)
    windows = np.empty(len(minima) + 1, dtype=np.int32)
    windows[0] = 0
    count = 1
    for at in range(1, len(minima)):
        # The minimum moves when another value is smallest, or when an equal one enters on the right.
        windows[count] = at
        count += (minima[at] != minima[at - 1]) | (minima[at] == ranks[at + WINDOW_GRAMS - 1])
    chosen = np.empty(count, dtype=np.int64)
    kept = 0
    for index in range(count):
        window = np.int64(windows[index])
        smallest, place = minima[window], np.uint32(0)
        for offset in range(np.uint32(WINDOW_GRAMS)):
            place = max(place, np.uint32(offset) if ranks[window + offset] == smallest else np.uint32(0))
        chosen[kept] = window + np.int64(place)
        kept += smallest != _CONSTANT
    return chosen[:kept]


@inner
def constant_ends(ranks: _Ranks) -> _Positions:
    """First and last gram of every stretch of at least WINDOW_GRAMS grams of one repeated token, ascending."""
    ends = np.empty(2 * (len(ranks) // WINDOW_GRAMS + 1), dtype=np.int64)
    count, begin = 0, -1
    for at in range(len(ranks) + 1):
        constant = at < len(ranks) and ranks[at] == _CONSTANT
        if constant and begin < 0:
            begin = at
        elif not constant and begin >= 0:
            if at - begin >= WINDOW_GRAMS:
                ends[count], ends[count + 1] = begin, at - 1
                count += 2
            begin = -1
    return ends[:count]


@inner
def merged(left: _Positions, right: _Positions) -> _Positions:
    """Both ascending lists as one, each position once."""
    both = np.empty(len(left) + len(right), dtype=np.int64)
    count, at, of = 0, 0, 0
    while at < len(left) or of < len(right):
        if of == len(right) or (at < len(left) and left[at] < right[of]):
            both[count] = left[at]
            at += 1
        else:
            both[count] = right[of]
            at += at < len(left) and left[at] == right[of]
            of += 1
        count += 1
    return both[:count]


@inner
def counts_by_hash(hashes: _Hashes, max_repeats: int) -> tuple[_Positions, _Positions, int]:
    """For each anchor, how many of its hash stand before it and how many there are; and the largest such number."""
    count = len(hashes)
    size = 16
    while size < 2 * count:
        size *= 2
    table = np.full(size, -1, dtype=np.int32)
    leaders = np.empty(count, dtype=np.int64)
    before = np.zeros(count, dtype=np.int64)
    totals = np.zeros(count, dtype=np.int64)
    largest = 0
    for index in range(count):
        slot = np.int64(hashes[index] >> _TOP_HALF) & (size - 1)
        while table[slot] >= 0 and hashes[table[slot]] != hashes[index]:
            slot = (slot + 1) & (size - 1)
        if table[slot] < 0:
            table[slot] = index
        leader = np.int64(table[slot])
        leaders[index], before[index] = leader, totals[leader]
        totals[leader] += 1
        largest = max(largest, totals[leader])
    if largest > max_repeats:
        for index in range(count):
            totals[index] = totals[leaders[index]]
    return before, totals, largest


@inner
def thinned(hashes: _Hashes, positions: _Positions, max_repeats: int) -> tuple[_Hashes, _Positions]:
    """Keeps at most `max_repeats` anchors of one hash, the first half of them and the last, in place."""
    before, totals, largest = counts_by_hash(hashes, max_repeats)
    if largest <= max_repeats:
        return hashes, positions
    last = max_repeats // 2
    kept = 0
    for index in range(len(positions)):
        hashes[kept], positions[kept] = hashes[index], positions[index]
        kept += (before[index] < max_repeats - last) | (totals[index] - before[index] <= last)
    return hashes[:kept], positions[:kept]


def _make_anchors(stamp: int):  # type: ignore[no-untyped-def]
    @entry
    def anchors(tokens: _Tokens, max_repeats: int) -> tuple[_Hashes, _Positions]:
        _ = stamp
        hashes = all_hashes(tokens)
        ranks, repeats = ranks_of(tokens, hashes)
        positions = chosen_positions(ranks)
        if repeats:
            positions = merged(positions, constant_ends(ranks))
        chosen = np.empty(len(positions), dtype=np.uint64)
        for index in range(len(positions)):
            chosen[index] = hashes[positions[index]]
        return thinned(chosen, positions, max_repeats)

    return anchors


# Hashes uint64 [n] and positions int64 [n] of the anchors of int32 [>= 32] tokens, thinned to `max_repeats` a hash.
anchors = _make_anchors(SOURCES_STAMP)
