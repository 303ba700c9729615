"""Semantic neighbours of requests, found on a thread beside serving. Only reported: reuse needs equal tokens."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from semblend_trt.background import Background, quiet_logger
from semblend_trt.donors.offload import DonorObserver
from semblend_trt.errors import ConfigurationError
from semblend_trt.model_tokenizer import tokenizer_file
from semblend_trt.outcome import Neighbour

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    from semblend_trt.audit import AuditLog
    from semblend_trt.config import Settings
    from semblend_trt.fleet.announcer import DonorAnnouncer
    from semblend_trt.metrics import Metrics
    from semblend_trt.namespace import CacheNamespace
    from semblend_trt.semantic.embedders import Embedder

logger = quiet_logger(__name__)

RECENT_REQUESTS = 4096
QUEUE_LENGTH = 256
NEAREST = 5
# The scheduler takes near donors at every iteration. While it runs none, only the newest are kept.
_MOST_NEAR = 64


class SemanticIndex:
    """Unit vectors by entry id; a search compares all of its own namespace, in half precision. Not thread safe."""

    def __init__(self) -> None:
        """Raises ConfigurationError without faiss."""
        try:
            import faiss
        except ImportError:
            raise ConfigurationError("their index needs faiss; pip install 'semblend-trt[semantic]'") from None
        faiss.omp_set_num_threads(1)  # of this thread alone; the other cores are the engine's
        self._faiss = faiss
        self._indexes: dict[str, Any] = {}
        # faiss names vectors by numbers: those of the namespaces and ids of all entries.
        self._entries: dict[int, tuple[str, str]] = {}

    def add(self, namespace_key: str, entry_id: str, vector: npt.NDArray[np.float32]) -> None:
        """Enter a vector float32 [dim] of unit length; an earlier one of the id is replaced."""
        self.remove(entry_id)
        if namespace_key not in self._indexes:
            kind, measure = self._faiss.ScalarQuantizer.QT_fp16, self._faiss.METRIC_INNER_PRODUCT
            half = self._faiss.IndexScalarQuantizer(len(vector), kind, measure)
            self._indexes[namespace_key] = self._faiss.IndexIDMap(half)
        number = _number_of(entry_id)
        self._indexes[namespace_key].add_with_ids(vector[None], np.array([number]))
        self._entries[number] = namespace_key, entry_id

    def remove(self, entry_id: str) -> None:
        if (number := _number_of(entry_id)) in self._entries:
            namespace_key, _ = self._entries.pop(number)
            index = self._indexes[namespace_key]
            index.remove_ids(np.array([number]))
            if not index.ntotal:
                del self._indexes[namespace_key]

    def find(self, namespace_key: str, vector: npt.NDArray[np.float32], count: int) -> list[tuple[str, float]]:
        """Return at most `count` entries with their inner products, the nearest to `vector` first."""
        if (index := self._indexes.get(namespace_key)) is None:
            return []
        products, numbers = index.search(vector[None], min(count, index.ntotal))
        return [(self._entries[each][1], float(product)) for each, product in zip(*numbers, *products, strict=True)]


def _number_of(entry_id: str) -> int:
    """Return the number by which faiss names an entry: 63 bits of its id's BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(entry_id.encode(), digest_size=8).digest(), "little") >> 1


