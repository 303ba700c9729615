"""Donors and prompts of text for the benchmarks of the span index.

A text has fewer tokens than 100,000 donors need, so donors are cut from it at random offsets: a passage then stands in
many donors. Documents, and the prompts' own text, come from parts that no other donor is cut from. The text is a file,
or is made from the shipped excerpt, which is too short itself: word parts follow each other as they do there.
"""

from __future__ import annotations

import gzip
import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from semblend_trt.discovery.fingerprint import TokenArray

ASSETS = Path(__file__).resolve().parents[2] / "validation" / "assets"
EXCERPT = ASSETS / "excerpt.txt"
TOKENIZER = ASSETS / "model" / "tokenizer.json"

DONOR_TOKENS, SLICE_TOKENS = 2_000, 500
DOCUMENT_TOKENS, DOCUMENT_DONOR_TOKENS = 6_000, 8_000
_CHARACTERS_A_CALL = 1 << 16
RUN_TOKENS = 64
_BASE = 0xD6E8FEB86659FD93
_INVERSE = pow(_BASE, -1, 1 << 64)
_FILTER_BITS = 27
_SPREAD, _TOP = np.uint64(0x9E3779B97F4A7C15), np.uint64(64 - _FILTER_BITS)
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Corpus:
    """`common` int32 tokens that donors are cut from, `documents` int32 [n, DOCUMENT_TOKENS], `own` int32 tokens of the
    prompts around them; `source` says in words what text they are."""

    source: str
    common: TokenArray
    documents: TokenArray
    own: TokenArray

    def donors(self, count: int, seed: int) -> Iterator[tuple[str, TokenArray]]:
        """`count` donors. The first hold a document each among other text; the others are four slices of text each."""
        rng = np.random.default_rng(seed)
        for number in range(count):
            if number < len(self.documents):
                around = DOCUMENT_DONOR_TOKENS - DOCUMENT_TOKENS
                before = int(rng.integers(0, around + 1))
                parts = [self._slice(rng, before), self.documents[number], self._slice(rng, around - before)]
            else:
                parts = [self._slice(rng, SLICE_TOKENS) for _ in range(DONOR_TOKENS // SLICE_TOKENS)]
            yield f"donor-{number}", np.concatenate(parts)

    def prompts(self, count: int, length: int, seed: int) -> list[TokenArray]:
        """`count` prompts of `length` tokens of own text; every other one holds a document at a random place."""
        rng = np.random.default_rng(seed)
        prompts = []
        for number in range(count):
            begin = int(rng.integers(0, len(self.own) - length + 1))
            prompt = self.own[begin : begin + length].copy()
            if number % 2 == 0:
                shift = int(rng.integers(0, length - DOCUMENT_TOKENS + 1))
                prompt[shift : shift + DOCUMENT_TOKENS] = self.documents[rng.integers(0, len(self.documents))]
            prompts.append(prompt)
        return prompts

    def crowded_prompts(self, count: int, length: int, seed: int) -> list[TokenArray]:
        """`count` prompts of text that stands in many donors."""
        rng = np.random.default_rng(seed)
        return [self._slice(rng, length) for _ in range(count)]

    def _slice(self, rng: np.random.Generator, length: int) -> TokenArray:
        begin = int(rng.integers(0, len(self.common) - length + 1))
        cut: TokenArray = self.common[begin : begin + length].copy()
        return cut


def many_runs(prompt: TokenArray, seed: int) -> Iterator[tuple[list[TokenArray], int]]:
    """Donors of a prompt that hold it in many runs, and how many of its tokens: three quarters of each of 256, 655 and
    1,300 pieces in another order; all but one token of 500, and of 200; or 655 pieces in two donors each, which hold a
    little of the one before as well."""
    rng = np.random.default_rng(seed)
    for count in (256, 655, 1_300):
        size = len(prompt) // count
        pieces = [prompt[at * size : at * size + size * 3 // 4] for at in rng.permutation(count)]
        yield [np.concatenate(pieces[each::8]) for each in range(8)], sum(map(len, pieces))
    for every in (500, 200):
        donor = prompt.copy()
        donor[every - 1 :: every] ^= 1
        yield [donor], int((donor == prompt).sum())
    size = len(prompt) // 655
    parts = [prompt[max(0, at - 20) : at + size] for at in range(0, len(prompt), size)]
    yield [np.concatenate([*parts[each::8], *parts[(each + 1) % 8 :: 8]]) for each in range(8)], len(prompt)


def read_corpus(path: Path | None, num_documents: int, made_tokens: int) -> Corpus:
    """Reads and tokenises a text (UTF-8, gzipped when its name ends in .gz) with the shipped model's tokenizer; without
    a `path`, makes `made_tokens` tokens from the excerpt.

    The tokens of a file are kept in the system's folder for temporary files, since a large text takes minutes. Raises
    ValueError when the text is too short.
    """
    if path is None:
        tokens = chained(_encoded(EXCERPT.read_text("utf-8")), made_tokens, seed=5)
        source = f"word parts that follow each other as in the shipped excerpt, {len(tokens)} tokens"
    else:
        tokens = _tokens_of(path)
        source = f"{path.name}, {len(tokens)} tokens"
    documents = num_documents * DOCUMENT_TOKENS
    common = (len(tokens) - documents) * 4 // 5
    if common < 4 * DOCUMENT_DONOR_TOKENS:
        raise ValueError(f"{source}: {num_documents} documents need more text beside them")
    return Corpus(
        source,
        tokens[:common],
        tokens[common : common + documents].reshape(num_documents, DOCUMENT_TOKENS),
        tokens[common + documents :],
    )


def chained(sample: TokenArray, count: int, seed: int) -> TokenArray:
    """`count` int32 tokens, each drawn from those that stand behind the one before it somewhere in `sample`."""
    rng = np.random.default_rng(seed)
    by_token = np.argsort(sample[:-1], kind="stable")
    first = np.searchsorted(sample[:-1][by_token], np.arange(int(sample.max()) + 2))
    chains = min(4_096, count)
    made = np.empty((-(-count // chains), chains), dtype=np.int32)
    # The last token of all has nothing behind it and is never a start.
    made[0] = sample[rng.integers(0, len(sample) - 1, chains)]
    for step in range(1, len(made)):
        begin, end = first[made[step - 1]], first[made[step - 1] + 1]
        drawn = begin + (rng.random(chains) * (end - begin)).astype(np.int64)
        following = sample[by_token[np.minimum(drawn, len(by_token) - 1)] + 1]
        made[step] = np.where(end > begin, following, made[0])
    tokens: TokenArray = np.ascontiguousarray(made.T).reshape(-1)[:count]
    return tokens


def _tokens_of(path: Path) -> TokenArray:
    raw = path.read_bytes()
    digest = hashlib.blake2b(raw + TOKENIZER.read_bytes(), digest_size=8).hexdigest()
    kept = Path(tempfile.gettempdir()) / f"span_lookup_{digest}.npy"
    if kept.is_file():
        tokens: TokenArray = np.load(kept)
        return tokens
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8", errors="replace")
    tokens = _encoded(text)
    np.save(kept, tokens)
    return tokens


def _encoded(text: str) -> TokenArray:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    parts_of_text = [text[at : at + _CHARACTERS_A_CALL] for at in range(0, len(text), _CHARACTERS_A_CALL)]
    parts = []
    for at in range(0, len(parts_of_text), 64):
        encoded = tokenizer.encode_batch_fast(parts_of_text[at : at + 64], add_special_tokens=False)
        parts += [np.asarray(each.ids, dtype=np.int32) for each in encoded]
    return np.concatenate(parts)


def window_hashes(tokens: TokenArray) -> Hashes:
    """Hashes of all windows of RUN_TOKENS tokens, uint64 [n - RUN_TOKENS + 1], modulo 2 ** 64."""
    count = max(0, len(tokens) - RUN_TOKENS + 1)
    sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
    np.cumsum(tokens.astype(np.uint64) * _powers(_INVERSE, len(tokens)), out=sums[1:])
    return (sums[RUN_TOKENS:] - sums[:count]) * _powers(_BASE, count)


def _powers(base: int, count: int) -> Hashes:
    return np.cumprod(np.full(count, base, dtype=np.uint64), dtype=np.uint64)


def reusable_tokens(prompts: list[TokenArray], donors: Iterable[TokenArray]) -> list[npt.NDArray[np.bool_]]:
    """For every prompt, which of its tokens lie in a window of RUN_TOKENS tokens that stands in some donor."""
    hashes = [window_hashes(prompt) for prompt in prompts]
    # Few hashes of donors pass that are none of a prompt.
    filter_ = np.zeros(1 << _FILTER_BITS, dtype=np.bool_)
    for each in hashes:
        filter_[(each * _SPREAD) >> _TOP] = True
    passing = []
    for donor in donors:
        of_donor = window_hashes(donor)
        passing.append(of_donor[filter_[(of_donor * _SPREAD) >> _TOP]])
    found = np.unique(np.concatenate(passing))
    masks = []
    for prompt, each in zip(prompts, hashes, strict=True):
        edges = np.zeros(len(prompt) + 1, dtype=np.int64)
        starts = np.flatnonzero(np.isin(each, found))
        np.add.at(edges, starts, 1)
        np.add.at(edges, starts + RUN_TOKENS, -1)
        masks.append(np.cumsum(edges[:-1]) > 0)
    return masks
