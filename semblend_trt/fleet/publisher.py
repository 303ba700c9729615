"""EventPublisher: tells the fleet of this worker's donors, on a thread and an event loop of its own.

The serving path only appends to a bounded queue. What is lost, by a full queue or a lost server, is made good by a
resync: a reset, and all that is held once more.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import threading
import time
import weakref
from collections import Counter, deque
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from semblend_trt.discovery.fingerprint import as_token_array
from semblend_trt.fleet.connection import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, Connection, ConnectionLostError
from semblend_trt.fleet.events import KIND_NAMES, EventError
from semblend_trt.fleet.sketch import sketch_key, sketches_of
from semblend_trt.fleet.wire import Announcement, Emitter, EventFormat, EventWriter, donor_digest, token_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt
    from prometheus_client import CollectorRegistry

    from semblend_trt.discovery.fingerprint import TokenArray
    from semblend_trt.fleet.connection import ConnectionOptions
    from semblend_trt.namespace import CacheNamespace


logger = logging.getLogger(__name__)

DROP_REASONS = ("overflow", "disconnected", "oversize", "internal_error", "closed")
RESYNC_REASONS = ("connected", "overflow", "requested", "interval")
# Prometheus' name of each count, what it says, its label and the label's values.
_SERIES = {
    "sent": ("semblend_events", "Donor events sent.", "kind", KIND_NAMES),
    "dropped": ("semblend_events_dropped", "Changes that became no event of their own.", "reason", DROP_REASONS),
    "resyncs": ("semblend_event_resyncs", "Times all donors were told anew.", "reason", RESYNC_REASONS),
    "connections": ("semblend_event_connections", "Connections to NATS.", "result", ("made", "failed")),
}
# Donors are described together up to so many tokens, which stay in the processor's cache meanwhile.
PORTION_TOKENS = 16384
MAX_CHANGES = 65536
BATCH = 512
# How long a change may wait before the thread looks, in seconds. Being woken would cost the serving path more.
TICK_SECONDS = 0.02
CLOSE_SECONDS = 2.0


class EventCounters:
    """Counts of one publisher, of fixed names only, in Prometheus too where it is there. Raises nothing.

    `sent` by kind: handed to a server that answered since. `dropped` by reason: changes that did not go out as events
    of their own; a resync tells readers their result. `resyncs` by reason; `connections` by result, made or failed.
    """

    def __init__(self, enabled: bool = True, registry: CollectorRegistry | None = None) -> None:
        self.sent: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.resyncs: Counter[str] = Counter()
        self.connections: Counter[str] = Counter()
        self._series = _series_in(registry) if enabled else {}

    def count(self, what: str, label: str, count: int = 1) -> None:
        """Adds to the count of the name `what`, under its `label`."""
        if count:
            getattr(self, what)[label] += count
            if what in self._series:
                self._series[what].labels(label).inc(count)


_registered: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _series_in(registry: CollectorRegistry | None) -> dict[str, Any]:
    """The series in a registry, made once for all publishers; none where they cannot be made."""
    try:
        from prometheus_client import REGISTRY
        from prometheus_client import Counter as Series

        registry = REGISTRY if registry is None else registry
        if registry not in _registered:
            series = {name: Series(*told[:2], [told[2]], registry=registry) for name, told in _SERIES.items()}
            for name, (_, _, _, values) in _SERIES.items():
                for (
                    value
                ) in values:  # series that exist from the start can be told from a publisher that counts nothing
                    series[name].labels(value)
            _registered[registry] = series
        return _registered[registry]
    except ImportError:
        return {}
    except Exception as error:
        logger.warning("no metrics of events are kept: %s", error)
        return {}


@dataclass(slots=True, eq=False)
class Held:
    """A donor as the serving path left it: `tokens` int32 [n] until it is sketched, then what was made of them.

    `namespace` is None until it is known; no library holds such a donor. `salted_key` is the sketch key of a request
    with a salt, empty for one without. `tier` may change, and `embedding` (float32 [dim]) may come later; `is_unfit`
    marks a donor that no event can tell of.
    """

    namespace: CacheNamespace | None
    salted_key: bytes
    tier: str
    count: int
    tokens: npt.NDArray[np.int32] | None
    embedding: npt.NDArray[np.float32] | None = None
    digest: int = 0
    sketch: bytes = b""
    is_unfit: bool = False


@dataclass(slots=True, eq=False)
class HeldDonors:
    """One library's donors by id. Written by the serving path, read by the publisher; each step of a dict is whole."""

    donors: dict[str, Held] = field(default_factory=dict)


class Notice(NamedTuple):
    """One message ready to be sent."""

    kind: str
    event_id: int
    payload: bytes


class _Told(NamedTuple):
    """What readers were told of a donor: which one the id meant, with which embedding, its tier, its part of the
    state's digest.
    """

    held: Held
    embedding: npt.NDArray[np.float32] | None
    tier: str
    digest: int


