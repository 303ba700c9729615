"""Finds the entries of a namespace whose vectors are nearest to a given one.

In a large namespace, faiss compares short codes of the vectors first, and then the vectors of the best candidates.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

# Up to so many entries the vectors are compared, in half a millisecond. With more, codes are compared first.
EXACT_ENTRIES = 16_384
# Up to so many entries a search compares all codes, since texts need not cluster: a search of half of 100,000 passages
# of books misses a tenth of the neighbours. With more, codes are in clusters, and a search compares
# COMPARED * sqrt(COMPARED / entries) of them: fewer the more there are, since they do not fit in a processor's cache.
COMPARED = 100_000
# The number of candidates whose vectors are compared: per entry wanted, and at least.
CANDIDATES_PER_HIT, LEAST_CANDIDATES = 15, 150

# To open a cluster takes a search as long as 300 codes, so clusters are large.
CLUSTER_ENTRIES = 4096
# Clusters are made again after growth by this factor, so that each vector is encoded a few times only.
GROWTH = 4
SAMPLES_PER_CLUSTER = 40
LEAST_SAMPLES = 16_384
TRAINING_ROUNDS = 8
ENCODED_AT_ONCE = 65_536


class SemanticIndex:
    """Unit vectors by entry id, in namespaces; a search sees its own namespace only. Thread safe.

    `dim` is the vectors' size, which must be even. Results are exact but for the rounding to half precision up to
    16,384 entries of a namespace, and approximate with more (see NamespaceIndex).
    """

    def __init__(self, dim: int) -> None:
        if dim < 2 or dim % 2:
            raise ValueError(f"vectors of {dim} numbers; take an embedder with an even number of them")
        self.dim = dim
        self._lock = threading.Lock()
        self._indexes: dict[str, NamespaceIndex] = {}
        self._namespace_keys: dict[str, str] = {}

    def add(self, namespace_key: str, entry_ids: Sequence[str], vectors: npt.NDArray[np.float32]) -> None:
        """Enters vectors float32 [n, dim] of unit length under n different ids; earlier vectors of the ids are
        replaced."""
        with self._lock:
            for entry_id in entry_ids:
                self._remove(entry_id)
            if namespace_key not in self._indexes:
                self._indexes[namespace_key] = NamespaceIndex(self.dim)
            self._indexes[namespace_key].add(entry_ids, vectors)
            self._namespace_keys.update(dict.fromkeys(entry_ids, namespace_key))

    def remove(self, entry_id: str) -> bool:
        """Removes an entry; False when there is none."""
        with self._lock:
            return self._remove(entry_id)

    def find(self, namespace_key: str, vector: npt.NDArray[np.float32], count: int) -> list[tuple[str, float]]:
        """At most `count` entries of the namespace with their inner products, the nearest to `vector` first."""
        with self._lock:
            index = self._indexes.get(namespace_key)
            return [] if index is None else index.find(vector, count)

    def __len__(self) -> int:
        return len(self._namespace_keys)

    def _remove(self, entry_id: str) -> bool:
        namespace_key = self._namespace_keys.pop(entry_id, None)
        if namespace_key is None:
            return False
        index = self._indexes[namespace_key]
        index.remove(entry_id)
        if not len(index):
            del self._indexes[namespace_key]
        return True


class NamespaceIndex:
    """Vectors of unit length by entry id, in rows without gaps. Not thread safe.

    Vectors are kept in half precision, 2 * dim bytes each. With more than EXACT_ENTRIES entries, each also has a code
    of 4 bits for every two numbers (product quantisation; one instruction looks up 16 or more). Up to COMPARED entries
    all codes are compared; with more, codes are in clusters of 4,096 to 16,384. Codes and clusters are made again when
    entries exceed EXACT_ENTRIES, COMPARED, and each further growth by 4: that takes seconds for 100,000 entries.
    """

    def __init__(self, dim: int) -> None:
        """`dim` is even."""
        self._dim = dim
        self._entry_ids: list[str] = []
        self._rows: dict[str, int] = {}
        self._vectors: Any = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
        self._codes: Any = None
        self._search: Any = self._vectors

    def __len__(self) -> int:
        return len(self._entry_ids)

    def add(self, entry_ids: Sequence[str], vectors: npt.NDArray[np.float32]) -> None:
        """Enters vectors float32 [n, dim] under n ids that are not taken."""
        self._vectors.add(vectors)
        self._name(entry_ids)
        if len(self) > self._most_entries():
            self._encode()
        elif self._is_clustered:
            self._codes.add_with_ids(vectors, np.arange(len(self) - len(entry_ids), len(self), dtype=np.int64))
        elif self._codes is not None:
            self._codes.add(vectors)

    def remove(self, entry_id: str) -> None:
        """Removes an entry; the entry of the last row moves to its row."""
        row, last = self._rows.pop(entry_id), len(self) - 1
        moved = self._entry_ids.pop()
        if self._codes is not None:
            self._remove_code(row)
        size = self._vectors.code_size
        if row != last:
            self._entry_ids[row], self._rows[moved] = moved, row
            if self._is_clustered:
                _, ids, place = self._code_of(last)
                ids[place] = row
            stored = faiss.rev_swig_ptr(self._vectors.codes.data(), (last + 1) * size).reshape(-1, size)
            stored[row] = stored[last]
        self._vectors.codes.resize(last * size)
        self._vectors.ntotal = last

    def find(self, vector: npt.NDArray[np.float32], count: int) -> list[tuple[str, float]]:
        """At most `count` entries with their inner products, the nearest first; `vector` is float32 [dim]."""
        count = min(count, len(self))
        if count == 0:
            return []
        if self._is_clustered:
            self._codes.nprobe = max(1, int(self._codes.nlist * min(1.0, COMPARED / len(self)) ** 1.5))
        if self._codes is not None:
            self._search.k_factor = max(CANDIDATES_PER_HIT, LEAST_CANDIDATES / count)
            self._search.ntotal = len(self)
        products, rows = self._search.search(vector[None], count)
        return [
            (self._entry_ids[row], product)
            for row, product in zip(rows[0].tolist(), products[0].tolist(), strict=True)
            if row >= 0
        ]

    def _code_of(self, row: int) -> tuple[int, npt.NDArray[np.int64], int]:
        """The cluster that holds a row's code, the rows int64 [n] of that cluster's codes, and the code's place
        there."""
        vector, lists = self._vectors.reconstruct(row), self._codes.invlists
        # It is the nearest cluster but for rounding.
        for cluster in self._codes.quantizer.assign(vector[None], self._codes.nlist)[0].tolist():
            if size := lists.list_size(cluster):
                ids = faiss.rev_swig_ptr(lists.get_ids(cluster), size)
                (places,) = np.nonzero(ids == row)
                if len(places):
                    return cluster, ids, int(places[0])
        raise AssertionError(f"row {row} has no code")

    def _remove_code(self, row: int) -> None:
        """Removes a row's code; the last code, of all or of its cluster, moves to its place.

        faiss's own removal looks at all rows, and leaves codes after the end that mix with codes added later.
        """
        codes = self._codes
        if not self._is_clustered:
            packer, last = codes.get_CodePacker(), codes.ntotal - 1
            _move_code(packer, codes.codes.get(), last // packer.nvec + 1, last, row, codes.code_size)
        else:
            cluster, ids, place = self._code_of(row)
            lists, last = faiss.downcast_InvertedLists(codes.invlists), len(ids) - 1
            blocks = last // lists.n_per_block + 1
            _move_code(lists.packer, lists.get_codes(cluster), blocks, last, place, codes.code_size)
            ids[place] = ids[last]
            lists.resize(cluster, last)
        codes.ntotal -= 1

    @property
    def _is_clustered(self) -> bool:
        return isinstance(self._codes, faiss.IndexIVF)

    def _name(self, entry_ids: Sequence[str]) -> None:
        self._rows.update(zip(entry_ids, range(len(self), len(self) + len(entry_ids)), strict=True))
        self._entry_ids += entry_ids

    def _most_entries(self) -> int:
        """Entries beyond which codes and clusters are made again."""
        if not self._is_clustered:
            return EXACT_ENTRIES if self._codes is None else COMPARED
        return GROWTH * CLUSTER_ENTRIES * int(self._codes.nlist)

    def _encode(self) -> None:
        clusters = 0 if len(self) <= COMPARED else len(self) // CLUSTER_ENTRIES
        kind = f"PQ{self._dim // 2}x4fs"
        codes = faiss.index_factory(
            self._dim, f"IVF{clusters},{kind}" if clusters else kind, faiss.METRIC_INNER_PRODUCT
        )
        if clusters:
            codes.cp.niter, codes.cp.max_points_per_centroid = TRAINING_ROUNDS, SAMPLES_PER_CLUSTER
            codes.cp.min_points_per_centroid = 1
        sampled = min(len(self), max(LEAST_SAMPLES, SAMPLES_PER_CLUSTER * clusters))
        sample = np.random.default_rng(0).choice(len(self), sampled, replace=False)
        codes.train(self._vectors.reconstruct_batch(np.sort(sample)))
        for row in range(0, len(self), ENCODED_AT_ONCE):
            codes.add(self._vectors.reconstruct_n(row, min(ENCODED_AT_ONCE, len(self) - row)))
        self._codes, self._search = codes, faiss.IndexRefine(codes, self._vectors)


def _move_code(packer: Any, content: Any, blocks: int, source: int, target: int, code_size: int) -> None:
    """Moves a code among `blocks` packed blocks and clears its old place."""
    packed = faiss.rev_swig_ptr(content, blocks * packer.block_size).reshape(blocks, 1, -1)
    # One block at a time: the packer refuses places far into a long list.
    (source_block, source_place), (target_block, target_place) = (divmod(at, packer.nvec) for at in (source, target))
    packer.pack_1(packer.unpack_1(packed[source_block], source_place), target_place, packed[target_block])
    packer.pack_1(np.zeros(code_size, dtype=np.uint8), source_place, packed[source_block])
