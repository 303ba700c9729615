"""EventPublisher: tells the fleet of this worker's donors, on a thread and an event loop of its own.

The serving path only appends to a bounded queue. Whatever is lost, by a full queue or a lost server, is made good by a
resync: a reset, and all that is held once more.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from semblend_trt.fleet.connection import Connection, ConnectionLostError
from semblend_trt.fleet.outbox import HeldDonors, Notice, Outbox
from semblend_trt.fleet.sketch import warm_up
from semblend_trt.fleet.wire import Emitter, EventFormat, EventWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from semblend_trt.fleet.connection import ConnectionOptions
    from semblend_trt.fleet.counters import EventCounters

logger = logging.getLogger(__name__)

MAX_CHANGES = 65536
BATCH = 512
# How long a change may wait before the thread looks, in seconds. Being woken would cost the serving path more.
TICK_SECONDS = 0.02
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 5.0
CLOSE_SECONDS = 2.0


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
        self._settling: list[asyncio.Future[None]] = []
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

    def settle(self, timeout: float) -> bool:
        """Waits until all that was noted has reached the server; False when it did not within `timeout` seconds."""
        waiting = asyncio.run_coroutine_threadsafe(self._settled(), self._loop)
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
            warm_up()
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
            self.counters.count_dropped("disconnected", self._outbox.forget_changes())
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
            self._release_settling()
        return bool(len(self._outbox))

    async def _send(self, connection: Connection, notices: list[Notice]) -> None:
        try:
            too_large = await connection.send(notices)
        except Exception as error:
            logger.warning("events were not taken by NATS: %s", type(error).__name__)
            await self._lose(len(notices))
            return
        self.counters.count_dropped("oversize", len(too_large))
        self.counters.count_sent(Counter(notice.kind for notice in notices if notice not in too_large))

    def _repair_overflow(self) -> None:
        if self._overflowed:
            lost, self._overflowed = self._overflowed, 0
            self.counters.count_dropped("overflow", lost + self._outbox.forget_changes())
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
        self.counters.count_resync(reason)

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
            self.counters.count_connection(succeeded=False)
            if self._retry_seconds == FIRST_RETRY_SECONDS:
                logger.warning("NATS is out of reach, donor events wait for it: %s", _told(error))
            # Workers that lost one server must not all come back to it at once.
            self._retry_at = self._loop.time() + self._retry_seconds * random.uniform(0.5, 1.0)
            self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            return
        self.counters.count_connection(succeeded=True)
        self._retry_at, self._retry_seconds = 0.0, FIRST_RETRY_SECONDS
        self._heartbeat_at = self._clock()
        self._resync("connected")

    def _ask(self) -> None:
        self._is_asked = True

    async def _lose(self, in_flight: int) -> None:
        """Gives the connection up; events that may not have arrived count as dropped."""
        self.counters.count_dropped("disconnected", in_flight)
        connection, self._connection = self._connection, None
        self._outbox.resync()
        if connection is not None:
            await connection.close()

    async def _settled(self) -> None:
        future = self._loop.create_future()
        self._settling.append(future)
        await future

    def _release_settling(self) -> None:
        waiting, self._settling = self._settling, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _stop(self) -> None:
        self._is_stopping = True

    async def _leave(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
            await asyncio.gather(self._attempt, return_exceptions=True)
        self.counters.count_dropped("closed", len(self._changes))
        for future in self._settling:
            future.cancel()
        if self._connection is not None:
            await self._send(self._connection, [self._outbox.purge()])
        if self._connection is not None:
            await self._connection.close()
        await asyncio.sleep(0)


def _told(error: Exception) -> str:
    """An error without what its text might hold of the server's address, which may name a user and a password."""
    return str(error) if isinstance(error, ConnectionLostError) else type(error).__name__
