"""EventPublisher: sends events of this worker's donors to NATS, on a thread and an event loop of its own.

The serving path only appends to a bounded queue. After a full queue or a lost server the publisher resyncs: it sends a
reset and registers every held donor again."""

from __future__ import annotations

import asyncio
import functools
import operator
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from semblend_trt.background import quiet_logger
from semblend_trt.config import EventFormat
from semblend_trt.fleet.connection import BROKEN_PROFILE, RESYNC_SUFFIX, Sender, end, follow, meant
from semblend_trt.fleet.events import KIND_NAMES, Emitter, EventError, EventWriter, Notice, donor_digest
from semblend_trt.fleet.sketch import sketch_held
from semblend_trt.metrics import counter, series_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt
    from prometheus_client import CollectorRegistry

    from semblend_trt.fleet.connection import ConnectionOptions
    from semblend_trt.fleet.sketch import Held

logger = quiet_logger(__name__)

DROP_REASONS = ("overflow", "disconnected", "oversize", "internal_error", "closed")
RESYNC_REASONS = ("connected", "overflow", "requested", "interval")
# Of each count: the name in Prometheus, the documentation, the label and its values.
_SERIES = {
    "sent": ("semblend_events", "Donor events sent.", "kind", KIND_NAMES),
    "dropped": ("semblend_events_dropped", "Changes that became no event of their own.", "reason", DROP_REASONS),
    "resyncs": ("semblend_event_resyncs", "Resyncs: times all donors were registered again.", "reason", RESYNC_REASONS),
    "connections": ("semblend_event_connections", "Connections to NATS.", "result", ("made", "failed", "id_twice")),
}
# Least tokens of a group of donors that is sketched together; a group stays in the processor's cache.
GROUP_TOKENS = 16384
MAX_CHANGES = 65536
BATCH = 512
# Most broken promises that a worker keeps, each of two digests.
MAX_BROKEN, _DIGEST_DIGITS = 4096, 64
# Seconds between two looks at the queue. Waking the thread for each change would cost the serving path more.
TICK_SECONDS = 0.02
CLOSE_SECONDS = 2.0


class EventCounters:
    """Counts of one publisher, also in Prometheus where prometheus_client is installed.

    Raises nothing. `sent` counts events by kind, once the server has answered after them. `dropped` counts changes
    without an event of their own, by reason; a resync makes up for them."""

    def __init__(self, enabled: bool = True, registry: CollectorRegistry | None = None) -> None:
        self.sent, self.dropped, self.resyncs, self.connections = (Counter[str]() for _ in _SERIES)
        self._series = _series_in(registry) if enabled else {}

    def count(self, what: str, label: str, count: int = 1) -> None:
        """Add to the counter `what` (sent, dropped, resyncs or connections) under `label`."""
        if count:
            getattr(self, what)[label] += count
            with suppress(Exception):  # there may be no series; and after a fork no folder for their files
                self._series[what].labels(label).inc(count)


@functools.lru_cache(maxsize=8)
def _series_in(registry: CollectorRegistry | None) -> dict[str, Any]:
    """Return the series in a registry, made once for all publishers; empty where they cannot be made."""

    def made(to: CollectorRegistry) -> dict[str, Any]:
        return {what: counter(to, *own, known=known) for what, (*own, known) in _SERIES.items()}

    return series_of(made, registry, "events") or {}


class _Announced(NamedTuple):
    """What readers know of a donor id; `digest` is its part of the state digest."""

    held: Held
    embedding: npt.NDArray[np.float32] | None
    tier: str
    digest: int


