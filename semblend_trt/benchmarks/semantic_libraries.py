"""What there was to choose from for the semantic index: ways to search, each over the same passages of a text.

`python -m semblend_trt.benchmarks.semantic_libraries --text FILE --json benchmarks/results/<machine>`. One thread, the
queries and the recall of `semantic_search`. A row's value is the 99th percentile of the time of a search.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np

from kernels.results import Results, parser_of, say
from semblend_trt.benchmarks.semantic_search import NEAREST, QUERIES, Truth, filled, search_of, timed
from semblend_trt.benchmarks.semantic_vectors import DIM, embedded_passages

if TYPE_CHECKING:
    from collections.abc import Callable

    from semblend_trt.benchmarks.semantic_search import Found, Search
    from semblend_trt.benchmarks.semantic_vectors import Collection, Vectors

BREADTHS = (128, 512)
PROBED = (0.03, 0.1, 0.5)
SAMPLES = 40_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to search: its name, what it says about removal, and how it is built; `build` gives None where its library
    is not installed, otherwise pairs of a setting and a search."""

    name: str
    removal: str
    build: Callable[[Vectors], list[tuple[str, Search]] | None]


CANDIDATES = (
    Candidate("ours", "yes", lambda vectors: [("", search_of(filled(vectors)))]),
    Candidate("faiss Flat", "yes", lambda vectors: _faiss("Flat", vectors)),
    Candidate("faiss SQfp16", "yes", lambda vectors: _faiss("SQfp16", vectors)),
    Candidate("faiss PQ192x4fs refined", "slow", lambda vectors: _refined("PQ192x4fs", vectors, (100, 200))),
    Candidate("faiss PQ128x4fs refined", "slow", lambda vectors: _refined("PQ128x4fs", vectors, (500,))),
    Candidate("faiss RaBitQfs refined", "no", lambda vectors: _refined("RaBitQfs", vectors, (1000,))),
    Candidate("faiss IVF SQfp16", "yes", lambda vectors: _clusters(vectors)),
    Candidate("faiss HNSW16", "no", lambda vectors: _faiss_graph(vectors)),
    Candidate("usearch f16", "yes", lambda vectors: _usearch(vectors)),
)


def compare(collection: Collection, results: Results) -> None:
    """Adds a row for every candidate and setting, all over one collection."""
    truth = Truth(collection)
    for candidate in CANDIDATES:
        start = time.perf_counter()
        made = candidate.build(collection.vectors)
        if made is None:
            say(f"{candidate.name}: skipped, not installed")
            continue
        built = time.perf_counter() - start
        for setting, search in made:
            found, times = timed(search, collection.queries)
            name = re.sub(r"[^a-z0-9.]+", "_", f"{candidate.name} {setting}".lower()).strip("_")
            results.add(
                f"semantic_library_{name}",
                float(np.percentile(times, 99)),
                "ms",
                baseline=f"recall@10 {truth.recall(found).mean():.4f}; p50 {np.median(times):.3f} ms; built in "
                f"{built:.0f} s; removal: {candidate.removal}; {collection.source}; one thread",
            )


def _built(description: str, vectors: Vectors) -> Any:
    index = faiss.index_factory(DIM, description, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors[:: max(1, len(vectors) // SAMPLES)])
    index.add(vectors)
    return index


def _search(index: Any) -> Search:
    return lambda query: [int(each) for each in index.search(query[None], NEAREST)[1][0]]


def _faiss(description: str, vectors: Vectors) -> list[tuple[str, Search]]:
    return [("", _search(_built(description, vectors)))]


def _refined(description: str, vectors: Vectors, candidates: tuple[int, ...]) -> list[tuple[str, Search]]:
    index = faiss.IndexRefine(_built(description, vectors), _built("SQfp16", vectors))
    return [(f"of {count}", _with(index, "k_factor", count / NEAREST, _search(index))) for count in candidates]


def _clusters(vectors: Vectors) -> list[tuple[str, Search]]:
    index = _built(f"IVF{max(1, 4 * math.isqrt(len(vectors)))},SQfp16", vectors)
    return [
        (f"{share:.0%} probed", _with(index, "nprobe", max(1, int(share * index.nlist)), _search(index)))
        for share in PROBED
    ]


def _faiss_graph(vectors: Vectors) -> list[tuple[str, Search]]:
    index = _built("HNSW16", vectors)
    return [(f"ef {breadth}", _with(index.hnsw, "efSearch", breadth, _search(index))) for breadth in BREADTHS]


def _usearch(vectors: Vectors) -> list[tuple[str, Search]] | None:
    try:
        from usearch.index import Index
    except ImportError:
        return None
    index = Index(ndim=DIM, metric="ip", dtype="f16", connectivity=16, expansion_add=96)
    index.add(np.arange(len(vectors)), vectors, threads=1)

    def search(query: Vectors) -> Found:
        return [int(key) for key in index.search(query, NEAREST, threads=1).keys]

    return [(f"ef {breadth}", _with(index, "expansion_search", breadth, search)) for breadth in BREADTHS]


def _with(owner: Any, name: str, value: float, search: Search) -> Search:
    """The search with one setting of its index, set before every query."""

    def run(query: Vectors) -> Found:
        setattr(owner, name, value)
        return search(query)

    return run


def main() -> None:
    arguments = parser_of(__doc__)
    arguments.add_argument("--text", type=Path, metavar="FILE", help="English text, UTF-8, may be gzipped")
    arguments.add_argument("--entries", type=int, default=100_000, metavar="N", help="passages to store")
    given = arguments.parse_args()
    faiss.omp_set_num_threads(1)
    results = Results()
    compare(embedded_passages(given.text, given.entries, QUERIES), results)
    results.write(given.json, "semantic_libraries")


if __name__ == "__main__":
    main()
