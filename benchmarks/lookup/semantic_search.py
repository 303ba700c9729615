"""Search for the nearest of 10,000 passages of a text, as many as there are donors by default, with recall.

`python -m benchmarks.lookup.semantic_search --text FILE --json benchmarks/results/<machine>`. One thread. Without
a text, passages are made after the shipped excerpt, and the row says so. Half of the queries are passages that are not
stored, half begin at the middle of a stored one. Of every query the fastest of several rounds counts, since a machine
may have other work; a round goes through all queries.
"""

from __future__ import annotations

import gzip
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import faiss
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from benchmarks.lookup.span_corpus import EXCERPT, TOKENIZER, chained
from benchmarks.program import run_counted, seconds
from semblend_trt.config import EmbedderKind
from semblend_trt.semantic.embedders import embedder_for
from semblend_trt.semantic.index import SemanticIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from validation.results import Results

DIM = 384
NEAREST, QUERIES, ROUNDS, REMOVED = 10, 1000, 5, 1000
GOAL_MS, GOAL_RECALL = 1.0, 0.98
# At and above this similarity a donor is reported as near by default.
NEAR = 0.60
# Entries this close to the last of the nearest are as near as it is: products are rounded in another order.
TIE = 1e-6
SPACE = "benchmark"
FIELDS, ENTRIES_PER_TOPIC, LOCAL_RANK, CHUNK = 100, 50, 16, 50_000
MOST_CHARACTERS, LEAST_CHARACTERS = 800, 200
# Made text has passages of so many characters, and so many characters a token at least.
MADE_CHARACTERS, CHARACTERS_PER_TOKEN = 600, 2.5
TOKENS_A_CALL = 1000

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


def synthetic_vectors(count: int, queries: int) -> Collection:
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
        f"embedder {type(embedder).__name__}",
        embedder.embed(passages),
        embedder.embed([text[at : at + length] for at in begins]),
    )


def _made_text(characters: int) -> str:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    sample = tokenizer.encode(EXCERPT.read_text("utf-8"), add_special_tokens=False).ids
    tokens = chained(np.asarray(sample, dtype=np.int32), int(characters / CHARACTERS_PER_TOKEN), seed=5).tolist()
    parts = [tokens[at : at + TOKENS_A_CALL] for at in range(0, len(tokens), TOKENS_A_CALL)]
    return "".join(tokenizer.decode_batch(parts))[:characters]


def _unit(vectors: Vectors) -> Vectors:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)


def nearest_products(collection: Collection) -> Vectors:
    """The products of every query with its nearest entries, by comparing all: float32 [queries, 10], falling."""
    best = np.full((len(collection.queries), NEAREST), -2.0, dtype=np.float32)
    for first in range(0, len(collection.vectors), CHUNK):
        products = np.concatenate([best, collection.queries @ collection.vectors[first : first + CHUNK].T], axis=1)
        best = np.partition(products, products.shape[1] - NEAREST, axis=1)[:, -NEAREST:]
    return -np.sort(-best, axis=1)


def recall(
    collection: Collection, nearest: Vectors, found: Sequence[Sequence[int]], least: float = -2.0
) -> npt.NDArray[np.float64]:
    """For every query, the share of its nearest entries, those of at least this similarity, that were found; NaN
    without any. An entry that is as near as the last of them counts as one of them."""
    shares = np.full(len(found), np.nan)
    for number, (query, ids) in enumerate(zip(collection.queries, found, strict=True)):
        wanted = nearest[number][nearest[number] >= least]
        if len(wanted):
            products = collection.vectors[sorted(set(ids))] @ query
            shares[number] = min(len(wanted), int((products >= wanted[-1] - TIE).sum())) / len(wanted)
    return shares


def timed(index: SemanticIndex, queries: Vectors) -> tuple[list[list[int]], npt.NDArray[np.float64]]:
    """The numbers of the nearest entries of every query, and the milliseconds that each took in its fastest round."""
    for query in queries[: len(queries) // 10]:
        index.find(SPACE, query, NEAREST)
    found: list[list[int]] = []
    times = np.full((ROUNDS, len(queries)), np.inf)
    for taken in times:
        found.clear()
        for number, query in enumerate(queries):
            start = time.perf_counter()
            hits = index.find(SPACE, query, NEAREST)
            taken[number] = (time.perf_counter() - start) * 1e3
            found.append([int(entry_id) for entry_id, _ in hits])
    return found, times.min(axis=0)


def filled(vectors: Vectors) -> SemanticIndex:
    """The product's index over vectors float32 [n, 384], which are named by their numbers."""
    index = SemanticIndex(DIM)
    for first in range(0, len(vectors), CHUNK):
        part = vectors[first : first + CHUNK]
        index.add(SPACE, [str(first + number) for number in range(len(part))], part)
    return index


def measure(collection: Collection, results: Results) -> None:
    """Builds the product's index over a collection and adds the rows of its search time and recall."""
    entries = len(collection.vectors)
    start = time.perf_counter()
    index = filled(collection.vectors)
    built = time.perf_counter() - start
    found, times = timed(index, collection.queries)
    nearest = nearest_products(collection)
    shares, near = (recall(collection, nearest, found, least) for least in (-2.0, NEAR))
    numbers = range(0, entries, max(1, entries // REMOVED))
    removed = sum(seconds(index.remove, str(number)) for number in numbers) / len(numbers) * 1e3
    size = f"{entries // 1000}k" if entries < 1_000_000 else f"{entries // 1_000_000}m"
    baseline = (
        f"recall@10 {shares.mean():.4f} of an exact search; p50 {np.median(times):.3f} ms; {collection.source}; "
        f"{len(found)} queries, one thread; built in {built:.0f} s, one removed in {removed:.2f} ms"
    )
    results.add(f"semantic_p99_ms_{size}", float(np.percentile(times, 99)), "ms", baseline, GOAL_MS)
    said = f"; {np.nanmean(near):.4f} of those with similarity >= {NEAR}" if not np.isnan(near).all() else ""
    baseline = (
        f"exact search, 10 nearest, entries as near as the tenth count; {collection.source}; even queries "
        f"{shares[::2].mean():.4f}, odd {shares[1::2].mean():.4f}{said}"
    )
    results.add(f"semantic_recall_{size}", float(shares.mean()), "share", baseline, GOAL_RECALL, "higher")


def run(results: Results, text: Path | None, entries: list[int], synthetic: list[int]) -> None:
    """Measures collections of these sizes."""
    faiss.omp_set_num_threads(1)
    for count in entries:
        measure(embedded_passages(text, count, QUERIES), results)
    for count in synthetic:
        measure(synthetic_vectors(count, QUERIES), results)


main = partial(
    run_counted,
    "semantic_search",
    __doc__,
    [],
    run,
    text={"type": Path, "metavar": "FILE", "help": "English text, UTF-8, may be gzipped"},
    entries={"type": int, "nargs": "*", "default": [10_000], "metavar": "N", "help": "passages to store"},
    synthetic={"type": int, "nargs": "*", "default": [], "metavar": "N", "help": "synthetic vectors"},
)

if __name__ == "__main__":
    main()
