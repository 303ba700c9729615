"""Search for the nearest of 100,000 passages of a text and of 1,000,000 synthetic vectors, with recall.

`python -m semblend_trt.benchmarks.semantic_search --text FILE --json benchmarks/results/<machine>`. One thread. Without
a text, passages are made after the shipped excerpt, and the row says so. Half of the queries are passages that are not
stored, half begin at the middle of a stored one. Of every query the fastest of several rounds counts, since a machine
may have other work; a round goes through all queries. `semantic_libraries` has what there was to choose from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import faiss
import numpy as np
import numpy.typing as npt

from kernels.results import Results, parser_of, say
from semblend_trt.benchmarks.semantic_vectors import CHUNK, DIM, Collection, embedded_passages, synthetic
from semblend_trt.semantic.index import SemanticIndex

if TYPE_CHECKING:
    from semblend_trt.benchmarks.semantic_vectors import Vectors

NEAREST = 10
QUERIES = 1000
ROUNDS = 5
REMOVED = 1000
GOAL_MS = 1.0
GOAL_RECALL = 0.98
# At and above this similarity a donor is reported as near by default.
NEAR = 0.60
# Entries this close to the last of the nearest are as near as it is: products are rounded in another order.
TIE = 1e-6
SPACE = "benchmark"

Found = list[int]
Search = Callable[["Vectors"], Found]


class Truth:
    """The products of every query's nearest entries, by comparing all: `products` float32 [queries, 10], falling."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        queries, vectors = collection.queries, collection.vectors
        self.products = np.full((len(queries), NEAREST), -2.0, dtype=np.float32)
        for first in range(0, len(vectors), CHUNK):
            products = np.concatenate([self.products, queries @ vectors[first : first + CHUNK].T], axis=1)
            best = np.partition(products, products.shape[1] - NEAREST, axis=1)[:, -NEAREST:]
            self.products = -np.sort(-best, axis=1)

    def recall(self, found: list[Found], least: float = -2.0) -> npt.NDArray[np.float64]:
        """For every query, the share of its nearest entries, those of at least this similarity, that were found; NaN
        without any. An entry that is as near as the last of them counts as one of them."""
        shares = np.full(len(found), np.nan)
        for number, (query, ids) in enumerate(zip(self._collection.queries, found, strict=True)):
            wanted = self.products[number][self.products[number] >= least]
            if len(wanted):
                products = self._collection.vectors[sorted(set(ids))] @ query
                shares[number] = min(len(wanted), int((products >= wanted[-1] - TIE).sum())) / len(wanted)
        return shares


def timed(search: Search, queries: Vectors) -> tuple[list[Found], npt.NDArray[np.float64]]:
    """What was found for every query, and the milliseconds that each took in its fastest round."""
    for query in queries[: len(queries) // 10]:
        search(query)
    found: list[Found] = []
    times = np.full(len(queries), np.inf)
    for _ in range(ROUNDS):
        found.clear()
        for number, query in enumerate(queries):
            start = time.perf_counter()
            found.append(search(query))
            times[number] = min(times[number], (time.perf_counter() - start) * 1e3)
    return found, times


def filled(vectors: Vectors) -> SemanticIndex:
    """The product's index over vectors float32 [n, 384], which are named by their numbers."""
    index = SemanticIndex(DIM)
    for first in range(0, len(vectors), CHUNK):
        part = vectors[first : first + CHUNK]
        index.add_all(SPACE, [str(first + number) for number in range(len(part))], part)
    return index


def search_of(index: SemanticIndex) -> Search:
    """A search of the index for the numbers of the nearest entries."""
    return lambda query: [int(hit.entry_id) for hit in index.find(SPACE, query, NEAREST)]


def measure(collection: Collection, results: Results) -> None:
    """Builds the product's index over a collection and adds the rows of its search time and recall."""
    entries = len(collection.vectors)
    start = time.perf_counter()
    index = filled(collection.vectors)
    built = time.perf_counter() - start
    found, times = timed(search_of(index), collection.queries)
    truth = Truth(collection)
    shares = truth.recall(found)
    recall, p50, p99 = float(shares.mean()), np.median(times), float(np.percentile(times, 99))
    removed = milliseconds_to_remove(index, entries)
    size = f"{entries // 1000}k" if entries < 1_000_000 else f"{entries // 1_000_000}m"
    results.add(
        f"semantic_p99_ms_{size}",
        p99,
        "ms",
        goal=GOAL_MS,
        baseline=f"recall@10 {recall:.4f} of an exact search; p50 {p50:.3f} ms; {collection.source}; "
        f"{len(found)} queries, one thread; built in {built:.0f} s, one removed in {removed:.2f} ms",
    )
    near = truth.recall(found, NEAR)
    said = f"; {np.nanmean(near):.4f} of those with similarity >= {NEAR}" if not np.isnan(near).all() else ""
    results.add(
        f"semantic_recall_{size}",
        recall,
        "share",
        goal=GOAL_RECALL,
        better="higher",
        baseline=f"exact search, 10 nearest, entries as near as the tenth count; {collection.source}; even queries "
        f"{shares[::2].mean():.4f}, odd {shares[1::2].mean():.4f}{said}",
    )


def milliseconds_to_remove(index: SemanticIndex, entries: int) -> float:
    """Takes out up to 1000 of the entries, and says what one took."""
    numbers = range(0, entries, max(1, entries // REMOVED))
    start = time.perf_counter()
    for number in numbers:
        index.remove(str(number))
    return (time.perf_counter() - start) / len(numbers) * 1e3


def main() -> None:
    arguments = parser_of(__doc__)
    arguments.add_argument("--text", type=Path, metavar="FILE", help="English text, UTF-8, may be gzipped")
    arguments.add_argument("--entries", type=int, nargs="*", default=[100_000], metavar="N", help="passages to store")
    arguments.add_argument(
        "--synthetic", type=int, nargs="*", default=[1_000_000], metavar="N", help="synthetic vectors to store"
    )
    given = arguments.parse_args()
    faiss.omp_set_num_threads(1)
    results = Results()
    for entries in given.entries:
        measure(embedded_passages(given.text, entries, QUERIES), results)
    for entries in given.synthetic:
        measure(synthetic(entries, QUERIES), results)
    if not results.rows:
        say("nothing to measure: --entries and --synthetic name no size")
    results.write(given.json, "semantic_search")


if __name__ == "__main__":
    main()
