"""Connections to a real nats-server: credentials, permissions, and what happens when it is killed."""

import asyncio
import contextlib
import logging
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from semblend_trt.config import EventFormat, load_settings
from semblend_trt.fleet import connection
from semblend_trt.fleet.connection import ConnectionOptions, DirectoryReader, connect_client, flush, listen
from semblend_trt.fleet.directory import Directory
from semblend_trt.fleet.events import Emitter, EventWriter
from semblend_trt.fleet.placement import Placement
from tests.pages import Page
from tests.semblend_trt.fleet.conftest import donors_of, stored
from tests.server_process import wait_for

SUBJECT = "semantic-kv-events"
WORKERS = [(3, 0), (4, 0)]
NKEY = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"
PASSWORDS = {name: f"secret-{name}" for name in ("worker-3", "worker-4", "gateway")}


@pytest.mark.parametrize("kind", ["no file", "garbage", "pipe"])
def test_without_its_credentials_nothing_is_sent(make_nats_server, make_worker, tmp_path, kind):
    creds = tmp_path / "user.creds"
    if kind == "garbage":
        creds.write_bytes(b"\xff not credentials")
    elif kind == "pipe":  # which has no writer
        os.mkfifo(creds)
    server = make_nats_server(config=f"authorization {{ users: [{{ nkey: {NKEY} }}] }}")  # asks for a signature
    worker = make_worker(server, creds=creds)
    worker.add("a")
    assert not worker.publisher.flush(0.5)
    assert worker.counters.connections["made"] == 0


@pytest.mark.promise("fleet", "A JetStream stream keeps each event...")
def test_options_hold_what_the_settings_say_and_show_no_secret(tmp_path):
    settings = load_settings(
        nats_url="nats://user:secret@one:4222, nats://two:4222", nats_token="secret", nats_creds=tmp_path / "user.creds"
    )
    options = ConnectionOptions.of(settings)
    assert options.servers == ("nats://user:secret@one:4222", "nats://two:4222")
    assert "secret" not in repr(options)
    arguments = options.client_arguments()
    assert (arguments["token"], arguments["user_credentials"]) == ("secret", str(tmp_path / "user.creds"))
    assert not arguments["allow_reconnect"]
    assert ConnectionOptions.of(load_settings()) is None


class LossyDirectory(Directory):
    """It loses the share `loss` of its messages."""

    def __init__(self):
        super().__init__()
        self.loss, self._rng, self._held_back = 0.0, np.random.default_rng(0), None

    def observe(self, payload, sender=None):
        if self._rng.random() < self.loss:
            return None
        if self._rng.random() < self.loss:  # it comes after the next one
            payload, self._held_back = self._held_back or payload, payload
        return super().observe(payload, sender)

    async def equals(self, workers):
        """Waits until the directory has what the workers hold."""

        def is_equal():
            synced = {worker for worker, followed in self.workers().items() if followed.is_synced}
            return all(worker in synced and donors_of(self, worker) == held.held for worker, held in workers.items())

        await asyncio.to_thread(wait_for, is_equal)


def reading(options, check):
    """Runs `check(directory)` while a directory reads a server's events."""

    async def run():
        directory = LossyDirectory()
        reader = DirectoryReader(options, directory)
        await reader.start()
        try:
            await check(directory)
        finally:
            await reader.stop()
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(run())


@pytest.mark.promise("fleet", "After losses and dead servers readers learn the truth from a resync")
def test_the_directory_equals_the_truth_after_kills_and_losses(nats_server, make_worker):
    workers, rng = {worker: make_worker(nats_server, worker=worker) for worker in WORKERS}, np.random.default_rng(5)

    def lives():
        for steps, change in ((40, nats_server.kill), (40, nats_server.start), (20, lambda: None)):
            for worker in workers.values():
                worker.churn(rng, steps)
                assert change == nats_server.start or worker.publisher.flush(30)
            change()

    async def check(directory):
        for _ in range(2):
            directory.loss = 0.2
            await asyncio.to_thread(lives)
            directory.loss = 0.0
            await directory.equals(workers)

    reading(ConnectionOptions((nats_server.url,), SUBJECT), check)


@pytest.mark.promise("fleet", "Two live processes of one worker...")
def test_workers_of_one_id_hear_of_each_other(nats_server, make_worker, caplog):
    workers = [make_worker(nats_server, worker=(3, 0), generation=generation) for generation in (7, 8)]

    async def run():
        placement = Placement(ConnectionOptions((nats_server.url,), SUBJECT))
        await placement.start()
        await asyncio.to_thread(wait_for, lambda: all(each.counters.connections["id_twice"] for each in workers))
        await placement.stop()

    asyncio.run(run())
    assert "another live process has worker id 3" in caplog.text
    assert "two live processes have this worker id" in caplog.text


def test_what_a_message_makes_fail_ends_nothing(caplog):
    reader = DirectoryReader(ConnectionOptions((), SUBJECT), SimpleNamespace())  # has no `observe`
    for _ in range(3):
        asyncio.run(reader._read(b"", None))
    assert caplog.messages == ["a message on the event subject could not be taken"]  # in a minute


