"""The reader against a real nats-server: the directory ends up with what the workers hold, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest

from semblend_trt.fleet import connection
from semblend_trt.fleet.announcer import generation
from semblend_trt.fleet.connection import ConnectionOptions, DirectoryReader
from semblend_trt.fleet.directory import Directory
from semblend_trt.fleet.wire import Emitter, EventFormat, EventWriter

WORKERS = [(3, 0), (4, 0)]
SUBJECT = "semantic-kv-events"


class WatchedDirectory(Directory):
    """A directory that tests can wait on, and that loses a share of its messages until it is told not to."""

    def __init__(self, loss: float = 0.0, **keywords: Any) -> None:
        super().__init__(**({"resync_seconds": 0.3} | keywords))
        self.news, self.loss, self._rng = asyncio.Event(), loss, np.random.default_rng(0)
        self._held_back: bytes | None = None

    def observe(self, payload: bytes, sender: str | None = None):
        self.news.set()
        if self._rng.random() < self.loss:
            return None
        if self._rng.random() < self.loss:  # it comes after the next one
            payload, self._held_back = self._held_back or payload, payload
        return super().observe(payload, sender)

    async def until(self, condition) -> None:
        async def holds() -> None:
            while not condition():
                await self.news.wait()
                self.news.clear()

        await asyncio.wait_for(holds(), 60)

    def equals(self, workers) -> bool:
        synced = {state.worker for state in self.workers() if state.is_synced}
        return all(worker in synced and self.donors_of(worker) == held.held for worker, held in workers.items())


@pytest.fixture
def make_workers(make_worker):
    return lambda server: {worker: make_worker(server, worker=worker) for worker in WORKERS}


def reading(server, check, **options) -> None:
    """Runs `check(directory, reader)` while a directory reads the server's events."""

    async def run() -> None:
        directory = WatchedDirectory(options.pop("loss", 0.0), **options.pop("directory", {}))
        reader = DirectoryReader(ConnectionOptions(servers=(server.url,), subject=SUBJECT, **options), directory)
        await reader.start()
        try:
            await check(directory, reader)
        finally:
            await reader.stop()
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(run())


def test_what_was_told_before_it_began_to_read_is_learnt(nats_server, make_workers) -> None:
    workers = make_workers(nats_server)
    for worker in workers.values():
        worker.churn(np.random.default_rng(1), 30)
        assert worker.publisher.settle(30)

    async def check(directory, reader) -> None:
        await directory.until(lambda: directory.equals(workers))
        workers[WORKERS[0]].news.close()
        await directory.until(lambda: directory.donors_of(WORKERS[0]) == {})

    reading(nats_server, check)


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_the_directory_equals_the_truth_after_kills_and_losses(nats_server, make_workers, loss) -> None:
    workers, rng = make_workers(nats_server), np.random.default_rng(5)

    async def check(directory, reader) -> None:
        for _ in range(2):
            directory.loss = loss
            for worker in workers.values():
                worker.churn(rng, 40)
                assert await asyncio.to_thread(worker.publisher.settle, 30)
            await asyncio.to_thread(nats_server.kill)
            for worker in workers.values():
                worker.churn(rng, 40)
            await asyncio.to_thread(nats_server.start)
            for worker in workers.values():
                worker.churn(rng, 20)
                assert await asyncio.to_thread(worker.publisher.settle, 30)
            directory.loss = 0.0
            await directory.until(lambda: directory.equals(workers))
        assert reader.connections >= 3

    reading(nats_server, check, loss=loss)


@pytest.mark.parametrize(("skew_s", "counted"), [(-3600, "stale"), (2 * 86_400, "future_generation")])
def test_a_worker_that_comes_back_with_a_wrong_clock_is_learnt(
    nats_server, relay, make_worker, skew_s, counted
) -> None:
    dead = make_worker(relay, worker=WORKERS[0], generation=generation())
    dead.add("dead")

    async def check(directory, reader) -> None:
        await directory.until(lambda: directory.equals({WORKERS[0]: dead}))
        await asyncio.to_thread(relay.end)  # it cannot even say that its donors are gone
        back = make_worker(nats_server, worker=WORKERS[0], generation=generation() + skew_s * 1_000_000)
        back.add("back")
        await directory.until(lambda: directory.equals({WORKERS[0]: back}))
        assert directory.counts[counted] > 0
        assert directory.counts["expired"] == 1

    reading(nats_server, check)


