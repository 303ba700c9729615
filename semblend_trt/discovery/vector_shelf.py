"""The vectors of one namespace in a faiss index that changes its form as it grows."""

from __future__ import annotations

import math
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

# Up to here every vector is compared, which takes a few milliseconds; beyond, those of the nearest clusters.
FLAT_ENTRIES = 16_384
# Clusters are made again when a shelf has grown by this factor, so that each vector is clustered twice at most.
GROWTH = 4

CLUSTERS_PER_ROOT = 4
# A search compares about this many vectors at any size, those of the nearest clusters, of which it takes this many at
# least.
COMPARED = 3072
LEAST_CLUSTERS = 8
SAMPLES_PER_CLUSTER = 40
TRAINING_ROUNDS = 8


class VectorShelf:
    """Vectors of unit length by slot, an int64. Not thread safe.

    Beyond FLAT_ENTRIES it is an inverted file of 4 * sqrt(entries) clusters over numbers of half precision, of which
    those nearest to a query are searched. Crossing FLAT_ENTRIES, and each growth by 4 after that, clusters all
    vectors again: seconds for 100,000, amortised over those added since.
    """

    def __init__(self, dim: int, index: Any = None) -> None:
        self._dim = dim
        self._index = _flat(dim) if index is None else index
        self._next_build = FLAT_ENTRIES
        if index is not None and not self._is_flat:
            self._next_build = max(FLAT_ENTRIES, GROWTH * (index.nlist // CLUSTERS_PER_ROOT) ** 2)

    @classmethod
    def from_bytes(cls, dim: int, content: bytes) -> VectorShelf:
        """Reads `to_bytes` back. Raises ValueError when the bytes hold no index of this dimension."""
        try:
            index = faiss.deserialize_index(np.frombuffer(content, dtype=np.uint8))
        except Exception as error:
            raise ValueError(f"no vector index: {error}") from error
        if index.d != dim:
            raise ValueError(f"vectors of {index.d} entries, not {dim}")
        return cls(dim, index)

    def to_bytes(self) -> bytes:
        """The whole shelf, as `from_bytes` reads it."""
        return bytes(faiss.serialize_index(self._index).data)

    @property
    def _is_flat(self) -> bool:
        return isinstance(self._index, faiss.IndexIDMap2)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(self, slots: npt.NDArray[np.int64], vectors: npt.NDArray[np.float32]) -> None:
        """Enters vectors float32 [n, dim] under slots int64 [n] that are not taken."""
        self._index.add_with_ids(vectors, slots)
        if len(self) > self._next_build:
            self._build()

    def remove(self, slot: int) -> None:
        """Takes the vector at `slot` out; the others keep their slots."""
        self._index.remove_ids(np.array([slot], dtype=np.int64))

    def find(self, vector: npt.NDArray[np.float32], count: int) -> list[tuple[int, float]]:
        """At most `count` slots with their inner products, the nearest first; `vector` is float32 [dim]."""
        if not self._is_flat:
            self._index.nprobe = max(LEAST_CLUSTERS, COMPARED * self._index.nlist // max(1, len(self)))
        products, slots = self._index.search(vector[None], min(count, len(self)))
        return [(int(slot), float(product)) for slot, product in zip(slots[0], products[0], strict=True) if slot >= 0]

    def _build(self) -> None:
        slots, vectors = self._contents()
        clusters = CLUSTERS_PER_ROOT * math.isqrt(len(slots))
        # The index owns its quantizer only when it is told so.
        quantizer = faiss.IndexFlatIP(self._dim)
        index = faiss.IndexIVFScalarQuantizer(
            quantizer,
            self._dim,
            clusters,
            faiss.ScalarQuantizer.QT_fp16,
            faiss.METRIC_INNER_PRODUCT,
            False,
        )
        quantizer.this.disown()
        index.own_fields = True
        index.cp.niter, index.cp.max_points_per_centroid = TRAINING_ROUNDS, SAMPLES_PER_CLUSTER
        index.cp.min_points_per_centroid = 1
        index.train(vectors)
        index.set_direct_map_type(faiss.DirectMap.Hashtable)  # removal then finds its vector without a scan
        index.add_with_ids(vectors, slots)
        self._index, self._next_build = index, GROWTH * len(slots)

    def _contents(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """All slots int64 [n] and their vectors float32 [n, dim]."""
        if self._is_flat:
            slots = faiss.vector_to_array(self._index.id_map).astype(np.int64)
            return slots, self._index.index.reconstruct_n(0, len(self))
        lists = self._index.invlists
        parts = [
            faiss.rev_swig_ptr(lists.get_ids(each), lists.list_size(each)).copy()
            for each in range(lists.nlist)
            if lists.list_size(each)
        ]
        slots = np.concatenate(parts).astype(np.int64)
        return slots, self._index.reconstruct_batch(slots)


def _flat(dim: int) -> Any:
    return faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