class Outbox:
    """Makes messages of changes. `changes` is what the serving path appends (library, donor id) to."""

    def __init__(self, writer: EventWriter, counters: EventCounters) -> None:
        self._writer, self._counters = writer, counters
        self._libraries: list[HeldDonors] = []
        self._told: dict[str, _Told] = {}
        self._digest = 0
        self._waiting: deque[tuple[HeldDonors, str]] = deque()
        self._reset_due = True
        self.changes: deque[tuple[HeldDonors, str]] = deque()

    def __len__(self) -> int:
        """Donors that may have changed since they were told of."""
        return len(self._waiting) + len(self.changes) + self._reset_due

    def add(self, library: HeldDonors) -> None:
        self._libraries.append(library)

    def remove(self, library: HeldDonors) -> None:
        """Takes a library out; what was told of its donors is taken back."""
        if library in self._libraries:
            self._libraries.remove(library)
            ids = list(library.donors)
            library.donors.clear()
            self._waiting.extend((library, donor_id) for donor_id in ids)

    def absorb(self, limit: int) -> int:
        """Describes up to `limit` changed donors, so that their tokens can go; returns how many there were."""
        changed = [self.changes.popleft() for _ in range(min(limit, len(self.changes)))]
        self._waiting.extend(changed)
        self._describe(library.donors.get(donor_id) for library, donor_id in changed)
        return len(changed)

    def forget_changes(self) -> int:
        """Drops what waits, since a resync will tell its result; returns the number."""
        count = len(self._waiting)
        self._waiting.clear()
        return count

    def resync(self) -> None:
        """From the next message on, readers are told everything from the start."""
        self._reset_due = True

    def take(self, limit: int) -> list[Notice]:
        """The next messages, at most `limit`; what they say counts as told."""
        taken: list[Notice] = []
        if self._reset_due and limit > 0:
            self._begin()
            taken.append(self._notice("provider_generation_reset", self._writer.reset()))
        while self._waiting and len(taken) < limit:
            notice = self._change_of(*self._waiting.popleft())
            if notice is not None:
                taken.append(notice)
        return taken

    def heartbeat(self, interval_seconds: float) -> Notice:
        """A sign of life that says what a reader that followed knows."""
        payload = self._writer.heartbeat(interval_seconds, len(self._told), self._digest)
        return self._notice("provider_heartbeat", payload)

    def purge(self) -> Notice:
        """The last word: nothing is held any more."""
        self._told, self._digest = {}, 0
        self._waiting.clear()
        return self._notice("donors_purged", self._writer.purged())

    def describe_all(self) -> None:
        """Describes all that is held, after changes were lost."""
        for library in self._libraries:
            self._describe(list(library.donors.values()))

    def _begin(self) -> None:
        self._reset_due = False
        self._told, self._digest = {}, 0
        # A list is one step for the interpreter's lock: the serving path cannot change the dict meanwhile.
        self._waiting = deque((library, donor_id) for library in self._libraries for donor_id in list(library.donors))

    def _notice(self, kind: str, payload: bytes) -> Notice:
        return Notice(kind, self._writer.last_id, payload)

    def _change_of(self, library: HeldDonors, donor_id: str) -> Notice | None:
        """What has to be said of a donor; None when readers know all of it."""
        held, told = library.donors.get(donor_id), self._told.get(donor_id)
        if held is None or held.is_unfit:
            return None if told is None else self._evicted(donor_id)
        # Nothing but a registration can carry an embedding, and one of a known donor replaces what was known.
        if told is None or told.held is not held or told.embedding is not held.embedding:
            return self._registered(donor_id, held)
        tier = held.tier
        if told.tier == tier:
            return None
        self._note(donor_id, held, told.embedding, tier)
        return self._notice("donor_relocated", self._writer.relocated(donor_id, tier))

    def _evicted(self, donor_id: str) -> Notice:
        self._unlearn(donor_id)
        return self._notice("donor_evicted", self._writer.evicted(donor_id))

    def _registered(self, donor_id: str, held: Held) -> Notice | None:
        if held.tokens is not None:
            self._describe([held])
        if held.is_unfit or held.namespace is None:
            return None
        tier, embedding = held.tier, held.embedding
        announcement = Announcement(donor_id, held.namespace, tier, held.count, held.digest, held.sketch, embedding)
        try:
            payload = self._writer.registered(announcement)
        except EventError as error:
            logger.warning("donor %s is not announced: %s", donor_id, error)
            held.is_unfit = True
            self._counters.count("dropped", "oversize")
            return None
        self._note(donor_id, held, embedding, tier)
        return self._notice("donor_registered", payload)

    def _note(self, donor_id: str, held: Held, embedding: npt.NDArray[np.float32] | None, tier: str) -> None:
        self._unlearn(donor_id)
        self._told[donor_id] = told = _Told(held, embedding, tier, donor_digest(donor_id, tier))
        self._digest ^= told.digest

    def _unlearn(self, donor_id: str) -> None:
        told = self._told.pop(donor_id, None)
        if told is not None:
            self._digest ^= told.digest

    def _describe(self, donors: Iterable[Held | None]) -> None:
        """Describes those that are not yet, as many at a time as have PORTION_TOKENS tokens."""
        portion: list[Held] = []
        size = 0
        for held in donors:
            if held is None or held.tokens is None or held.namespace is None:
                continue
            portion.append(held)
            size += held.count
            if size >= PORTION_TOKENS:
                self._describe_portion(portion)
                portion, size = [], 0
        if portion:
            self._describe_portion(portion)

    def _describe_portion(self, donors: list[Held]) -> None:
        """A donor that cannot be described costs only itself; it is left out, and counted."""
        try:
            _describe_all(donors)
        except Exception:
            if len(donors) > 1:
                for held in donors:
                    self._describe([held])
                return
            logger.exception("a donor of %d tokens cannot be described and is not announced", donors[0].count)
            donors[0].is_unfit, donors[0].tokens = True, None
            self._counters.count("dropped", "internal_error")


