"""Workers and servers that the fleet's tests share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading

import numpy as np
import pytest

from semblend_trt.config import EventFormat
from semblend_trt.fleet.announcer import DonorAnnouncer
from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.publisher import EventCounters, EventPublisher, Held, Outbox
from semblend_trt.fleet.sketch import sketch_key
from semblend_trt.fleet.wire import Emitter, EventWriter
from semblend_trt.model_tokenizer import load_tokenizer
from tests.semblend_trt.samples import BASE_NAMESPACE, NAMESPACE, text


@pytest.fixture(scope="session")
def tokenizer(tiny_qwen2_path):
    return load_tokenizer(str(tiny_qwen2_path))


class Teller:
    """A worker without a network: `messages()` are its events since the last call."""

    def __init__(self, worker, generation=7):
        self.worker, self.generation = worker, generation
        self.salts: dict[str, str | None] = {}
        self._begin({})

    def _begin(self, donors):
        self._outbox = outbox(self.worker, self.generation)
        self._outbox.donors |= donors

    @property
    def held(self):
        """Tier by donor id."""
        return {donor_id: held.tier for donor_id, held in self._outbox.donors.items()}

    def add(self, donor_id, tokens, salt=None):
        self._outbox.donors[donor_id] = held_donor(tokens, salt)
        self.salts[donor_id] = salt
        self._outbox.changes.append(donor_id)

    def move(self, donor_id):
        if donor_id in self._outbox.donors:
            self._outbox.donors[donor_id].tier = "host"
            self._outbox.changes.append(donor_id)

    def remove(self, donor_id):
        if self._outbox.donors.pop(donor_id, None) is not None:
            del self.salts[donor_id]
            self._outbox.changes.append(donor_id)

    def restart(self):
        """The process ends and comes back with the donors that it kept."""
        self.generation += 1000
        self._begin(self._outbox.donors)

    def resync(self):
        self._outbox.resync()

    def messages(self, heartbeat=False):
        self._outbox.absorb(1 << 20)
        payloads = [notice.payload for notice in self._outbox.take(1 << 20)]
        return [*payloads, self._outbox.heartbeat(10.0).payload] if heartbeat else payloads


def outbox(worker=(3, 0), generation=7):
    return Outbox(EventWriter(Emitter(*worker, generation), EventFormat.JSON), EventCounters(enabled=False))


def held_donor(tokens, salt=None, tier="device"):
    namespace = BASE_NAMESPACE.for_request(salt, None)
    return Held(namespace, b"" if salt is None else sketch_key(namespace.key, salt), tier, len(tokens), tokens)


class PublishingWorker:
    """A publisher with one engine, whose donors tests add and remove."""

    def __init__(self, options, worker=(3, 0), generation=7, **keywords):
        self.counters = EventCounters(enabled=False)
        settings = {"heartbeat_seconds": 0.1, "resync_seconds": 0.0} | keywords
        self.publisher = EventPublisher(options, Emitter(*worker, generation), self.counters, **settings)
        self.announcer = DonorAnnouncer(self.publisher, self.publisher.close)
        self.held: dict[str, str] = {}

    def add(self, donor_id, length=100):
        self.announcer.intended(donor_id, NAMESPACE, None)
        self.announcer.held(donor_id, text(len(donor_id), length), "device")
        self.held[donor_id] = "device"

    def move(self, donor_id):
        self.announcer.moved(donor_id, "host")
        self.held[donor_id] = "host"

    def remove(self, donor_id):
        self.announcer.gone(donor_id)
        del self.held[donor_id]

    def churn(self, rng, steps):
        for step in range(steps):
            if self.held and rng.random() < 0.4:
                self.remove(str(rng.choice(sorted(self.held))))
            elif self.held and rng.random() < 0.3:
                self.move(str(rng.choice(sorted(self.held))))
            else:
                self.add(f"donor-{step}-{rng.integers(1 << 40)}")


class Relay:
    """A proxy between workers and a server, on a thread of its own, that can hold back a stream's acknowledgements.

    `repeats` counts acknowledgements passed on which say that the stream had the message already.
    """

    def __init__(self, server):
        self.repeats = self.kept = 0
        self._server_port, self._pass, self._keep, self._is_to_cut = server.port, 0, 0, False
        self._changed = threading.Condition()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._listener = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def keep(self, count, after=0, is_to_cut=False):
        """Passes the next `after` acknowledgements, keeps `count`, and then cuts all connections if `is_to_cut`."""
        self._pass, self._keep, self._is_to_cut = after, count, is_to_cut

    def wait_for_kept(self, count, timeout=30):
        """Waits until `count` acknowledgements were kept in all; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.kept >= count, timeout)

    def end(self):
        """Cuts all connections and takes no more."""
        self._do(self._end())

    def close(self):
        self.end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader, writer):
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._writers |= {writer, server_writer}
        await asyncio.gather(self._ask(reader, server_writer), self._answer(server_reader, writer))

    async def _ask(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def _answer(self, reader, writer):
        """Passes on the server's messages one by one, without those to keep."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                verb, *words = line.split()
                body = await reader.readexactly(int(words[-1]) + 2) if verb == b"MSG" else b""
                if not self._keeps(body):
                    writer.write(line + body)
        writer.close()

    def _keeps(self, body):
        answer = json.loads(body) if body.startswith(b"{") else {}
        if "seq" not in answer:
            return False
        if self._pass or not self._keep:
            self._pass = max(0, self._pass - 1)
            self.repeats += bool(answer.get("duplicate"))
            return False
        self._keep -= 1
        if not self._keep and self._is_to_cut:
            self._cut()
        with self._changed:
            self.kept += 1
            self._changed.notify_all()
        return True

    def _cut(self):
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _end(self):
        self._listener.close()
        self._cut()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*serving, return_exceptions=True)

    def _do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


@pytest.fixture
def relay(nats_server):
    """A relay before `nats_server`; workers connect to it instead of the server."""
    made = Relay(nats_server)
    yield made
    made.close()


@pytest.fixture
def make_worker():
    """make_worker(server, ...): a worker whose events go there; connection options and settings as keywords."""
    workers: list[PublishingWorker] = []

    def make(server, **keywords):
        fields = {field.name for field in dataclasses.fields(ConnectionOptions)}
        chosen = {name: keywords.pop(name) for name in list(keywords) if name in fields}
        options = ConnectionOptions(**({"servers": (server.url,), "subject": "semantic-kv-events"} | chosen))
        workers.append(PublishingWorker(options, **keywords))
        return workers[-1]

    yield make
    for worker in workers:
        worker.publisher.close()


def overlap(sketch, prompt):
    """The estimated share of the prompt that one donor holds, by its meaning."""
    asked = prompt.entries[prompt.levels >= sketch.level]
    return np.isin(asked, sketch.entries).sum() / max(int(prompt.eligible[sketch.level]), 1)
