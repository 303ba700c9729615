"""Semantic neighbours of requests, found beside serving: texts are embedded and searched by a thread of its own.

Neighbours are reported and nothing else. They authorise no reuse; that takes equal tokens.
"""

from __future__ import annotations

import enum
import logging
import threading
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.announcer import DonorPublisher
from semblend_trt.semantic.embedder import Embedder, EmbedderKind, embedder_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from semblend_trt.audit import AuditEvents
    from semblend_trt.config import Settings
    from semblend_trt.connector.requests import TrackedRequest
    from semblend_trt.metrics import Metrics
    from semblend_trt.namespace import CacheNamespace
    from semblend_trt.outcome import ReuseReport
    from semblend_trt.semantic.index import SemanticIndex

logger = logging.getLogger(__name__)

# What became of a text: entered, searched for, not taken because too many waited, or not embedded for an error.
EVENTS = ("donor_embedded", "request_embedded", "dropped", "failed")
RECENT_REQUESTS = 4096
QUEUE_LENGTH = 256
NEAREST = 5
# The scheduler takes them at every iteration; while it runs none, the newest are kept.
_MOST_NEAR = 64


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A held donor whose text is near a request's; `similarity` is the cosine of their vectors."""

    donor_id: str
    similarity: float


class NeighbourRecords:
    """Writes what the neighbours' thread found to the audit log, counts it, and tells the fleet of vectors."""

    def __init__(self, audit: AuditEvents, metrics: Metrics, news: DonorPublisher) -> None:
        self._audit, self._metrics, self._news = audit, metrics, news
        self.near: deque[str] = deque(maxlen=_MOST_NEAR)

    def neighbours_found(self, request_id: int, nearest: tuple[Neighbour, ...]) -> None:
        """The nearest donors of a request, the nearest first; none where none is near enough."""
        self._audit.neighbours(request_id, nearest)
        self._metrics.neighbours_found(nearest)
        self.near.extend(each.donor_id for each in nearest)

    def donor_embedded(self, donor_id: str, vector: npt.NDArray[np.float32]) -> None:
        """A held donor's vector, float32 [dim] of unit length, read only."""
        self._news.embedded(donor_id, vector)

    def neighbours_counted(self, event: str) -> None:
        """Counts one event, one of EVENTS."""
        self._metrics.neighbours_counted(event)


