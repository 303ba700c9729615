"""Unit vectors for the search benchmark: made in clusters, or embedded from a text file."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.embedder import EmbedderKind, embedder_for

if TYPE_CHECKING:
    from pathlib import Path

DIM = 384
FIELDS = 100
ENTRIES_PER_TOPIC = 50
LOCAL_RANK = 16
PASSAGE_CHARACTERS = 800

Vectors = npt.NDArray[np.float32]


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


def embedded_passages(path: Path, count: int, queries: int) -> tuple[Vectors, Vectors]:
    """Vectors of `count` passages of 800 characters of a text (plain or gzip), and of `queries` passages that begin 300
    characters later, by the embedder that needs no model. Raises ValueError when the text is too short."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        text = file.read((count + 1) * PASSAGE_CHARACTERS)
    if len(text) < (count + 1) * PASSAGE_CHARACTERS:
        raise ValueError(f"{path} has {len(text)} characters, too few for {count} passages of {PASSAGE_CHARACTERS}")
    embedder = embedder_for(EmbedderKind.STATIC)
    begins = np.random.default_rng(0).choice(count, queries, replace=False) * PASSAGE_CHARACTERS + 300
    passages = [text[at : at + PASSAGE_CHARACTERS] for at in range(0, count * PASSAGE_CHARACTERS, PASSAGE_CHARACTERS)]
    return embedder.embed(passages), embedder.embed([text[at : at + PASSAGE_CHARACTERS] for at in begins])


def _unit(vectors: Vectors) -> Vectors:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)
