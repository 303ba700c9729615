"""Sketch: a sample of a donor's anchors, from which a directory estimates how much of a prompt the donor holds.

Two texts that share a run have the same anchors in it (discovery/fingerprint.py). Level L keeps the anchors whose keyed
hash begins with L zero bits, one in 2**L, so both samples agree in the run. The estimate is the share of a prompt's
anchors of that level that are in the sketch. The key depends on the tenant's raw salt; without it neither side can be
computed."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.fingerprint import as_token_array, fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from semblend_trt.discovery.fingerprint import TokenArray
    from semblend_trt.namespace import CacheNamespace

_Hashes = npt.NDArray[np.uint64]

# SipHash's first states, and its last block for a message of 8 bytes: the length in the top byte.
_START = np.frombuffer(b"somepseudorandomlygeneratedbytes", dtype=">u8").astype(np.uint64)
_LENGTH = np.uint64(8 << 56)
MAX_SKETCH_BYTES = 4096
DEFAULT_ENTRIES = 256
MAX_LEVEL = 53
KEY_BYTES = 16
# Magic, version, level, entries, anchors of the whole donor.
_HEADER = struct.Struct("<2sBBII")
_MAGIC, _VERSION = b"SK", 2
MAX_ENTRIES = (MAX_SKETCH_BYTES - _HEADER.size) // 4


def keyed(hashes: _Hashes, low: _Hashes | np.uint64, high: _Hashes | np.uint64) -> _Hashes:
    """Return SipHash-2-4 (Aumasson and Bernstein 2012) of each of `hashes` (uint64 [n]): uint64 [n].
    `low` and `high` are the halves of the key, one for all or one for each (uint64 [n])."""
    a, b, c, d, turned = (np.empty(len(hashes), dtype=np.uint64) for _ in range(5))
    for state, half, start in zip((a, b, c, d), (low, high, low, high), _START, strict=True):
        np.bitwise_xor(half, start, out=state)
    d ^= hashes
    _mix(a, b, c, d, turned, 2)
    a ^= hashes
    d ^= _LENGTH
    _mix(a, b, c, d, turned, 2)
    a ^= _LENGTH
    c ^= np.uint64(0xFF)
    _mix(a, b, c, d, turned, 4)
    return a ^ b ^ c ^ d


def _mix(a: _Hashes, b: _Hashes, c: _Hashes, d: _Hashes, turned: _Hashes, rounds: int) -> None:
    """Do `rounds` SipRounds of the states, in place; overwrite `turned`."""

    def turn(state: _Hashes, bits: int) -> None:
        np.left_shift(state, np.uint64(bits), out=turned)
        np.right_shift(state, np.uint64(64 - bits), out=state)
        np.bitwise_or(state, turned, out=state)

    for _ in range(rounds):
        for left, right, bits, is_last in ((a, b, 13, True), (c, d, 16, False), (a, d, 21, False), (c, b, 17, True)):
            left += right
            turn(right, bits)
            right ^= left
            if is_last:
                turn(left, 32)


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """A donor's anchors of `level`: the low 32 bits of their keyed hashes, little-endian uint32 [n], in the donor's
    order. `anchors` counts the donor's anchors of all levels."""

    level: int
    anchors: int
    entries: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, values: _Hashes, most: int) -> Sketch:
        """Sketch anchors of keyed hashes `values` (uint64 [n]) at the lowest level that leaves at most `most`."""
        level, kept = 0, values
        if len(values) > most:
            zeros = _leading_zeros(values)
            left = len(values) - np.bincount(zeros, minlength=MAX_LEVEL + 1).cumsum()
            level = min(int(np.argmax(left <= most)) + 1, MAX_LEVEL)
            kept = values[zeros >= level][:most]
        return cls(level, len(values), kept.astype("<u4"))

    def to_bytes(self) -> bytes:
        """Write `SK`, version and level (u8), numbers of entries and anchors (u32), entries (u32); little-endian."""
        return _HEADER.pack(_MAGIC, _VERSION, self.level, len(self.entries), self.anchors) + self.entries.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Sketch:
        """Read `to_bytes`'s form. Raise ValueError for anything else."""
        if not _HEADER.size <= len(data) <= MAX_SKETCH_BYTES:
            raise ValueError(f"a sketch has {_HEADER.size}..{MAX_SKETCH_BYTES} bytes, not {len(data)}")
        magic, version, level, count, anchors = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(f"a sketch begins with {_MAGIC!r} and version {_VERSION}, not {data[:3]!r}")
        if len(data) != _HEADER.size + 4 * count or level > MAX_LEVEL or anchors < count:
            raise ValueError(f"a sketch of {len(data)} bytes says {count} entries of {anchors} anchors, level {level}")
        return cls(level, anchors, np.frombuffer(data, dtype="<u4", offset=_HEADER.size))


@dataclass(frozen=True, slots=True, eq=False)
class PromptFingerprints:
    """A prompt's anchors under one key, in the prompt's order; `tokens` is the prompt's length.

    `entries` (uint32 [n]) are the hashes' low 32 bits, `levels` (uint8 [n]) the highest level of each. `eligible`
    (int64 [MAX_LEVEL + 1]) counts the anchors of each level."""

    entries: npt.NDArray[np.uint32]
    levels: npt.NDArray[np.uint8]
    eligible: npt.NDArray[np.int64]
    tokens: int