def test_forged_donors_are_forgotten_by_the_workers_own_heartbeats(nats_server, make_worker, make_reader) -> None:
    """The directory's clock stands still, so that no silence ends what was forged."""
    worker, forger = make_worker(nats_server, worker=WORKERS[0]), make_reader(nats_server.url)
    worker.add("a")
    writer = EventWriter(Emitter(*WORKERS[0], generation()), EventFormat.JSON)

    async def check(directory, reader) -> None:
        await directory.until(lambda: directory.equals({WORKERS[0]: worker}))
        for payload in (writer.reset(), writer.heartbeat(86400.0, 0, 0)):
            await asyncio.to_thread(forger.publish, payload)
        await directory.until(lambda: directory.counts["stale"])
        await directory.until(lambda: directory.equals({WORKERS[0]: worker}))

    reading(nats_server, check, directory={"clock": lambda: 0.0, "resync_seconds": 0.0})


def test_garbage_on_the_subject_is_counted_and_nothing_more(nats_server, make_workers, make_reader) -> None:
    workers = make_workers(nats_server)
    stranger = make_reader(nats_server.url)

    async def check(directory, reader) -> None:
        workers[WORKERS[0]].add("a")
        await directory.until(lambda: directory.equals(workers))
        for payload in (b"", b"{", b"\xc1" * 100, b"x" * 100_000, b'{"schema_version":2}'):
            await asyncio.to_thread(stranger.publish, payload)
        await directory.until(lambda: directory.equals(workers) and directory.counts["version"])
        assert directory.counts["oversize"] == 1
        assert directory.counts["malformed"] == 3
        assert reader.failures == 0

    reading(nats_server, check)


def test_a_server_that_is_not_there_yet_is_waited_for(make_nats_server, make_workers) -> None:
    server = make_nats_server()
    server.kill()
    workers = make_workers(server)
    workers[WORKERS[1]].add("a")

    async def check(directory, reader) -> None:
        await asyncio.to_thread(server.start)
        await directory.until(lambda: directory.equals(workers))

    reading(server, check)


def test_what_a_message_makes_fail_ends_nothing(nats_server, make_worker, caplog) -> None:
    async def check(directory, reader) -> None:
        def fails(*_: object) -> None:
            directory.news.set()
            raise RuntimeError("a message that cannot be taken")

        observe, directory.observe = directory.observe, fails
        worker = make_worker(nats_server, worker=WORKERS[0])
        for number in range(3):
            worker.add(f"donor-{number}")
        await directory.until(lambda: reader.failures >= 4)
        directory.observe = observe
        worker.add("last")
        await directory.until(lambda: directory.equals({WORKERS[0]: worker}))

    reading(nats_server, check)
    assert [record.message for record in caplog.records if "could not be taken" in record.message] == [
        "a message on the event subject could not be taken"
    ]


def test_a_lost_cancellation_does_not_keep_it_from_stopping(monkeypatch) -> None:
    connecting = asyncio.Event()

    async def loses_the_first_cancellation(*_, **__):
        is_first = not connecting.is_set()
        connecting.set()
        with contextlib.suppress(asyncio.CancelledError) if is_first else contextlib.nullcontext():
            await asyncio.Event().wait()
        raise OSError("the server is gone")

    monkeypatch.setattr(connection, "connect_client", loses_the_first_cancellation)
    monkeypatch.setattr(connection, "END_SECONDS", 0.01)

    async def starts_and_stops() -> None:
        reader = DirectoryReader(ConnectionOptions(("nats://127.0.0.1:1",), SUBJECT), Directory())
        await reader.start()
        await connecting.wait()
        await asyncio.wait_for(reader.stop(), 5)

    asyncio.run(starts_and_stops())
