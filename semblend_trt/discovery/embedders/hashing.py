"""The loops behind the embedders that read no model, compiled: words to hashes, hashes to vectors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import entry, inner

_Characters = npt.NDArray[np.uint32]
_Hashes = npt.NDArray[np.uint64]
_Counts = npt.NDArray[np.int64]
_Vector = npt.NDArray[np.float32]

# A hash's lowest bits hold the word's length, at most this.
LENGTH_MASK = 15
FULL_LENGTH = 8

_ENTRIES = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# FNV-1a, 64 bits (draft-eastlake-fnv).
_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_FIRST_UNSPACED = np.uint32(0x2E80)
_ALL_BITS = np.uint64(0xFFFFFFFFFFFFFFFF)


@inner
def _mixed(value: np.uint64) -> np.uint64:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@inner
def _is_letter(character: np.uint32) -> bool:
    if character < 128:
        return bool((48 <= character <= 57) or (97 <= character <= 122))
    # Below U+2000 nearly all are letters; the punctuation of U+2000 to U+2E7F stands apart.
    return bool(0xC0 <= character < 0x2000)


@inner
def _named(value: np.uint64, length: int) -> np.uint64:
    return (_mixed(value) & ~np.uint64(LENGTH_MASK)) | np.uint64(min(length, LENGTH_MASK))


@entry
def word_hashes(characters: _Characters) -> _Hashes:
    """The hash of every word, uint64 [words], in the order of the text; `characters` are code points in lower case."""
    hashes = np.empty(len(characters), dtype=np.uint64)
    found, length, value = 0, 0, _FNV_OFFSET
    for at in range(len(characters)):
        character = characters[at]
        if _is_letter(character):
            value = (value ^ np.uint64(character)) * _FNV_PRIME
            length += 1
            continue
        if length:
            hashes[found] = _named(value, length)
            found, length, value = found + 1, 0, _FNV_OFFSET
        if character >= _FIRST_UNSPACED and at + 1 < len(characters) and characters[at + 1] >= _FIRST_UNSPACED:
            pair = (_FNV_OFFSET ^ np.uint64(character)) * _FNV_PRIME
            # Two such characters say about as much as a word of four letters.
            hashes[found] = _named((pair ^ np.uint64(characters[at + 1])) * _FNV_PRIME, 4)
            found += 1
    if length:
        hashes[found] = _named(value, length)
        found += 1
    return hashes[:found]


@entry
def project(hashes: _Hashes, counts: _Counts, vector: _Vector) -> None:
    """Writes the projected word weights into `vector`, zeros before, with unit length."""
    dim = np.uint64(len(vector))
    sums = np.zeros(len(vector), dtype=np.float64)
    for word in range(len(hashes)):
        length = min(int(hashes[word] & np.uint64(LENGTH_MASK)), FULL_LENGTH)
        weight = (1.0 + np.log(float(counts[word]))) * length / FULL_LENGTH
        bits = hashes[word]
        for _ in range(_ENTRIES):
            bits = _mixed(bits + _GOLDEN)
            sums[(bits >> np.uint64(1)) % dim] += weight if bits & np.uint64(1) else -weight
    norm = 0.0
    for value in sums:
        norm += value * value
    if norm > 0.0:
        for at in range(len(vector)):
            vector[at] = sums[at] / np.sqrt(norm)


@entry
def sketch(hashes: _Hashes, vector: _Vector) -> None:
    """Writes one sign for each of `len(vector)` hash functions, that of its least value over `hashes`."""
    if not len(hashes):
        return
    size = 1.0 / np.sqrt(float(len(vector)))
    for function in range(len(vector)):
        seed = _mixed(np.uint64(function + 1) * _GOLDEN)
        least = _ALL_BITS
        for word in hashes:
            least = min(least, _mixed(word ^ seed))
        # The lowest bit has no part in making a value the least.
        vector[function] = size if least & np.uint64(1) else -size
