"""The configuration of docs/fleet.md in a real nats-server: nobody can speak for another worker."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import pytest

from semblend_trt.fleet.connection import ConnectionOptions, DirectoryReader, connect_client
from semblend_trt.fleet.directory import Directory
from semblend_trt.fleet.wire import Emitter, EventFormat, EventWriter

DOCUMENT = Path(__file__).parents[3] / "docs" / "fleet.md"
SUBJECT = "semantic-kv-events"
PASSWORDS = {name: f"secret-{name}" for name in ("worker-3", "worker-4", "router")}
WORKERS = [(3, 0), (4, 0)]


@pytest.fixture
def guarded_server(make_nats_server, tmp_path, monkeypatch):
    """A server with the documented accounts and permissions."""
    (block,) = re.findall(r"```\n(accounts \{.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    config = tmp_path / "nats.conf"
    config.write_text(block)
    for name, password in PASSWORDS.items():
        monkeypatch.setenv(f"{name.upper().replace('-', '_')}_PASSWORD", password)
    return make_nats_server("-c", str(config))


def options_of(server, name: str) -> ConnectionOptions:
    url = server.url.replace("nats://", f"nats://{name}:{PASSWORDS[name]}@")
    return ConnectionOptions(servers=(url,), subject=SUBJECT, per_worker=True)


class WatchedDirectory(Directory):
    """A directory that tests can wait on."""

    def __init__(self) -> None:
        super().__init__()
        self.news = asyncio.Event()

    def observe(self, payload: bytes, sender: str | None = None):
        verdict = super().observe(payload, sender)
        self.news.set()
        return verdict

    async def until(self, condition) -> None:
        async def holds() -> None:
            while not condition():
                await self.news.wait()
                self.news.clear()

        await asyncio.wait_for(holds(), 60)


def test_the_documented_users_tell_hear_and_ask(guarded_server, make_worker) -> None:
    workers = {}
    for worker in WORKERS:
        options = options_of(guarded_server, f"worker-{worker[0]}")
        workers[worker] = make_worker(guarded_server, worker=worker, servers=options.servers, per_worker=True)
        workers[worker].add(f"donor-of-{worker[0]}")
        assert workers[worker].publisher.settle(30)  # all was told before anybody heard: only a resync tells it again

    async def reads() -> None:
        directory = WatchedDirectory()
        reader = DirectoryReader(options_of(guarded_server, "router"), directory)
        await reader.start()
        await directory.until(lambda: all(directory.donors_of(worker) == held.held for worker, held in workers.items()))
        await reader.stop()

    asyncio.run(reads())


def test_a_worker_cannot_publish_under_another_workers_subject_or_name(guarded_server, caplog) -> None:
    caplog.set_level(logging.WARNING, "semblend_trt.fleet")

    async def forges() -> None:
        directory = WatchedDirectory()
        reader = DirectoryReader(options_of(guarded_server, "router"), directory)
        await reader.start()
        forger = await connect_client(options_of(guarded_server, "worker-4"))
        as_other, own = (EventWriter(Emitter(number, 0, 7), EventFormat.JSON) for number in (3, 4))
        # Until the reader listens: it may begin to between two of these messages.
        while not (directory.counts["reset"] and directory.counts["wrong_subject"]):
            for subject in (f"{SUBJECT}.3", SUBJECT, f"{SUBJECT}.resync", f"{SUBJECT}.3.4"):
                await forger.publish(subject, as_other.reset())
            await forger.publish(f"{SUBJECT}.4", as_other.reset())
            await forger.publish(f"{SUBJECT}.4", own.reset())
            await forger.flush()
        await forger.close()
        assert [state.worker for state in directory.workers()] == [(4, 0)]
        assert directory.counts["wrong_subject"] >= 1
        assert set(directory.counts) <= {"reset", "refused", "wrong_subject"}
        await reader.stop()

    asyncio.run(forges())
    told = [each.getMessage() for each in caplog.records if "does not permit" in each.getMessage()]
    assert len(told) == 1
    assert PASSWORDS["worker-4"] not in told[0]


def test_a_worker_reads_no_other_workers_events(guarded_server) -> None:
    async def listens() -> None:
        refused = asyncio.Event()
        heard = []

        async def erred(error: Exception) -> None:
            if "permissions violation" in str(error).lower():
                refused.set()

        async def take(message) -> None:
            heard.append(message)

        spy = await connect_client(options_of(guarded_server, "worker-4"), error_cb=erred)
        await spy.subscribe(f"{SUBJECT}.*", cb=take)
        await asyncio.wait_for(refused.wait(), 60)
        worker = await connect_client(options_of(guarded_server, "worker-3"))
        await worker.publish(f"{SUBJECT}.3", EventWriter(Emitter(3, 0, 7), EventFormat.JSON).reset())
        await worker.flush()
        await spy.flush()
        for client in (worker, spy):
            await client.close()
        assert heard == []

    asyncio.run(listens())


def test_a_stream_takes_the_documented_permissions_more(make_nats_server, make_worker, tmp_path) -> None:
    """What docs/fleet.md says of streams: its users' further permissions, and JetStream for the account."""
    config = tmp_path / "nats.conf"
    config.write_text(
        "accounts { semblend { jetstream: enabled, users = ["
        '{ user: admin, password: secret }, { user: worker-3, password: secret-worker-3, permissions: { publish: ["'
        f'{SUBJECT}.3", "$JS.API.STREAM.INFO.DONORS"], subscribe: ["{SUBJECT}.resync", "_INBOX.>"] }} }} ] }} }}'
    )
    server = make_nats_server("-c", str(config))
    admin = server.url.replace("nats://", "nats://admin:secret@")

    async def messages(make: bool) -> int:
        client = await connect_client(ConnectionOptions((admin,), SUBJECT))
        jetstream = client.jetstream()
        if make:
            await jetstream.add_stream(name="DONORS", subjects=[f"{SUBJECT}.*"])
        count = (await jetstream.stream_info("DONORS")).state.messages
        await client.close()
        return count

    assert asyncio.run(messages(True)) == 0
    options = options_of(server, "worker-3")
    worker = make_worker(server, servers=options.servers, per_worker=True, stream="DONORS", heartbeat_seconds=60.0)
    worker.add("a")
    assert worker.publisher.settle(30)
    assert asyncio.run(messages(False)) >= 2