class Outbox:
    """Turns changes of donors into messages. The serving path writes `donors`, and appends their ids to `changes`. Each
    step of a dict or deque is atomic under the interpreter's lock, so no other lock is needed."""

    def __init__(self, writer: EventWriter, counters: EventCounters) -> None:
        self.writer, self._counters = writer, counters
        self._announced: dict[str, _Announced] = {}
        self._waiting: deque[str] = deque()
        # The next message is a reset, and registrations of all donors follow.
        self.reset_due = True
        self.donors: dict[str, Held] = {}
        self.changes: deque[str] = deque()

    def __len__(self) -> int:
        """Return the number of donors that may differ from what was announced."""
        return len(self._waiting) + len(self.changes) + self.reset_due

    def absorb(self, limit: int) -> int:
        """Sketch up to `limit` changed donors, which frees their tokens; return the number of changes."""
        changed = [self.changes.popleft() for _ in range(min(limit, len(self.changes)))]
        self._waiting.extend(changed)
        self.sketch(self.donors.get(donor_id) for donor_id in changed)
        return len(changed)

    def forget_changes(self) -> int:
        """Drop the waiting changes, since a resync will cover them; return their number."""
        count = len(self._waiting)
        self._waiting.clear()
        return count

    def take(self, limit: int) -> list[Notice]:
        """Return the next messages, at most `limit`; readers count as having received them."""
        taken: list[Notice] = []
        if self.reset_due:
            self.reset_due, self._announced = False, {}
            # list() is one step: the serving path cannot change the dict meanwhile.
            self._waiting = deque(list(self.donors))
            taken.append(self.writer.reset())
        while self._waiting and len(taken) < limit:
            if (notice := self._change_of(self._waiting.popleft())) is not None:
                taken.append(notice)
        return taken

    def heartbeat(self, interval_seconds: float) -> Notice:
        """Return a sign of life with the number and digest of the announced donors."""
        digest = functools.reduce(operator.xor, (known.digest for known in self._announced.values()), 0)
        return self.writer.heartbeat(interval_seconds, len(self._announced), digest)

    def _change_of(self, donor_id: str) -> Notice | None:
        """Return the message that brings readers up to date on a donor; None when they are."""
        held, known = self.donors.get(donor_id), self._announced.get(donor_id)
        if held is None or held.is_unfit:
            return None if self._announced.pop(donor_id, None) is None else self.writer.evicted(donor_id)
        # Tier and embedding may change at any time; the message and the note have to agree.
        tier = held.tier
        now = _Announced(held, held.embedding, tier, donor_digest(donor_id, tier))
        # Only a registration carries an embedding; one of a known donor replaces it.
        if known is not None and known.held is held and known.embedding is now.embedding:
            self._announced[donor_id] = now
            return None if known.tier == tier else self.writer.relocated(donor_id, tier)
        self.sketch([held])
        if held.is_unfit or held.namespace is None:
            return None
        donor = donor_id, held.namespace, tier, held.count, held.digest, held.sketch, now.embedding
        try:
            notice = self.writer.registered(*donor)
        except EventError as error:
            logger.warning("donor %s is not announced: %s", donor_id, error)
            held.is_unfit = True
            self._counters.count("dropped", "oversize")
            return None
        self._announced[donor_id] = now
        return notice

    def sketch(self, donors: Iterable[Held | None]) -> None:
        """Sketch the donors that still have tokens, in groups of GROUP_TOKENS tokens or a little more.
        Leave out and count one that fails, without effect on the others."""
        group: list[Held] = []
        size = 0
        for held in donors:
            if held is not None and held.tokens is not None and held.namespace is not None:
                group.append(held)
                size += held.count
            if size >= GROUP_TOKENS:
                self._sketch_group(group)
                group, size = [], 0
        if group:
            self._sketch_group(group)

    def _sketch_group(self, donors: list[Held]) -> None:
        try:
            sketch_held(donors)
        except Exception:
            if len(donors) > 1:
                for held in donors:
                    self.sketch([held])  # a donor may be among them twice
                return
            logger.exception("a donor of %d tokens cannot be sketched and is not announced", donors[0].count)
            donors[0].is_unfit, donors[0].tokens = True, None
            self._counters.count("dropped", "internal_error")