def _describe_all(donors: list[Held]) -> None:
    """Makes sketches and digests and lets the tokens go."""
    texts = [_together(held.tokens) for held in donors if held.tokens is not None]
    tokens = np.frombuffer(bytearray().join(texts), dtype=np.int32)
    ends = np.cumsum([len(text) for text in texts])
    keys = [held.salted_key or _open_key(held.namespace.key) for held in donors if held.namespace is not None]
    sketches, start = sketches_of(tokens, ends, keys), 0
    wide = tokens.astype("<i8")
    for held, sketch, end in zip(donors, sketches, ends.tolist(), strict=True):
        held.sketch, held.digest, held.tokens = sketch, token_digest(wide[start:end], held.salted_key), None
        start = end


def _together(tokens: TokenArray) -> memoryview:
    """A request's ids as int32 that stand together; where they do, they are not looked through again."""
    return (tokens if tokens.dtype == np.int32 and tokens.flags.c_contiguous else as_token_array(tokens)).data


@functools.lru_cache(maxsize=64)
def _open_key(namespace_key: str) -> bytes:
    """The sketch key of a namespace's requests without a salt; those with one are secrets, and not remembered."""
    return sketch_key(namespace_key, None)


class EventPublisher:
    """Publishes until `close`. `changed` is for the serving path: it never waits, and raises nothing.

    `clock` (seconds, monotonic) times heartbeats and resyncs. Raises ConfigurationError without the extra nats.
    """

    def __init__(
        self,
        options: ConnectionOptions,
        emitter: Emitter,
        counters: EventCounters,
        *,
        form: EventFormat = EventFormat.JSON,
        embeddings: bool = False,
        heartbeat_seconds: float = 10.0,
        resync_seconds: float = 300.0,
        max_changes: int = MAX_CHANGES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters, self.emitter, self.embeddings = counters, emitter, embeddings
        self._options, self._clock, self._max_changes = options, clock, max_changes
        self._heartbeat_seconds, self._resync_seconds = heartbeat_seconds, resync_seconds
        self._outbox = Outbox(EventWriter(emitter, form, embeddings=embeddings), counters)
        self._changes = self._outbox.changes
        self._overflowed = 0
        self._connection: Connection | None = None
        self._attempt: asyncio.Task[Connection] | None = None
        self._retry_at, self._retry_seconds = 0.0, FIRST_RETRY_SECONDS
        self._heartbeat_at = self._resynced_at = clock()
        self._is_asked = self._is_stopping = False
        self._flushing: list[asyncio.Future[None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="semblend-events", daemon=True)
        self._thread.start()

    # -- the serving path ------------------------------------------------------------------------------------------

    def changed(self, library: HeldDonors, donor_id: str) -> None:
        """Notes that a donor of `library` was added, moved or removed."""
        if len(self._changes) < self._max_changes:
            self._changes.append((library, donor_id))
        else:
            self._overflowed += 1

    # -- other threads ---------------------------------------------------------------------------------------------

    def add(self, library: HeldDonors) -> None:
        """Tells of this library's donors from now on."""
        self._loop.call_soon_threadsafe(self._outbox.add, library)

    def remove(self, library: HeldDonors) -> None:
        """Tells that this library's donors are gone, and of none of them any more."""
        self._loop.call_soon_threadsafe(self._outbox.remove, library)

    def flush(self, timeout: float) -> bool:
        """Waits until all that was noted has reached the server; False when it did not within `timeout` seconds."""
        waiting = asyncio.run_coroutine_threadsafe(self._flushed(), self._loop)
        try:
            waiting.result(timeout)
        except (FutureTimeoutError, asyncio.CancelledError):
            waiting.cancel()
            return False
        return True

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Says that all donors are gone, if the server takes it in time, and ends the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(timeout)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            logger.exception("donor events are no longer sent")
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        while not self._is_stopping:
            try:
                is_busy = await self._turn()
            except Exception:
                logger.exception("a turn of the event publisher failed; readers are told everything anew")
                await self._lose(0)
                is_busy = False
            if not is_busy:
                await asyncio.sleep(TICK_SECONDS)
        await self._leave()

    async def _turn(self) -> bool:
        """Sends one batch; True when there is more to do at once."""
        self._repair_overflow()
        absorbed = self._outbox.absorb(BATCH)
        connection = self._connection
        if connection is None:
            self.counters.count("dropped", "disconnected", self._outbox.forget_changes())
            await self._reconnect()
            return absorbed == BATCH
        if connection.is_lost:
            await self._lose(0)
            return False
        self._resync_when_due()
        notices = self._outbox.take(BATCH)
        if self._clock() >= self._heartbeat_at:
            self._heartbeat_at = self._clock() + self._heartbeat_seconds
            notices.append(self._outbox.heartbeat(self._heartbeat_seconds))
        if notices:
            await self._send(connection, notices)
        if self._connection is not None and not len(self._outbox):
            self._release_flushed()
        return bool(len(self._outbox))

    async def _send(self, connection: Connection, notices: list[Notice]) -> None:
        try:
            too_large = await connection.send(notices)
        except Exception as error:
            logger.warning("events were not taken by NATS: %s", type(error).__name__)
            await self._lose(len(notices))
            return
        self.counters.count("dropped", "oversize", len(too_large))
        for kind, count in Counter(notice.kind for notice in notices if notice not in too_large).items():
            self.counters.count("sent", kind, count)

    def _repair_overflow(self) -> None:
        if self._overflowed:
            lost, self._overflowed = self._overflowed, 0
            self.counters.count("dropped", "overflow", lost + self._outbox.forget_changes())
            self._outbox.describe_all()
            self._resync("overflow")

    def _resync_when_due(self) -> None:
        since = self._clock() - self._resynced_at
        if self._is_asked and since >= self._heartbeat_seconds:
            self._resync("requested")
        elif self._resync_seconds and since >= self._resync_seconds:
            self._resync("interval")

    def _resync(self, reason: str) -> None:
        self._is_asked = False
        self._resynced_at = self._clock()
        self._outbox.resync()
        self.counters.count("resyncs", reason)

    async def _reconnect(self) -> None:
        """Begins an attempt when one is due, and takes the one that has ended."""
        if self._attempt is None:
            if self._loop.time() >= self._retry_at:
                self._attempt = self._loop.create_task(Connection.open(self._options, self.emitter, self._ask))
            return
        if not self._attempt.done():
            return
        attempt, self._attempt = self._attempt, None
        try:
            self._connection = attempt.result()
        except Exception as error:
            self.counters.count("connections", "failed")
            if self._retry_seconds == FIRST_RETRY_SECONDS:
                logger.warning("NATS is out of reach, donor events wait for it: %s", _told(error))
            # Workers that lost one server must not all come back to it at once.
            self._retry_at = self._loop.time() + self._retry_seconds * random.uniform(0.5, 1.0)
            self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            return
        self.counters.count("connections", "made")
        self._retry_at, self._retry_seconds = 0.0, FIRST_RETRY_SECONDS
        self._heartbeat_at = self._clock()
        self._resync("connected")

    def _ask(self) -> None:
        self._is_asked = True

    async def _lose(self, in_flight: int) -> None:
        """Gives the connection up; events that may not have arrived count as dropped."""
        self.counters.count("dropped", "disconnected", in_flight)
        connection, self._connection = self._connection, None
        self._outbox.resync()
        if connection is not None:
            await connection.close()

    async def _flushed(self) -> None:
        future = self._loop.create_future()
        self._flushing.append(future)
        await future

    def _release_flushed(self) -> None:
        waiting, self._flushing = self._flushing, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _stop(self) -> None:
        self._is_stopping = True

    async def _leave(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
            await asyncio.gather(self._attempt, return_exceptions=True)
        self.counters.count("dropped", "closed", len(self._changes))
        for future in self._flushing:
            future.cancel()
        if self._connection is not None:
            await self._send(self._connection, [self._outbox.purge()])
        if self._connection is not None:
            await self._connection.close()
        await asyncio.sleep(0)


def _told(error: Exception) -> str:
    """An error without what its text might hold of the server's address, which may name a user and a password."""
    return str(error) if isinstance(error, ConnectionLostError) else type(error).__name__
