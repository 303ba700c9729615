"""Sketch: a sample of a donor's anchors, by which a router that holds a prompt's tokens estimates what is reusable.

Anchors (discovery/fingerprint.py) that two texts share are the same on both sides, so a sample that depends on the
anchor alone is the same as well: at level L every 2**L-th anchor is kept, those whose keyed hash begins with L zero
bits. The share of a prompt's anchors of that level that the sketch holds estimates the share of its tokens that the
donor holds. Without the key, which takes the tenant's raw salt, neither side of the comparison can be computed.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from semblend_trt.compiled import entry, inner
from semblend_trt.discovery.fingerprint import GUARANTEED_RUN, as_token_array, fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from semblend_trt.discovery.fingerprint import TokenArray


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
MAX_SKETCH_BYTES = 4096
DEFAULT_ENTRIES = 256
MAX_LEVEL = 63
KEY_BYTES = 16
# Magic, version, level, entries, anchors of the whole donor.
_HEADER = struct.Struct("<2sBBII")
_HALVES = struct.Struct("<QQ")
_MAGIC, _VERSION = b"SK", 2
MAX_ENTRIES = (MAX_SKETCH_BYTES - _HEADER.size) // 4
_PERSON = b"semblend-sketch1"


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
def _sampled(hashes: _Hashes, stops: _Counts, keys: _Hashes, most: int) -> tuple[_Counts, _Counts, _Entries]:
    """Samples of texts whose anchors' hashes stand one behind the other.

    Those of text i end at `stops[i]` (int64 [texts]); it has the key whose halves are `keys[i]` (uint64 [texts, 2]). Of
    each: its level, the lowest at which at most `most` of its anchors' keyed hashes begin with as many zero bits; where
    its entries stop in the last array, uint32, which holds the low 32 bits of those hashes in order.
    """
    levels, ends = np.zeros(len(stops), dtype=np.int64), np.empty(len(stops), dtype=np.int64)
    entries = np.empty(len(stops) * most, dtype=np.uint32)
    start, end = 0, 0
    for at in range(len(stops)):
        levels[at], taken = _sample(hashes[start : stops[at]], keys[at, 0], keys[at, 1], most, entries[end:])
        end += taken
        start, ends[at] = stops[at], end
    return levels, ends, entries[:end]


_warm = threading.Event()


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """A donor's anchors of `level`: the low 32 bits of their keyed hashes, uint32 [n], in the donor's order.

    `anchors` counts those that it was sampled from.
    """

    level: int
    anchors: int
    entries: npt.NDArray[np.uint32]

    def to_bytes(self) -> bytes:
        """`SK`, version and level (a byte each), numbers of entries and anchors (u32), entries (u32); little-endian."""
        header = _HEADER.pack(_MAGIC, _VERSION, self.level, len(self.entries), self.anchors)
        return header + self.entries.astype("<u4", copy=False).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Sketch:
        """Reads `to_bytes`'s form. Raises ValueError for anything else."""
        if not _HEADER.size <= len(data) <= MAX_SKETCH_BYTES:
            raise ValueError(f"a sketch has {_HEADER.size}..{MAX_SKETCH_BYTES} bytes, not {len(data)}")
        magic, version, level, count, anchors = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(f"a sketch begins with {_MAGIC!r} and version {_VERSION}, not {data[:3]!r}")
        if len(data) != _HEADER.size + 4 * count or level > MAX_LEVEL or anchors < count:
            raise ValueError(f"a sketch of {len(data)} bytes says {count} entries of {anchors} anchors, level {level}")
        entries = np.frombuffer(data, dtype="<u4", offset=_HEADER.size)
        return cls(level, anchors, entries)


@dataclass(frozen=True, slots=True, eq=False)
class PromptFingerprints:
    """A prompt's anchors under one key, in the prompt's order.

    `entries` uint32 [n] are what a sketch would hold, `levels` uint8 [n] the highest level at which it would, and
    `eligible` int64 [MAX_LEVEL + 1] how many there are of each level. `tokens` is the prompt's length.
    """

    entries: npt.NDArray[np.uint32]
    levels: npt.NDArray[np.uint8]
    eligible: npt.NDArray[np.int64]
    tokens: int

    def __len__(self) -> int:
        return len(self.entries)


def sketch_key(namespace_key: str, salt: str | None) -> bytes:
    """The 16 bytes under which a namespace's anchors are hashed: BLAKE2b of `CacheNamespace.key` and the raw salt.

    A salt, even an empty one, differs from none. Only who knows the salt can compute a salted tenant's key.
    """
    secret = b"\0" if salt is None else b"\1" + salt.encode("utf-8", "surrogatepass")
    message = namespace_key.encode("utf-8") + b"\0" + secret
    return hashlib.blake2b(message, digest_size=KEY_BYTES, person=_PERSON).digest()


