"""Unit vectors for the search benchmarks: of passages of a text, or made in clusters."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from semblend_trt.benchmarks.span_corpus import EXCERPT, TOKENIZER, chained
from semblend_trt.semantic.embedder import EmbedderKind, embedder_for

if TYPE_CHECKING:
    from pathlib import Path

DIM = 384
FIELDS = 100
ENTRIES_PER_TOPIC = 50
LOCAL_RANK = 16
CHUNK = 50_000
MOST_CHARACTERS, LEAST_CHARACTERS = 800, 200
# Made text has passages of so many characters, and so many characters a token at least.
MADE_CHARACTERS, CHARACTERS_PER_TOKEN = 600, 2.5
TOKENS_A_PIECE = 1000

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Collection:
    """`vectors` float32 [n, 384] to search, `queries` float32 [m, 384], and in words what they are."""

    source: str
    vectors: Vectors
    queries: Vectors


@dataclass(frozen=True, slots=True)
class Topics:
    """Two levels of clusters: `topics` float32 [topics, 384] gather around 100 fields, vectors around topics.

    Within a topic vectors differ along 16 directions (of 64 sets of them), as texts of one topic do, and a little in
    all. This is synthetic: embeddings of real texts cluster too, but less evenly.
    """

    topics: Vectors
    directions: Vectors

    @classmethod
    def made(cls, entries: int, seed: int) -> Topics:
        """Topics for a collection of `entries` vectors, 50 of them to a topic."""
        rng = np.random.default_rng(seed)
        fields = _unit(rng.standard_normal((FIELDS, DIM), dtype=np.float32))
        count = max(FIELDS, entries // ENTRIES_PER_TOPIC)
        spread = _unit(rng.standard_normal((count, DIM), dtype=np.float32))
        directions = rng.standard_normal((64, LOCAL_RANK, DIM), dtype=np.float32) / np.sqrt(
            np.float32(DIM * LOCAL_RANK)
        )
        return cls(_unit(fields[rng.integers(0, FIELDS, count)] + 0.8 * spread), directions)

    def vectors(self, count: int, seed: int) -> Vectors:
        """Vectors float32 [count, 384]; other seeds draw other vectors of the same topics."""
        rng = np.random.default_rng(seed)
        topic = rng.integers(0, len(self.topics), count)
        along = rng.standard_normal((count, LOCAL_RANK), dtype=np.float32)
        made = self.topics[topic] + 0.02 * rng.standard_normal((count, DIM), dtype=np.float32)
        for kind in range(len(self.directions)):
            mine = topic % len(self.directions) == kind
            made[mine] += 0.7 * along[mine] @ self.directions[kind]
        return _unit(made)


def synthetic(count: int, queries: int) -> Collection:
    """`count` vectors of topics, and other vectors of the same topics as queries."""
    topics = Topics.made(count, seed=0)
    vectors = np.empty((count, DIM), dtype=np.float32)
    for first in range(0, count, CHUNK):
        vectors[first : first + CHUNK] = topics.vectors(min(CHUNK, count - first), seed=2 + first)
    return Collection(f"{count} synthetic vectors in clusters", vectors, topics.vectors(queries, seed=1))


def embedded_passages(path: Path | None, count: int, queries: int) -> Collection:
    """Passages of a text (UTF-8, gzipped when its name ends in .gz), by the embedder that needs no model; without a
    `path`, of text made from the shipped excerpt, which is too short itself: word parts follow each other as they do
    there.

    The text is cut into passages of one length without overlap. The even queries are passages that are not stored; the
    odd ones begin at the middle of a stored one. Raises ValueError when the text is too short.
    """
    held_out = -(-queries // 2)
    cut = count + held_out
    if path is None:
        text, name = _made_text(cut * MADE_CHARACTERS), "text made after the shipped excerpt"
    else:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            text, name = file.read(cut * MOST_CHARACTERS), path.name
    length = len(text) // cut
    if length < LEAST_CHARACTERS:
        raise ValueError(f"{name} has {len(text)} characters, too few for {cut} passages of {LEAST_CHARACTERS}")
    numbers = np.random.default_rng(0).permutation(cut)
    stored = np.sort(numbers[held_out:])
    begins = np.empty(queries, dtype=np.int64)
    begins[::2] = numbers[:held_out] * length
    # The very last passage has nothing behind its middle.
    begins[1::2] = np.random.default_rng(1).choice(stored[:-1], queries // 2, replace=False) * length + length // 2
    passages = [text[at * length : (at + 1) * length] for at in stored]
    embedder = embedder_for(EmbedderKind.STATIC)
    return Collection(
        f"{len(set(passages))} different passages of {length} characters of {name}, none overlapping, "
        f"embedder {embedder.identity}",
        embedder.embed(passages),
        embedder.embed([text[at : at + length] for at in begins]),
    )


def _made_text(characters: int) -> str:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    sample = tokenizer.encode(EXCERPT.read_text("utf-8"), add_special_tokens=False).ids
    tokens = chained(np.asarray(sample, dtype=np.int32), int(characters / CHARACTERS_PER_TOKEN), seed=5).tolist()
    pieces = [tokens[at : at + TOKENS_A_PIECE] for at in range(0, len(tokens), TOKENS_A_PIECE)]
    return "".join(tokenizer.decode_batch(pieces))[:characters]


def _unit(vectors: Vectors) -> Vectors:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)