class Neighbours:
    """The nearest donors of each request. Every call returns at once; none raises and none waits for an embedding.

    `open_embedder` and `open_decoder` are called on the thread; the decoder turns token ids int32 [n] into text. When
    either raises, one warning says why and nothing is found from then on. At most `queue_length` texts wait; what comes
    on top is dropped and counted. Ends with `close`, or when its last reference goes.
    """

    def __init__(
        self,
        open_embedder: Callable[[], Embedder],
        open_decoder: Callable[[], Callable[[npt.NDArray[np.int32]], str]],
        listener: NeighbourRecords,
        *,
        min_similarity: float,
        queue_length: int = QUEUE_LENGTH,
    ) -> None:
        self._worker = _Worker(open_embedder, open_decoder, listener, min_similarity, queue_length)
        self._worker.start()
        self._finalizer = weakref.finalize(self, self._worker.stop)

    def donor_held(self, namespace_key: str, donor_id: str, tokens: npt.NDArray[np.int32]) -> None:
        """Has a donor's text, token ids int32 [n], embedded and entered."""
        self._worker.submit(_Job(_JobKind.DONOR, namespace_key, donor_id, tokens))

    def donor_gone(self, donor_id: str) -> None:
        """Takes a donor out; from now on nothing names it. Never dropped."""
        self._worker.forget(donor_id)

    def look_up(self, request_id: int, namespace_key: str, tokens: npt.NDArray[np.int32]) -> None:
        """Has the nearest donors of a prompt, token ids int32 [n], found among those entered by then."""
        self._worker.submit(_Job(_JobKind.REQUEST, namespace_key, request_id, tokens))

    def nearest(self, request_id: int) -> tuple[Neighbour, ...]:
        """Held donors at least `min_similarity` near, the nearest first, as far as they are known by now."""
        return self._worker.nearest(request_id)

    @property
    def refusal(self) -> str | None:
        """Why nothing is found in this process, None while that may change or all is well."""
        return self._worker.refusal

    def drain(self, timeout: float) -> bool:
        """Waits until everything submitted is done, at most `timeout` seconds; False when it is not."""
        return self._worker.drain(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Ends the thread, at most `timeout` seconds after the text that it is embedding. May be called twice."""
        self._finalizer()
        self._worker.join(timeout)


class _JobKind(enum.Enum):
    DONOR = "donor"
    REQUEST = "request"


@dataclass(frozen=True, slots=True)
class _Job:
    """One text to embed; `owner` is a donor's or a request's id, `tokens` int32 [n]."""

    kind: _JobKind
    namespace_key: str
    owner: str | int
    tokens: npt.NDArray[np.int32]


class _Worker:
    """Owns the thread, the queue, the index and the results; `Neighbours` says what its calls mean.

    The lock is held for moments only, never while a text is decoded, embedded or searched.
    """

    def __init__(
        self,
        open_embedder: Callable[[], Embedder],
        open_decoder: Callable[[], Callable[[npt.NDArray[np.int32]], str]],
        listener: NeighbourRecords,
        min_similarity: float,
        queue_length: int,
    ) -> None:
        # Taken out when they are called: they may hold what ends before this thread does.
        self._openers = [(open_embedder, open_decoder)]
        self._listener = listener
        self._min_similarity, self._queue_length = min_similarity, queue_length
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._live: set[str] = set()
        self._gone: list[str] = []
        self._found: OrderedDict[int, tuple[Neighbour, ...]] = OrderedDict()
        self._is_busy = True
        self._is_stopped = self._has_failed = False
        self.refusal: str | None = None
        self._thread = threading.Thread(target=self._run, name="semblend-neighbours", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Has the thread end after its present text; what waits is forgotten."""
        with self._changed:
            self._is_stopped = True
            self._jobs.clear()
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def submit(self, job: _Job) -> None:
        with self._changed:
            if self._is_stopped or self.refusal is not None:
                return
            is_taken = len(self._jobs) < self._queue_length
            if is_taken:
                self._jobs.append(job)
                if job.kind is _JobKind.DONOR:
                    self._live.add(str(job.owner))
                self._changed.notify_all()
        if not is_taken:
            self._listener.neighbours_counted("dropped")

    def forget(self, donor_id: str) -> None:
        with self._changed:
            if donor_id in self._live:
                self._live.remove(donor_id)
                # Never more than the donors that were entered, so that this needs no bound of its own.
                self._gone.append(donor_id)
                self._changed.notify_all()

    def nearest(self, request_id: int) -> tuple[Neighbour, ...]:
        with self._changed:
            found = self._found.get(request_id, ())
            return tuple(neighbour for neighbour in found if neighbour.donor_id in self._live)

    def drain(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._is_stopped or not (self._pending() or self._is_busy), timeout)

    def _pending(self) -> bool:
        return bool(self._jobs or self._gone)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            embedder, decode, index = self._opened()
        except Exception as error:
            self._refuse(error)
            return
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_stopped or self._pending())
                if self._is_stopped:
                    return
                self._is_busy = True
                gone, self._gone = self._gone, []
                job = self._jobs.popleft() if self._jobs else None
            try:
                for donor_id in gone:
                    index.remove(donor_id)
            except Exception as error:
                # An index that keeps who is gone would name donors that are not held.
                self._refuse(error)
                return
            if job is not None:
                self._do(job, embedder, decode, index)

    def _opened(self) -> tuple[Embedder, Callable[[npt.NDArray[np.int32]], str], SemanticIndex]:
        # The index library is loaded here, so that an engine without an embedder does without it.
        try:
            import faiss
        except ImportError:
            raise ConfigurationError("their index needs faiss; pip install 'semblend-trt[semantic]'") from None

        from semblend_trt.semantic.index import SemanticIndex

        faiss.omp_set_num_threads(1)  # of this thread alone; the other cores are the engine's
        open_embedder, open_decoder = self._openers.pop()
        decode = open_decoder()
        embedder = open_embedder()
        embedder.embed(["compiles what has to be compiled"])
        return embedder, decode, SemanticIndex(embedder.dim)

    def _refuse(self, error: Exception) -> None:
        known = isinstance(error, (ConfigurationError, ImportError))
        logger.warning("no semantic neighbours are reported: %s", error, exc_info=None if known else error)
        with self._changed:
            self.refusal = str(error) or type(error).__name__
            self._jobs.clear()
            self._gone.clear()
            self._live.clear()
            self._is_busy = False
            self._changed.notify_all()

    def _do(
        self, job: _Job, embedder: Embedder, decode: Callable[[npt.NDArray[np.int32]], str], index: SemanticIndex
    ) -> None:
        try:
            (vector,) = embedder.embed([decode(job.tokens)])
            if job.kind is _JobKind.DONOR:
                self._enter(job, vector, index)
            else:
                self._search(job, vector, index)
            self._listener.neighbours_counted(f"{job.kind.value}_embedded")
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception("a text cannot be embedded; later failures are counted only")
            self._listener.neighbours_counted("failed")

    def _enter(self, job: _Job, vector: npt.NDArray[np.float32], index: SemanticIndex) -> None:
        with self._changed:
            is_live = job.owner in self._live
        if is_live and vector.any():
            index.add(job.namespace_key, [str(job.owner)], vector[None])
            self._listener.donor_embedded(str(job.owner), vector)

    def _search(self, job: _Job, vector: npt.NDArray[np.float32], index: SemanticIndex) -> None:
        hits = index.find(job.namespace_key, vector, NEAREST) if vector.any() else []
        near = [Neighbour(*hit) for hit in hits if hit[1] >= self._min_similarity]
        request_id = int(job.owner)
        with self._changed:
            found = tuple(neighbour for neighbour in near if neighbour.donor_id in self._live)
            self._found[request_id] = found
            self._found.move_to_end(request_id)
            if len(self._found) > RECENT_REQUESTS:
                self._found.popitem(last=False)
        self._listener.neighbours_found(request_id, found)