def sketch_of(tokens: npt.ArrayLike, key: bytes, max_entries: int = DEFAULT_ENTRIES) -> Sketch:
    """Sketches `tokens` (integers [n]) under `key`: the lowest level that leaves at most `max_entries` entries.

    Texts below GUARANTEED_RUN tokens have none. Raises ValueError for bad tokens, a key that is not KEY_BYTES long, or
    `max_entries` outside 1..MAX_ENTRIES.
    """
    if not 1 <= max_entries <= MAX_ENTRIES:
        raise ValueError(f"a sketch of {max_entries} entries; 1..{MAX_ENTRIES} fit")
    text = as_token_array(tokens)
    return Sketch.from_bytes(sketches_of(text, np.array([len(text)]), [key], max_entries)[0])


def sketches_of(
    tokens: TokenArray, ends: npt.NDArray[np.int64], keys: Sequence[bytes], max_entries: int = DEFAULT_ENTRIES
) -> list[bytes]:
    """`sketch_of`, as bytes, for texts that stand one behind the other in `tokens` (from `as_token_array`).

    Text i ends at `ends[i]` (int64 [texts], ascending) and has the key `keys[i]`. Raises ValueError for a key that is
    not KEY_BYTES long.
    """
    halves = np.array([_halves(key) for key in keys], dtype=np.uint64)
    anchors = fingerprint(tokens, ends=ends[:-1])
    stops = np.searchsorted(anchors.positions, ends)
    levels, entry_stops, entries = _sampled(anchors.hashes, stops, halves, max_entries)
    counts = np.diff(stops, prepend=0)
    written = entries.astype("<u4", copy=False).tobytes()
    sketches, start = [], 0
    for level, count, stop in zip(levels.tolist(), counts.tolist(), entry_stops.tolist(), strict=True):
        header = _HEADER.pack(_MAGIC, _VERSION, level, stop - start, count)
        sketches.append(header + written[4 * start : 4 * stop])
        start = stop
    return sketches


def prompt_fingerprints(tokens: npt.ArrayLike, key: bytes) -> PromptFingerprints:
    """Anchors of a prompt (integers [n]) for `overlap`; one call serves all sketches of one key. Raises ValueError."""
    return fingerprints_of(tokens, [key])[0]


def fingerprints_of(tokens: npt.ArrayLike, keys: Sequence[bytes]) -> list[PromptFingerprints]:
    """`prompt_fingerprints` under each of `keys`; the prompt is read once for all of them. Raises ValueError."""
    prompt = as_token_array(tokens)
    hashes = fingerprint(prompt).hashes
    found = []
    for key in keys:
        low, high = _halves(key)
        values = keyed(hashes, np.uint64(low), np.uint64(high))
        levels = _leading_zeros(values)
        counts = np.bincount(levels, minlength=MAX_LEVEL + 1)
        found.append(PromptFingerprints(values.astype(np.uint32), levels, counts[::-1].cumsum()[::-1], len(prompt)))
    return found


def overlap(sketch: Sketch, prompt: PromptFingerprints) -> float:
    """Estimated share, 0..1, of the prompt's tokens that stand in the donor too; 0 where the sample says nothing.

    Its standard deviation is about sqrt(share * (1 - share) / eligible[level]). Text shared in runs below
    GUARANTEED_RUN tokens is not seen.
    """
    eligible = int(prompt.eligible[sketch.level])
    if not eligible or not len(sketch.entries):
        return 0.0
    asked = prompt.entries[prompt.levels >= sketch.level]
    return int(np.isin(asked, sketch.entries).sum()) / eligible


def warm_up() -> None:
    """Compiles what sketches run, or loads it from disk."""
    if not _warm.is_set():
        _warm.set()
        sketch_of(np.arange(2 * GUARANTEED_RUN), bytes(KEY_BYTES))
        prompt_fingerprints(np.arange(2 * GUARANTEED_RUN), bytes(KEY_BYTES))


def _halves(key: bytes) -> tuple[int, int]:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a sketch key has {KEY_BYTES} bytes, not {len(key)}; make one with sketch_key()")
    low, high = _HALVES.unpack(key)
    return low, high


def _leading_zeros(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """Zero bits in front of each value, at most MAX_LEVEL: uint8 [n]."""
    levels = np.zeros(len(values), dtype=np.uint8)
    rest = values.copy()
    for step in (32, 16, 8, 4, 2, 1):
        empty = rest >> np.uint64(64 - step) == 0
        levels[empty] += np.uint8(step)
        rest[empty] <<= np.uint64(step)
    return levels
