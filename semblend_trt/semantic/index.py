"""Finds the entries of a namespace whose vectors are nearest to a given one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import faiss
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


class SemanticIndex:
    """Unit vectors by entry id, in namespaces; a search sees its own namespace only. Not thread safe.

    A search compares all vectors of the namespace, which faiss keeps in half precision.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._indexes: dict[str, Any] = {}
        # faiss names vectors by numbers.
        self._numbers: dict[str, tuple[str, int]] = {}
        self._entry_ids: dict[int, str] = {}
        self._next = 0

    def add(self, namespace_key: str, entry_ids: Sequence[str], vectors: npt.NDArray[np.float32]) -> None:
        """Enters vectors float32 [n, dim] of unit length under n different ids; earlier vectors of the ids are
        replaced."""
        for entry_id in self._numbers.keys() & entry_ids:
            self.remove(entry_id)
        numbers = range(self._next, self._next + len(entry_ids))
        self._next = numbers.stop
        if namespace_key not in self._indexes:
            half = faiss.IndexScalarQuantizer(self.dim, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
            self._indexes[namespace_key] = faiss.IndexIDMap(half)
        self._indexes[namespace_key].add_with_ids(vectors, np.array(numbers, dtype=np.int64))
        self._entry_ids.update(zip(numbers, entry_ids, strict=True))
        self._numbers.update((name, (namespace_key, number)) for name, number in zip(entry_ids, numbers, strict=True))

    def remove(self, entry_id: str) -> bool:
        """Removes an entry; False when there is none."""
        if entry_id not in self._numbers:
            return False
        namespace_key, number = self._numbers.pop(entry_id)
        del self._entry_ids[number]
        index = self._indexes[namespace_key]
        index.remove_ids(np.array([number], dtype=np.int64))
        if not index.ntotal:
            del self._indexes[namespace_key]
        return True

    def find(self, namespace_key: str, vector: npt.NDArray[np.float32], count: int) -> list[tuple[str, float]]:
        """At most `count` entries of the namespace with their inner products, the nearest to `vector` first."""
        index = self._indexes.get(namespace_key)
        if index is None:
            return []
        products, numbers = index.search(vector[None], min(count, index.ntotal))
        pairs = zip(numbers[0].tolist(), products[0].tolist(), strict=True)
        return [(self._entry_ids[number], product) for number, product in pairs]
