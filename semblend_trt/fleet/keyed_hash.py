"""SipHash-2-4 of anchor hashes, compiled: what nobody without the key can compute from a text.

Aumasson, Bernstein, "SipHash: a fast short-input PRF" (INDOCRYPT 2012), for messages of 8 bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import entry, inner
from semblend_trt.discovery.fingerprint import GUARANTEED_RUN, MAX_REPEATS
from semblend_trt.discovery.winnowing import WINDOW_GRAMS, anchors

_Tokens = npt.NDArray[np.int32]
_Counts = npt.NDArray[np.int64]
_Hashes = npt.NDArray[np.uint64]
_Entries = npt.NDArray[np.uint32]

_START = (
    np.uint64(0x736F6D6570736575),
    np.uint64(0x646F72616E646F6D),
    np.uint64(0x6C7967656E657261),
    np.uint64(0x7465646279746573),
)
# The last block of an 8 byte message: its length in the top byte.
_LENGTH = np.uint64(8 << 56)
_FINISH = np.uint64(0xFF)
_ALL = 64
_LOW_HALF = np.uint64(0xFFFFFFFF)


@inner
def _turned(value: np.uint64, bits: int) -> np.uint64:
    return (value << np.uint64(bits)) | (value >> np.uint64(_ALL - bits))


@inner
def _mixed(
    a: np.uint64, b: np.uint64, c: np.uint64, d: np.uint64, rounds: int
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """`rounds` SipRounds of the state."""
    for _ in range(rounds):
        a = a + b
        b = _turned(b, 13) ^ a
        a = _turned(a, 32)
        c = c + d
        d = _turned(d, 16) ^ c
        a = a + d
        d = _turned(d, 21) ^ a
        c = c + b
        b = _turned(b, 17) ^ c
        c = _turned(c, 32)
    return a, b, c, d


@inner
def _siphash(message: np.uint64, low: np.uint64, high: np.uint64) -> np.uint64:
    a, b, c, d = low ^ _START[0], high ^ _START[1], low ^ _START[2], high ^ _START[3] ^ message
    a, b, c, d = _mixed(a, b, c, d, 2)
    a, d = a ^ message, d ^ _LENGTH
    a, b, c, d = _mixed(a, b, c, d, 2)
    a, c = a ^ _LENGTH, c ^ _FINISH
    a, b, c, d = _mixed(a, b, c, d, 4)
    return a ^ b ^ c ^ d


@entry
def keyed(hashes: _Hashes, low: np.uint64, high: np.uint64) -> _Hashes:
    """SipHash-2-4 of each of `hashes` (uint64 [n]) under the key of the halves `low` and `high`: uint64 [n]."""
    found = np.empty(len(hashes), dtype=np.uint64)
    for at in range(len(hashes)):
        found[at] = _siphash(hashes[at], low, high)
    return found


@inner
def _sample(hashes: _Hashes, low: np.uint64, high: np.uint64, most: int, entries: _Entries) -> tuple[int, int]:
    """Writes to `entries` what one text's sketch holds; returns its level and how many they are."""
    count = len(hashes)
    values = np.empty(count, dtype=np.uint64)
    for at in range(count):
        values[at] = _siphash(hashes[at], low, high)
    level = 0
    while count > most and level < _ALL - 1:
        level += 1
        kept = 0
        for at in range(count):
            values[kept] = values[at]
            kept += (values[at] >> np.uint64(_ALL - level)) == 0
        count = kept
    count = min(count, most)
    for at in range(count):
        entries[at] = np.uint32(values[at] & _LOW_HALF)
    return level, count


@entry
def sampled(tokens: _Tokens, ends: _Counts, keys: _Hashes, most: int) -> tuple[_Counts, _Counts, _Counts, _Entries]:
    """Samples of texts that stand one behind the other in `tokens`, int32 [n].

    Text i ends at `ends[i]` (int64 [texts]) and has the key whose halves are `keys[i]` (uint64 [texts, 2]). Of each:
    its level, the lowest at which at most `most` of its anchors' keyed hashes begin with as many zero bits; how many
    anchors it has; where its entries stop in the last array, uint32, which holds the low 32 bits of those hashes in
    order.
    """
    count = len(ends)
    levels, found = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    stops, entries = np.empty(count, dtype=np.int64), np.empty(count * most, dtype=np.uint32)
    start, stop = 0, 0
    for at in range(count):
        if ends[at] - start >= GUARANTEED_RUN:
            hashes, _positions = anchors(tokens[start : ends[at]], WINDOW_GRAMS, MAX_REPEATS)
            found[at] = len(hashes)
            levels[at], taken = _sample(hashes, keys[at, 0], keys[at, 1], most, entries[stop:])
            stop += taken
        start, stops[at] = ends[at], stop
    return levels, found, stops, entries[:stop]