class Neighbours(DonorObserver):
    """Finds the nearest donors of each request on a thread of its own. No call raises, or waits for an embedding. The
    thread calls `open_embedder` and `open_decoder`; a decoder turns token ids int32 [n] into text. When either fails,
    one warning and `refusal` say why, and nothing is found. At most QUEUE_LENGTH texts wait; further texts are dropped
    and counted. The thread ends with `close`, or with the last reference."""

    def __init__(
        self,
        open_embedder: Callable[[], Embedder],
        open_decoder: Callable[[], Callable[[npt.NDArray[np.int32]], str]],
        audit: AuditLog,
        metrics: Metrics,
        announcer: DonorAnnouncer | None,
        *,
        min_similarity: float,
    ) -> None:
        self._audit, self._metrics, self._announcer = audit, metrics, announcer
        self._min_similarity = min_similarity
        # Held for moments only, never while a text is decoded, embedded or searched.
        self._lock = threading.Lock()
        self._waiting = 0
        self._live: set[str] = set()
        self._found: dict[int, tuple[Neighbour, ...]] = {}
        self._is_closed = False
        self._near: deque[str] = deque(maxlen=_MOST_NEAR)
        self._key_of_donor: dict[str, str] = {}
        self.refusal: str | None = None
        self._thread = Background("semblend-neighbours")
        self._finalizer = weakref.finalize(self, self._thread.close, 0.0)
        self._thread.submit(lambda: self._open(open_embedder, open_decoder))

    def intended(self, donor_id: str, namespace: CacheNamespace, salt: str | None) -> None:  # noqa: ARG002 - in the key
        self._key_of_donor[donor_id] = namespace.key

    def held(self, donor_id: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        if (namespace_key := self._key_of_donor.pop(donor_id, None)) is not None:
            self.found(donor_id, namespace_key, tokens, tier)

    def found(self, donor_id: str, namespace_key: str, tokens: npt.NDArray[np.int32], tier: str) -> None:  # noqa: ARG002
        self._submit(namespace_key, donor_id, tokens)

    def look_up(self, request_id: int, namespace_key: str, tokens: npt.NDArray[np.int32]) -> None:
        """Queue a prompt, token ids int32 [n], to find its nearest donors among those entered by then."""
        self._submit(namespace_key, request_id, tokens)

    def gone(self, donor_id: str) -> None:
        """Take a donor out, even when the queue is full; no later answer names it."""
        self._key_of_donor.pop(donor_id, None)
        with self._lock:
            if donor_id not in self._live:
                return
            self._live.remove(donor_id)
        self._thread.submit(lambda: self._remove(donor_id))

    def nearest(self, request_id: int) -> tuple[Neighbour, ...]:
        """Return held donors of at least `min_similarity`, the nearest first, as far as they are known by now."""
        with self._lock:
            return tuple(each for each in self._found.get(request_id, ()) if each.donor_id in self._live)

    def near_donors(self) -> list[str]:
        """Return donors near the requests answered since the last call, the nearest of each request first."""
        return [self._near.popleft() for _ in range(len(self._near))]

    def close(self, timeout: float = 5.0) -> None:
        """End the thread after its present text, and drop the texts that wait. Waits `timeout` seconds at most."""
        with self._lock:
            self._is_closed = True
            self._live.clear()
        self._finalizer.detach()
        self._thread.close(timeout)

    def _submit(self, namespace_key: str, owner: str | int, tokens: npt.NDArray[np.int32]) -> None:
        """Queue a text; `owner` is a donor's id (str) or a request's (int)."""
        with self._lock:
            if self._is_closed or self.refusal is not None:
                return
            if self._waiting >= QUEUE_LENGTH:
                self._metrics.neighbours_counted("dropped")
                return
            self._waiting += 1
            if isinstance(owner, str):
                self._live.add(owner)
        self._thread.submit(lambda: self._embed(namespace_key, owner, tokens))

    # -- the thread ------------------------------------------------------------------------------------------------

    def _open(
        self, open_embedder: Callable[[], Embedder], open_decoder: Callable[[], Callable[[npt.NDArray[np.int32]], str]]
    ) -> None:
        try:
            self._index = SemanticIndex()
            self._decode, self._embedder = open_decoder(), open_embedder()
            self._embedder.embed(["compiles what has to be compiled"])
        except Exception as error:
            known = isinstance(error, (ConfigurationError, ImportError))
            logger.warning("no semantic neighbours are reported: %s", error, exc_info=None if known else error)
            with self._lock:
                self.refusal = str(error) or type(error).__name__
                self._live.clear()

    def _remove(self, donor_id: str) -> None:
        if self.refusal is None:
            self._index.remove(donor_id)

    def _embed(self, namespace_key: str, owner: str | int, tokens: npt.NDArray[np.int32]) -> None:
        with self._lock:
            self._waiting -= 1
            if self._is_closed or self.refusal is not None:
                return
        try:
            (vector,) = self._embedder.embed([self._decode(tokens)])
            if isinstance(owner, str):
                if vector.any():  # if the donor is gone, its removal comes next
                    self._index.add(namespace_key, owner, vector)
                    if self._announcer is not None:
                        self._announcer.embedded(owner, vector)
                self._metrics.neighbours_counted("donor_embedded")
            else:
                self._search(namespace_key, owner, vector)
                self._metrics.neighbours_counted("request_embedded")
        except Exception:
            logger.exception("a text cannot be embedded")
            self._metrics.neighbours_counted("failed")

    def _search(self, namespace_key: str, request_id: int, vector: npt.NDArray[np.float32]) -> None:
        hits = self._index.find(namespace_key, vector, NEAREST) if vector.any() else []
        near = [Neighbour(*hit) for hit in hits if hit[1] >= self._min_similarity]
        with self._lock:
            found = tuple(each for each in near if each.donor_id in self._live)
            self._found[request_id] = found
            if len(self._found) > RECENT_REQUESTS:
                del self._found[next(iter(self._found))]
        self._audit.neighbours(request_id, found)
        self._metrics.neighbours_found(found)
        self._near.extend(each.donor_id for each in found)


def neighbours_for(
    settings: Settings,
    tokenizer_folder: Callable[[], Path | None],
    audit: AuditLog,
    metrics: Metrics,
    announcer: DonorAnnouncer | None,
) -> Neighbours:
    """Return the neighbours that the settings ask for. Their thread calls `tokenizer_folder` once."""

    def open_embedder() -> Embedder:
        # Imported on the thread, where a missing package is a refusal.
        from semblend_trt.semantic.embedders import embedder_for

        return embedder_for(settings.embedder, settings.embedder_model)

    def open_decoder() -> Callable[[npt.NDArray[np.int32]], str]:
        if (folder := tokenizer_folder()) is None:
            raise ConfigurationError("the engine's tokenizer is not among the files on this machine")
        batch = tokenizer_file(folder).decode_batch  # decode() would keep the interpreter's lock
        return lambda tokens: str(batch([tokens.tolist()], skip_special_tokens=True)[0])

    return Neighbours(open_embedder, open_decoder, audit, metrics, announcer, min_similarity=settings.min_similarity)