class Neighbourhood(DonorPublisher):
    """Hears the donor index's news of donors in front of `news`, which hears them too.

    Without `neighbours` it only passes the news on. All methods but `report` belong to the scheduler's thread. `near`
    are donors that were found near requests and that `near_donors` has not named yet.
    """

    def __init__(self, neighbours: Neighbours | None, news: DonorPublisher, near: deque[str]) -> None:
        self._neighbours, self._news, self._near = neighbours, news, near
        self._key_of_donor: dict[str, str] = {}

    @property
    def neighbours(self) -> Neighbours | None:
        return self._neighbours

    def look_up(self, tracked: TrackedRequest) -> None:
        """Has the nearest donors of the request found."""
        if self._neighbours is not None:
            self._neighbours.look_up(tracked.request_id, tracked.namespace_key, tracked.prompt)

    def near_donors(self) -> list[str]:
        """Donors near the requests whose neighbours were found since the last call, the nearest of each first."""
        return [self._near.popleft() for _ in range(len(self._near))]

    def report(self, request_id: int, report: ReuseReport) -> ReuseReport:
        """The report with the nearest donors that are known by now."""
        return report if self._neighbours is None else replace(report, nearest=self._neighbours.nearest(request_id))

    def intended(self, donor_id: str, namespace: CacheNamespace, salt: str | None) -> None:
        self._key_of_donor[donor_id] = namespace.key
        self._news.intended(donor_id, namespace, salt)

    def held(self, donor_id: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        namespace_key = self._key_of_donor.pop(donor_id, None)
        self._news.held(donor_id, tokens, tier)
        if self._neighbours is not None and namespace_key is not None:
            self._neighbours.donor_held(namespace_key, donor_id, tokens)

    def found(self, donor_id: str, namespace_key: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        self._news.found(donor_id, namespace_key, tokens, tier)
        if self._neighbours is not None:
            self._neighbours.donor_held(namespace_key, donor_id, tokens)

    def embedded(self, donor_id: str, vector: npt.NDArray[np.float32]) -> None:
        self._news.embedded(donor_id, vector)

    def moved(self, donor_id: str, tier: str) -> None:
        self._news.moved(donor_id, tier)

    def gone(self, donor_id: str) -> None:
        self._key_of_donor.pop(donor_id, None)
        if self._neighbours is not None:
            self._neighbours.donor_gone(donor_id)
        self._news.gone(donor_id)

    def close(self) -> None:
        if self._neighbours is not None:
            self._neighbours.close()
        self._news.close()


def neighbourhood_for(
    settings: Settings,
    refusal: str | None,
    tokenizer_folder: Callable[[], Path | None],
    audit: AuditEvents,
    metrics: Metrics,
    news: DonorPublisher,
) -> Neighbourhood:
    """The neighbourhood that the settings ask for: none without an embedder, or where `refusal` stands for ever.

    `tokenizer_folder` is asked once, on the neighbours' thread.
    """
    if settings.embedder is EmbedderKind.OFF or not settings.enabled or refusal is not None:
        return Neighbourhood(None, news, deque())

    def open_embedder() -> Embedder:
        return embedder_for(settings.embedder, settings.embedder_model)

    def open_decoder() -> Callable[[npt.NDArray[np.int32]], str]:
        folder = tokenizer_folder()
        if folder is None:
            raise ConfigurationError("the engine's tokenizer is not among the files on this machine")
        return text_decoder(folder)

    records = NeighbourRecords(audit, metrics, news)
    neighbours = Neighbours(open_embedder, open_decoder, records, min_similarity=settings.min_similarity)
    return Neighbourhood(neighbours, news, records.near)


def text_decoder(folder: Path) -> Callable[[npt.NDArray[np.int32]], str]:
    """A function from token ids int32 [n] to text without special tokens, for the tokenizer in a model's folder.

    It leaves the interpreter's lock while it decodes. Raises ConfigurationError without a tokenizer.json that can be
    read.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigurationError(f"the tokenizer {path} cannot be read: {error}") from error

    def decode(tokens: npt.NDArray[np.int32]) -> str:
        # decode() keeps the lock, decode_batch() does not.
        (text,) = tokenizer.decode_batch([tokens.tolist()], skip_special_tokens=True)
        return str(text)

    return decode
