"""Search for the nearest vectors among 100,000 and 1,000,000, with recall, beside the other ways to search.

`python -m semblend_trt.benchmarks.semantic_search --json benchmarks/results/<machine>`. One thread. The rows are of
synthetic vectors in clusters (see semantic_vectors). Of every query the fastest of several rounds counts, since a
machine may have other work; a round goes through all queries. `--compare N` shows, on N vectors, the libraries that
were to choose from: graphs of usearch and faiss, an exact search, and the inverted file that the product uses; with
`--text FILE` also on passages of a real text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np
import numpy.typing as npt

from kernels.benchmarks.rows import Results, parser, say
from semblend_trt.benchmarks.semantic_vectors import DIM, Topics, embedded_passages
from semblend_trt.discovery.semantic_index import SemanticIndex

if TYPE_CHECKING:
    from semblend_trt.benchmarks.semantic_vectors import Vectors

NEAREST = 10
QUERIES = 1000
ROUNDS = 5
CHUNK = 50_000
GOAL_MS = 1.0
GOAL_RECALL = 0.98
# At and above this similarity a donor is reported as near by default.
NEAR = 0.60
SPACE = "benchmark"

Found = list[int]
Search = Callable[["Vectors"], Found]


class Truth:
    """The nearest entries of every query by comparing all, gathered chunk by chunk."""

    def __init__(self, queries: Vectors) -> None:
        self._queries = queries
        self.ids = np.full((len(queries), NEAREST), -1, dtype=np.int64)
        self.products = np.full((len(queries), NEAREST), -2.0, dtype=np.float32)

    def add(self, vectors: Vectors, first: int) -> None:
        """Takes the entries `first` and following into account."""
        products = self._queries @ vectors.T
        best = np.argpartition(-products, NEAREST, axis=1)[:, :NEAREST]
        products = np.concatenate([self.products, np.take_along_axis(products, best, axis=1)], axis=1)
        ids = np.concatenate([self.ids, best + first], axis=1)
        order = np.argsort(-products, axis=1)[:, :NEAREST]
        self.ids, self.products = np.take_along_axis(ids, order, axis=1), np.take_along_axis(products, order, axis=1)

    def recall(self, found: list[Found], least: float = -2.0) -> float:
        """Share of the nearest entries, those of at least this similarity, that were found; NaN without any."""
        wanted = self.products >= least
        hit = sum(
            len(set(ids[mask].tolist()) & set(each)) for ids, mask, each in zip(self.ids, wanted, found, strict=True)
        )
        return hit / int(wanted.sum()) if wanted.any() else float("nan")


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


def measure(entries: int, results: Results) -> None:
    """Builds the product's index over `entries` synthetic vectors and adds the row of its search time."""
    topics = Topics.made(entries, seed=0)
    queries = topics.vectors(QUERIES, seed=1)
    index, truth = SemanticIndex("benchmark", DIM), Truth(queries)
    built = 0.0
    for first in range(0, entries, CHUNK):
        count = min(CHUNK, entries - first)
        vectors = topics.vectors(count, seed=2 + first)
        truth.add(vectors, first)
        start = time.perf_counter()
        index.add_all(SPACE, [str(first + number) for number in range(count)], vectors)
        built += time.perf_counter() - start
    found, times = timed(lambda query: [int(hit.entry_id) for hit in index.find(SPACE, query, NEAREST)], queries)
    recall = truth.recall(found)
    start = time.perf_counter()
    for number in range(0, entries, entries // 1000):
        index.remove(str(number))
    removed = (time.perf_counter() - start) / 1000 * 1e3
    size = f"{entries // 1000}k" if entries < 1_000_000 else f"{entries // 1_000_000}m"
    p99 = float(np.percentile(times, 99))
    say(f"{entries:,} entries: p50 {np.median(times):.3f} ms, p99 {p99:.3f} ms, recall@10 {recall:.4f}")
    results.add(
        f"semantic_p99_ms_{size}",
        p99,
        "ms",
        goal=GOAL_MS,
        better="lower",
        baseline=f"recall@10 {recall:.4f} of an exact search; p50 {np.median(times):.3f} ms; synthetic vectors "
        f"of {DIM} in clusters, {QUERIES} queries, one thread; built in {built:.0f} s, one removed in {removed:.3f} ms",
    )
    results.add(
        f"semantic_recall_{size}",
        recall,
        "share",
        goal=GOAL_RECALL,
        better="higher",
        baseline="exact search, 10 nearest",
    )


def compare(name: str, vectors: Vectors, queries: Vectors) -> None:
    """Shows what there was to choose from, on the same vectors."""
    truth = Truth(queries)
    for first in range(0, len(vectors), CHUNK):
        truth.add(vectors[first : first + CHUNK], first)
    say(f"\n{name}: {len(vectors):,} vectors, mean similarity of the nearest {truth.products[:, 0].mean():.2f}")
    say(f"{'':<34}{'p50 ms':>8}{'p99 ms':>8}{'recall@10':>11}{'recall >= 0.6':>15}{'build s':>9}  removal")
    for label, removal, build in _candidates(vectors):
        start = time.perf_counter()
        made = build()
        if made is None:
            say(f"{label:<34}skipped: not installed")
            continue
        seconds = time.perf_counter() - start
        for setting, search in made:
            found, times = timed(search, queries)
            p50, p99 = np.percentile(times, (50, 99))
            recalls = f"{truth.recall(found):>11.4f}{truth.recall(found, NEAR):>15.4f}"
            say(f"{label + setting:<34}{p50:>8.3f}{p99:>8.3f}{recalls}{seconds:>9.0f}  {removal}")


def _candidates(vectors: Vectors) -> list[tuple[str, str, Callable[[], list[tuple[str, Search]] | None]]]:
    return [
        ("ours: SemanticIndex", "yes", lambda: _ours(vectors)),
        ("exact: faiss IndexFlatIP", "yes", lambda: [("", _faiss(faiss.IndexFlatIP(DIM), vectors))]),
        ("graph: usearch, half precision", "yes", lambda: _usearch(vectors)),
        ("graph: faiss IndexHNSWFlat", "no", lambda: _faiss_graph(vectors)),
    ]


def _ours(vectors: Vectors) -> list[tuple[str, Search]]:
    index = SemanticIndex("benchmark", DIM)
    for first in range(0, len(vectors), CHUNK):
        part = vectors[first : first + CHUNK]
        index.add_all(SPACE, [str(first + number) for number in range(len(part))], part)
    return [("", lambda query: [int(hit.entry_id) for hit in index.find(SPACE, query, NEAREST)])]


def _faiss(index: Any, vectors: Vectors) -> Search:
    index.add(vectors)
    return lambda query: [int(each) for each in index.search(query[None], NEAREST)[1][0]]


def _faiss_graph(vectors: Vectors) -> list[tuple[str, Search]]:
    index = faiss.IndexHNSWFlat(DIM, 16, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 96
    search = _faiss(index, vectors)
    return [(f", ef {breadth}", _with(index.hnsw, "efSearch", breadth, search)) for breadth in (32, 64, 128)]


def _usearch(vectors: Vectors) -> list[tuple[str, Search]] | None:
    try:
        from usearch.index import Index
    except ImportError:
        return None
    index = Index(ndim=DIM, metric="ip", dtype="f16", connectivity=16, expansion_add=96)
    index.add(np.arange(len(vectors)), vectors, threads=1)

    def search(query: Vectors) -> Found:
        return [int(key) for key in index.search(query, NEAREST, threads=1).keys]

    return [(f", ef {breadth}", _with(index, "expansion_search", breadth, search)) for breadth in (32, 64, 128)]


def _with(owner: Any, name: str, value: int, search: Search) -> Search:
    """The search with one setting of its index, set before every query."""

    def run(query: Vectors) -> Found:
        setattr(owner, name, value)
        return search(query)

    return run


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--entries", type=int, nargs="*", default=[100_000, 1_000_000], metavar="N")
    arguments.add_argument("--compare", type=int, default=0, metavar="N", help="show the libraries on N vectors")
    arguments.add_argument("--text", type=Path, metavar="FILE", help="compare on passages of this text too")
    given = arguments.parse_args()
    faiss.omp_set_num_threads(1)
    results = Results()
    for entries in given.entries:
        measure(entries, results)
    if given.entries:
        results.write(given.json, "semantic_search")
    if given.compare:
        topics = Topics.made(given.compare, seed=0)
        compare("synthetic", topics.vectors(given.compare, seed=2), topics.vectors(QUERIES, seed=1))
        if given.text is not None and given.text.is_file():
            compare("passages of a text, static embedder", *embedded_passages(given.text, given.compare, QUERIES))
        else:
            say("passages of a text: skipped, no --text FILE")


if __name__ == "__main__":
    main()
