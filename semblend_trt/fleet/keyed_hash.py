"""SipHash-2-4 of anchor hashes, compiled: what nobody without the key can compute from a text.

Aumasson, Bernstein, "SipHash: a fast short-input PRF" (INDOCRYPT 2012), for messages of 8 bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import entry, inner

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


@entry
def sampled(hashes: _Hashes, low: np.uint64, high: np.uint64, most: int) -> tuple[int, _Entries]:
    """The lowest level at which at most `most` of the keyed hashes begin with as many zero bits, and these.

    Of each the low 32 bits, in order: uint32 [n].
    """
    values = np.empty(len(hashes), dtype=np.uint64)
    count = len(hashes)
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
    entries = np.empty(count, dtype=np.uint32)
    for at in range(count):
        entries[at] = np.uint32(values[at] & _LOW_HALF)
    return level, entries