def test_a_lost_cancellation_keeps_neither_side_from_stopping(monkeypatch, make_worker):
    connecting = threading.Event()

    async def loses_the_first_cancellation(*_, **__):
        is_first = not connecting.is_set()
        connecting.set()
        with contextlib.suppress(asyncio.CancelledError) if is_first else contextlib.nullcontext():
            await asyncio.Event().wait()
        raise OSError("the server is gone")

    monkeypatch.setattr(connection, "connect_client", loses_the_first_cancellation)
    monkeypatch.setattr(connection, "END_SECONDS", 0.01)

    async def starts_and_stops():
        reader = DirectoryReader(ConnectionOptions(("nats://127.0.0.1:1",), SUBJECT), Directory())
        await reader.start()
        await asyncio.to_thread(connecting.wait)
        await asyncio.wait_for(reader.stop(), 5)

    asyncio.run(starts_and_stops())
    connecting.clear()
    worker = make_worker(SimpleNamespace(url="nats://127.0.0.1:1"))
    connecting.wait()
    worker.publisher.close(60)
    assert not worker.publisher._thread.is_alive()


@pytest.fixture
def guarded_server(make_nats_server, monkeypatch):
    """A server with the documented accounts and permissions."""
    (block,) = (each for each in Page("docs/fleet.md").blocks() if each.startswith("accounts {"))
    for name, password in PASSWORDS.items():
        monkeypatch.setenv(f"{name.upper().replace('-', '_')}_PASSWORD", password)
    return make_nats_server(config=block)


def options_of(server, name):
    url = server.url.replace("nats://", f"nats://{name}:{PASSWORDS[name]}@")
    return ConnectionOptions(servers=(url,), subject=SUBJECT, per_worker=True)


@pytest.mark.promise("fleet", "With a subject for each worker...")
def test_the_documented_users_tell_hear_and_ask(guarded_server, make_worker):
    workers = {}
    for worker in WORKERS:
        options = options_of(guarded_server, f"worker-{worker[0]}")
        workers[worker] = make_worker(guarded_server, worker=worker, servers=options.servers, per_worker=True)
        workers[worker].add(f"donor-of-{worker[0]}")
        assert workers[worker].publisher.flush(30)  # sent before the reader listens: only a resync repeats it

    reading(options_of(guarded_server, "gateway"), lambda directory: directory.equals(workers))


@pytest.mark.promise(
    "fleet", "With a subject for each worker none can speak for another, by the documented permissions"
)
def test_a_worker_cannot_publish_under_another_workers_subject_or_name_and_reads_no_others_events(
    guarded_server, caplog
):
    caplog.set_level(logging.WARNING, "semblend_trt.fleet")

    async def check(directory):
        async def hear(message):
            heard.append(message.subject)

        heard, forger = [], await connect_client(options_of(guarded_server, "worker-4"))
        as_other, own = (EventWriter(Emitter(number, 0, 7), EventFormat.JSON) for number in (3, 4))
        for subject in (f"{SUBJECT}.*", f"{SUBJECT}.3", SUBJECT):
            await forger.subscribe(subject, cb=hear)
        await flush(forger)
        worker = await connect_client(options_of(guarded_server, "worker-3"))
        await worker.publish(f"{SUBJECT}.3", own.reset().payload)
        await flush(worker)
        await worker.close()
        # Until the reader listens: it may begin to between two of these messages.
        while not (directory.counts["reset"] and directory.counts["wrong_subject"]):
            for subject in (f"{SUBJECT}.3", SUBJECT, f"{SUBJECT}.resync", f"{SUBJECT}.3.4"):
                await forger.publish(subject, as_other.reset().payload)
            await forger.publish(f"{SUBJECT}.4", as_other.reset().payload)
            await forger.publish(f"{SUBJECT}.4", own.reset().payload)
            await forger.flush()
        await forger.close()
        assert [*directory.workers(), *heard] == [(4, 0)]
        assert set(directory.counts) <= {"reset", "refused", "wrong_subject"}

    reading(options_of(guarded_server, "gateway"), check)
    told = [each.getMessage() for each in caplog.records if "does not permit" in each.getMessage()]
    assert len(told) == 1
    assert PASSWORDS["worker-4"] not in told[0]


def test_a_flush_waits_for_the_answer_to_what_was_asked_before_it():
    """What the client asks reaches the server before the ping whose answer ends the flush."""
    asked = []

    async def answer(reader, writer):
        """A server that takes note of what a client asks, in order, and answers its pings."""
        writer.write(b'INFO {"server_id": "s", "version": "2.10.0", "max_payload": 1048576, "headers": true}\r\n')
        while line := await reader.readline():
            asked.append(line.split()[0])
            if asked[-1] == b"PING":
                writer.write(b"PONG\r\n")
        writer.close()

    async def run():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        options = ConnectionOptions((f"nats://{host}:{port}",), SUBJECT)
        async with await connect_client(options) as client:
            await listen(client, options, None, asks=False)
            seen = [*asked]
        server.close()
        return seen

    seen = asyncio.run(run())
    assert b"SUB" in seen[: len(seen) - seen[::-1].index(b"PING")]


def test_a_stream_takes_the_documented_permissions_more(make_nats_server, make_worker):
    """What docs/fleet.md says of streams: its users' further permissions, and JetStream for the account."""
    server = make_nats_server(
        config="accounts { semblend { jetstream: enabled, users = ["
        '{ user: admin, password: secret }, { user: worker-3, password: secret-worker-3, permissions: { publish: ["'
        f'{SUBJECT}.3", "$JS.API.STREAM.INFO.DONORS"], subscribe: ["{SUBJECT}.resync", "_INBOX.>"] }} }} ] }} }}'
    )
    admin = server.url.replace("nats://", "nats://admin:secret@")
    assert stored(admin, makes_stream=True) == 0
    options = options_of(server, "worker-3")
    worker = make_worker(server, servers=options.servers, per_worker=True, stream="DONORS", heartbeat_seconds=60.0)
    worker.add("a")
    assert worker.publisher.flush(30)
    assert stored(admin) >= 2