class EventPublisher:
    """Publishes until `close`. The serving path writes `donors` and calls `changed`, which never waits or raises; any
    other thread may call `flush` and `close`."""

    def __init__(
        self,
        options: ConnectionOptions,
        emitter: Emitter,
        counters: EventCounters,
        form: EventFormat = EventFormat.JSON,
        embeddings: bool = False,
        heartbeat_seconds: float = 10.0,
        resync_seconds: float = 300.0,
    ) -> None:
        self.counters, self.emitter, self.embeddings = counters, emitter, embeddings
        self._options, self._heartbeat_seconds, self._resync_seconds = options, heartbeat_seconds, resync_seconds
        self._outbox = Outbox(EventWriter(emitter, form, embeddings=embeddings), counters)
        self.donors, self._changes = self._outbox.donors, self._outbox.changes
        # Reuse profiles whose promise is broken, each with the key of the namespace; this thread alone adds to it.
        self.broken: set[tuple[str, str]] = set()
        self._sender: Sender | None = None
        self._overflowed, self._resynced_at, self._is_asked, self._is_stopping = 0, 0.0, False, False
        self._flushing: list[threading.Event] = []
        self._thread = threading.Thread(target=self._run, name="semblend-events", daemon=True)
        self._thread.start()

    def changed(self, donor_id: str) -> None:
        """Note that a donor was added to `donors`, changed or removed."""
        if len(self._changes) < MAX_CHANGES:
            self._changes.append(donor_id)
        else:
            self._overflowed += 1

    def flush(self, timeout: float) -> bool:
        """Wait until all changes have reached the server; return False after `timeout` seconds."""
        sent = threading.Event()
        self._flushing.append(sent)
        return sent.wait(timeout)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Announce that all donors are gone and end the thread; wait `timeout` seconds at most."""
        self._is_stopping = True
        self._thread.join(timeout)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            logger.exception("donor events are no longer sent")

    async def _serve(self) -> None:
        name = f"semblend-trt worker {self.emitter.worker_id}.{self.emitter.dp_rank}"
        failed = functools.partial(self.counters.count, "connections", "failed")
        following = follow(self._options, self._publish, "no donor events are sent", failed, name=name)
        sending = asyncio.create_task(following)
        while not self._is_stopping:
            is_busy = self._sender is None and self._absorb() == BATCH
            await asyncio.sleep(0 if is_busy else TICK_SECONDS)
        self.counters.count("dropped", "closed", len(self._changes))
        if self._sender is not None:
            await asyncio.wait([sending], timeout=CLOSE_SECONDS)
        await end(sending)

    def _absorb(self) -> int:
        """Sketch a batch of changed donors; without a connection, forget the changes. Return their number."""
        if self._overflowed:
            lost, self._overflowed = self._overflowed, 0
            self.counters.count("dropped", "overflow", lost + self._outbox.forget_changes())
            self._outbox.sketch(list(self.donors.values()))
            self._resync("overflow")
        absorbed = self._outbox.absorb(BATCH)
        if self._sender is None:
            self.counters.count("dropped", "disconnected", self._outbox.forget_changes())
        return absorbed

    async def _publish(self, client: Any, lost: asyncio.Event) -> bool:
        """Send over one connection until it is lost, or until the publisher ends: then return True."""
        await client.subscribe(self._options.subject + RESYNC_SUFFIX, cb=self._asked)
        self._sender, heartbeat_at = await Sender.over(client, self._options, self.emitter), 0.0
        self.counters.count("connections", "made")
        self._resync("connected")
        try:
            while not lost.is_set() and not self._is_stopping:
                self._absorb()
                now = time.monotonic()
                if self._is_asked and now - self._resynced_at >= self._heartbeat_seconds:
                    self._resync("requested")
                elif self._resync_seconds and now - self._resynced_at >= self._resync_seconds:
                    self._resync("interval")
                notices = self._outbox.take(BATCH)
                if now >= heartbeat_at:
                    heartbeat_at = now + self._heartbeat_seconds
                    notices.append(self._outbox.heartbeat(self._heartbeat_seconds))
                if notices and not await self._send(self._sender, notices):
                    break
                while self._flushing and not len(self._outbox):  # looked at in this order: others add to both
                    self._flushing.pop(0).set()
                await asyncio.sleep(0 if len(self._outbox) else TICK_SECONDS)
            return self._is_stopping and await self._send(self._sender, [self._outbox.writer.purged()])
        finally:
            self._sender = None

    async def _send(self, sender: Sender, notices: list[Notice]) -> bool:
        """Send, and count; return False for a connection that is lost."""
        try:
            too_large = await sender.send(notices)
        except Exception as error:
            logger.warning("events were not taken by NATS: %s", type(error).__name__)
            self.counters.count("dropped", "disconnected", len(notices))
            return False
        self.counters.count("dropped", "oversize", len(too_large))
        for kind, count in Counter(notice.kind for notice in notices if notice not in too_large).items():
            self.counters.count("sent", kind, count)
        return True

    def _resync(self, reason: str) -> None:
        self._is_asked, self._resynced_at = False, time.monotonic()
        self._outbox.reset_due = True
        self.counters.count("resyncs", reason)

    async def _asked(self, message: Any) -> None:
        """Take a request for a resync, or what readers and spot checks found out about this worker."""
        if (request := meant(message.data, self.emitter)) is None:
            return
        if BROKEN_PROFILE in request:
            promise: tuple[Any, Any] = request[BROKEN_PROFILE], request.get("namespace")
            is_promise = all(isinstance(each, str) and len(each) == _DIGEST_DIGITS for each in promise)
            if is_promise and promise not in self.broken and len(self.broken) < MAX_BROKEN:
                self.broken.add(promise)
                logger.error(
                    "spot checks found the promise of reuse profile %s broken in namespace %s: only exact text is "
                    "reused there until this process ends; calibrate on this traffic",
                    *promise,
                )
            return
        self._is_asked = True
        if request.get("id_twice") is True:
            self.counters.count("connections", "id_twice")
            logger.error(
                "another live process has worker id %d: no request is sent where either one holds text; "
                "set SEMBLEND_WORKER_ID to a number of its own",
                self.emitter.worker_id,
            )
