"""Entries near a vector, namespace by namespace. What it finds may be reported; it never says that KV may be reused."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.discovery.semantic_index_file import ShelfRecord, read_index, write_index
from semblend_trt.discovery.vector_shelf import VectorShelf
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    import numpy.typing as npt

# A vector this far from unit length was not made by an embedder.
LENGTH_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Hit:
    """An entry and the inner product of its vector with the query's."""

    entry_id: str
    similarity: float


class SemanticIndex:
    """Unit vectors by entry id, each in the namespace of a key; a search sees its own namespace only. Thread safe.

    `identity` names the embedder, `dim` is its vectors' size, which must be even. Exact but for the rounding to half
    precision up to 16,384 entries of a namespace, approximate beyond (see VectorShelf).
    """

    def __init__(self, identity: str, dim: int) -> None:
        if dim < 2 or dim % 2:
            raise ValueError(f"vectors of {dim} numbers; take an embedder with an even number of them")
        self.identity, self.dim = identity, dim
        self._lock = threading.Lock()
        self._shelves: dict[str, VectorShelf] = {}
        self._namespace_keys: dict[str, str] = {}

    def add(self, namespace_key: str, entry_id: str, vector: npt.NDArray[np.float32]) -> None:
        """Enters one vector float32 [dim], in place of an earlier one of this id. Raises as `add_all`."""
        self.add_all(namespace_key, [entry_id], vector[None])

    def add_all(self, namespace_key: str, entry_ids: Sequence[str], vectors: npt.NDArray[np.float32]) -> None:
        """Enters vectors float32 [n, dim] under n ids.

        Raises ValueError for another shape, a vector that is not of unit length, or an id given twice.
        """
        vectors = self._checked(vectors)
        if len(vectors) != len(entry_ids) or len(set(entry_ids)) != len(entry_ids):
            raise ValueError(f"{len(entry_ids)} ids for {len(vectors)} vectors; give every vector an id of its own")
        with self._lock:
            for entry_id in entry_ids:
                self._remove(entry_id)
            if namespace_key not in self._shelves:
                self._shelves[namespace_key] = VectorShelf(self.dim)
            self._shelves[namespace_key].add(entry_ids, vectors)
            self._namespace_keys.update(dict.fromkeys(entry_ids, namespace_key))

    def remove(self, entry_id: str) -> bool:
        """Takes an entry out; False when there is none."""
        with self._lock:
            return self._remove(entry_id)

    def find(self, namespace_key: str, vector: npt.NDArray[np.float32], count: int) -> list[Hit]:
        """At most `count` entries of the namespace, the nearest to `vector` (float32 [dim]) first. Raises ValueError as
        `add_all`, and for a count below 1."""
        (vector,) = self._checked(vector[None])
        if count < 1:
            raise ValueError(f"count {count} must be at least 1")
        with self._lock:
            shelf = self._shelves.get(namespace_key)
            return [] if shelf is None else [Hit(*found) for found in shelf.find(vector, count)]

    def __len__(self) -> int:
        return len(self._namespace_keys)

    def __contains__(self, entry_id: object) -> bool:
        return entry_id in self._namespace_keys

    def save(self, path: Path) -> None:
        """Writes everything to `path`, replacing the file in one step. Raises ConfigurationError when that fails."""
        with self._lock:
            records = [ShelfRecord(key, shelf.entry_ids, shelf.to_bytes()) for key, shelf in self._shelves.items()]
            write_index(path, self.identity, self.dim, records)

    @classmethod
    def load(cls, path: Path, identity: str, namespace_keys: Collection[str] | None = None) -> SemanticIndex:
        """Reads `save` back.

        Raises ConfigurationError for a file that is missing, cut short, changed or of another version, for one made by
        another embedder than `identity`, and for one with a namespace that is not among `namespace_keys`, if given.
        """
        dim, records = read_index(path, identity, namespace_keys)
        try:
            index = cls(identity, dim)
            for record in records:
                shelf = VectorShelf.from_bytes(dim, record.entry_ids, record.vectors)
                index._shelves[record.namespace_key] = shelf
                index._namespace_keys.update(dict.fromkeys(record.entry_ids, record.namespace_key))
            if len(index) != sum(map(len, index._shelves.values())):
                raise ValueError("an entry stands in two namespaces")
        except ValueError as error:
            raise ConfigurationError(f"{path} cannot be read: {error}; delete it") from error
        return index

    def _remove(self, entry_id: str) -> bool:
        namespace_key = self._namespace_keys.pop(entry_id, None)
        if namespace_key is None:
            return False
        shelf = self._shelves[namespace_key]
        shelf.remove(entry_id)
        if not len(shelf):
            del self._shelves[namespace_key]
        return True

    def _checked(self, vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != self.dim:
            raise ValueError(f"vectors of shape {vectors.shape} are not [n, {self.dim}]")
        lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
        # Written so that NaN fails as well.
        if not np.all(np.abs(lengths - 1.0) <= LENGTH_TOLERANCE):
            raise ValueError(f"vectors must have unit length; one has {lengths[np.argmax(np.abs(lengths - 1.0))]}")
        return vectors
