"""The embedders without a model: they compare words by their hashes. Numba compiles their loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from semblend_trt.compiled import entry, inner

if TYPE_CHECKING:
    from collections.abc import Sequence

_Characters = npt.NDArray[np.uint32]
_Hashes = npt.NDArray[np.uint64]
_Counts = npt.NDArray[np.int64]
_Vector = npt.NDArray[np.float32]

# A hash's lowest bits hold the word's length, at most this.
_LENGTH_MASK = 15
_FULL_LENGTH = 8

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
    return (_mixed(value) & ~np.uint64(_LENGTH_MASK)) | np.uint64(min(length, _LENGTH_MASK))


@entry
def _word_hashes(characters: _Characters) -> _Hashes:
    """The hash of every word in order, uint64 [words]; `characters` are code points in lower case."""
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
def _project(hashes: _Hashes, counts: _Counts, vector: _Vector) -> None:
    """Writes the projected word weights into `vector` (zeros before), with unit length."""
    dim = np.uint64(len(vector))
    sums = np.zeros(len(vector), dtype=np.float64)
    for word in range(len(hashes)):
        length = min(int(hashes[word] & np.uint64(_LENGTH_MASK)), _FULL_LENGTH)
        weight = (1.0 + np.log(float(counts[word]))) * length / _FULL_LENGTH
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
def _sketch(hashes: _Hashes, vector: _Vector) -> None:
    """Writes one sign per hash function, `len(vector)` of them: that of the function's least value over `hashes`."""
    if not len(hashes):
        return
    size = 1.0 / np.sqrt(float(len(vector)))
    for function in range(len(vector)):
        seed = _mixed(np.uint64(function + 1) * _GOLDEN)
        least = _ALL_BITS
        for word in hashes:
            least = min(least, _mixed(word ^ seed))
        # The lowest bit does not decide which value is the least.
        vector[function] = size if least & np.uint64(1) else -size


def _words_of(text: str) -> tuple[_Hashes, _Counts]:
    """The different words of `text`: their hashes, ascending, and how often each occurs, int64 [words].

    A word is a run of letters and digits, in lower case. Scripts that put no space between words (U+2E80 and above)
    give every pair of neighbouring characters instead.
    """
    characters = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    hashes, counts = np.unique(_word_hashes(characters), return_counts=True)
    return hashes, counts


class StaticEmbedder:
    """Compares words, neither their order nor their meaning. Deterministic and thread safe.

    A word adds (1 + ln count) * min(length, 8) / 8, with a sign, to 8 of the 384 entries; its hash chooses signs and
    entries. This is a sparse random projection (Achlioptas 2003; Li, Hastie and Church 2006): inner products differ
    from those of the word weights by about 1 / sqrt(384). Length stands in for rarity, since short words are frequent
    in most languages.
    """

    dim = 384

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors float32 [len(texts), 384] of unit length; a text without a word gets zeros."""
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for text, vector in zip(texts, vectors, strict=True):
            _project(*_words_of(text), vector)
        return vectors


class JaccardEmbedder:
    """One-bit minwise hashing (Broder 1997; Li and König 2010) with 1,024 hash functions. Deterministic, thread safe.

    Entry i is +-1/32; its sign is a bit of the i-th hash function's least value over the words. Two sets share that
    value with a probability of their Jaccard index J, and signs of different values are independent. So the inner
    product has the mean J and a standard deviation of at most 1/32.
    """

    dim = 1024

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors float32 [len(texts), 1024] of unit length; a text without a word gets zeros."""
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for text, vector in zip(texts, vectors, strict=True):
            _sketch(_words_of(text)[0], vector)
        return vectors