def sketch_key(namespace_key: str, salt: str | None) -> bytes:
    """Return the 16 bytes that key a namespace's anchors: BLAKE2b of `CacheNamespace.key` and the raw salt.
    An empty salt differs from None. A salted tenant's key cannot be computed without the salt."""
    secret = b"\0" if salt is None else b"\1" + salt.encode("utf-8", "surrogatepass")
    message = namespace_key.encode("utf-8") + b"\0" + secret
    return hashlib.blake2b(message, digest_size=KEY_BYTES, person=b"semblend-sketch1").digest()


def token_digest(tokens: npt.NDArray[np.int32] | npt.NDArray[np.int64], key: bytes = b"") -> int:
    """Return BLAKE2b, 8 bytes, of the ids as little-endian int64, read as a little-endian number.
    `key` is the sketch key of requests with a salt, so that no other tenant can test a guess; else empty."""
    wide = tokens.astype("<i8", copy=False)
    return int.from_bytes(hashlib.blake2b(wide.data, digest_size=8, key=key).digest(), "little")


def sketch_of(tokens: npt.ArrayLike, key: bytes, max_entries: int = DEFAULT_ENTRIES) -> Sketch:
    """Sketch `tokens` (integers [n]) under `key`, at the lowest level that leaves at most `max_entries` entries.
    Texts below GUARANTEED_RUN tokens have no entries. Raise ValueError for bad tokens, key or `max_entries`."""
    if not 1 <= max_entries <= MAX_ENTRIES:
        raise ValueError(f"a sketch of {max_entries} entries; 1..{MAX_ENTRIES} fit")
    text = as_token_array(tokens)
    return _sketches_of(text, np.array([len(text)]), [key], max_entries)[0]


def _sketches_of(tokens: TokenArray, ends: npt.NDArray[np.int64], keys: Sequence[bytes], most: int) -> list[Sketch]:
    """Sketch the texts in `tokens`, of which text i ends at `ends[i]` (int64 [texts], ascending), under `keys[i]`."""
    anchors = fingerprint(tokens, ends=ends[:-1])
    stops = np.searchsorted(anchors.positions, ends)
    halves = np.repeat(np.array([_halves(key) for key in keys], dtype=np.uint64), np.diff(stops, prepend=0), axis=0)
    values = keyed(anchors.hashes, halves[:, 0], halves[:, 1])
    return [Sketch.of(each, most) for each in np.split(values, stops[:-1])]


@dataclass(slots=True, eq=False)
class Held:
    """A donor as the serving path left it.

    `tokens` are int32 [n], and None once the donor is sketched. The donor is published only after a request names its
    `namespace`. `salted_key` is the sketch key of a request with a salt, else empty. `embedding` is float32 [dim]. An
    `is_unfit` donor cannot be announced."""

    namespace: CacheNamespace | None
    salted_key: bytes
    tier: str
    count: int
    tokens: npt.NDArray[np.int32] | None
    embedding: npt.NDArray[np.float32] | None = None
    digest: int = 0
    sketch: bytes = b""
    is_unfit: bool = False


def sketch_held(donors: list[Held]) -> None:
    """Write sketch and digest of donors with tokens and a namespace, and drop the tokens. Raise ValueError for tokens
    that are no ids."""
    texts = [as_token_array(held.tokens) for held in donors if held.tokens is not None]
    keys = [held.salted_key or sketch_key(held.namespace.key, None) for held in donors if held.namespace is not None]
    together, ends, start = np.concatenate(texts), np.cumsum([len(text) for text in texts]), 0
    sketches, wide = _sketches_of(together, ends, keys, DEFAULT_ENTRIES), together.astype("<i8")
    for held, sketch, end in zip(donors, sketches, ends.tolist(), strict=True):
        held.digest, held.sketch = token_digest(wide[start:end], held.salted_key), sketch.to_bytes()
        held.tokens, start = None, end


def fingerprints_of(tokens: npt.ArrayLike, keys: Sequence[bytes]) -> list[PromptFingerprints]:
    """Return a prompt's fingerprints (integers [n]) under each of `keys`. Raise ValueError for bad tokens."""
    prompt = as_token_array(tokens)
    hashes = fingerprint(prompt).hashes
    found = []
    for key in keys:
        values = keyed(hashes, *map(np.uint64, _halves(key)))
        levels = _leading_zeros(values)
        counts = np.bincount(levels, minlength=MAX_LEVEL + 1)
        found.append(PromptFingerprints(values.astype(np.uint32), levels, counts[::-1].cumsum()[::-1], len(prompt)))
    return found


def _halves(key: bytes) -> tuple[int, int]:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a sketch key has {KEY_BYTES} bytes, not {len(key)}; make one with sketch_key()")
    return int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")


def _leading_zeros(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """Count the zero bits at the start of each value, MAX_LEVEL at most."""
    _, bits = np.frexp((values >> np.uint64(11)).astype(np.float64))  # a float holds 53 bits
    levels: npt.NDArray[np.uint8] = (MAX_LEVEL - bits).astype(np.uint8)
    return levels
