"""Workers and servers that the fleet's tests share."""

import asyncio
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from semblend_trt.config import EventFormat
from semblend_trt.fleet.announcer import DonorAnnouncer
from semblend_trt.fleet.connection import ConnectionOptions, connect_client
from semblend_trt.fleet.directory import Directory
from semblend_trt.fleet.events import Emitter, EventWriter
from semblend_trt.fleet.publisher import EventCounters, EventPublisher, Outbox
from semblend_trt.fleet.sketch import Held, sketch_key
from tests.semblend_trt.samples import BASE_NAMESPACE, NAMESPACE, text

WORKER, DOCUMENT = (3, 0), text(1, 1000)


def donors_of(directory, worker):
    """Tier by donor id of what a directory knows of a worker; empty for one that it does not follow."""
    followed = directory.workers().get(worker)
    return {} if followed is None else {name: donor.tier for name, donor in list(followed.donors.items())}


class Teller:
    """A worker without a network: `messages()` are its events since the last call."""

    def __init__(self, worker, generation=7, base=BASE_NAMESPACE):
        self.worker, self.generation, self._base = worker, generation, base
        self.salts = {}
        self._begin({})

    def _begin(self, donors):
        self._outbox = outbox(self.worker, self.generation)
        self._outbox.donors |= donors

    @property
    def held(self):
        """Tier by donor id."""
        return {donor_id: held.tier for donor_id, held in self._outbox.donors.items()}

    def add(self, donor_id, tokens, salt=None):
        self._outbox.donors[donor_id] = held_donor(tokens, salt, base=self._base)
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
        self._outbox.reset_due = True

    def messages(self, heartbeat=False):
        self._outbox.absorb(1 << 20)
        payloads = [notice.payload for notice in self._outbox.take(1 << 20)]
        return [*payloads, self._outbox.heartbeat(10.0).payload] if heartbeat else payloads


def holding(*donors, worker=WORKER, **more):
    """A worker with these donors, `(id, tokens, salt ...)`, or with the document."""
    teller = Teller(worker, **more)
    for donor in donors or [("a", DOCUMENT)]:
        teller.add(*donor)
    return teller


def feed(directory, payloads):
    return [directory.observe(payload) for payload in payloads]


def fed(directory, *donors, heartbeat=False, **more):
    """A worker of which the directory has heard."""
    teller = holding(*donors, **more)
    feed(directory, teller.messages(heartbeat))
    return teller


def outbox(worker=(3, 0), generation=7):
    return Outbox(EventWriter(Emitter(*worker, generation), EventFormat.JSON), EventCounters(enabled=False))


def held_donor(tokens, salt=None, tier="device", base=BASE_NAMESPACE):
    namespace = base.for_request(salt, None)
    return Held(namespace, b"" if salt is None else sketch_key(namespace.key, salt), tier, len(tokens), tokens)


def stored(url, makes_stream=False):
    """How many messages the stream of all workers has."""

    async def count():
        async with await connect_client(ConnectionOptions((url,), "semantic-kv-events")) as client:
            jetstream = client.jetstream()
            if makes_stream:
                await jetstream.add_stream(name="DONORS", subjects=["semantic-kv-events.*"])
            return (await jetstream.stream_info("DONORS")).state.messages

    return asyncio.run(count())


class PublishingWorker:
    """A publisher with one engine, whose donors tests add and remove."""

    def __init__(self, options, worker=(3, 0), generation=7, **keywords):
        self.counters = EventCounters(enabled=False)
        settings = {"heartbeat_seconds": 0.1, "resync_seconds": 0.0} | keywords
        self.publisher = EventPublisher(options, Emitter(*worker, generation), self.counters, **settings)
        self.announcer = DonorAnnouncer(self.publisher, self.publisher.close)

    @property
    def held(self):
        """Tier by donor id."""
        return {donor_id: held.tier for donor_id, held in list(self.publisher.donors.items())}

    def add(self, donor_id, length=100):
        self.announcer.intended(donor_id, NAMESPACE, None)
        self.announcer.held(donor_id, text(len(donor_id), length), "device")

    def churn(self, rng, steps):
        for step in range(steps):
            if self.held and rng.random() < 0.4:
                self.announcer.gone(str(rng.choice(sorted(self.held))))
            elif self.held and rng.random() < 0.3:
                self.announcer.moved(str(rng.choice(sorted(self.held))), "host")
            else:
                self.add(f"donor-{step}-{rng.integers(1 << 40)}")


@pytest.fixture
def clock():
    """A clock that tests turn, by its `now`."""
    return SimpleNamespace(now=100.0)


@pytest.fixture
def directory(clock):
    return Directory(clock=lambda: clock.now)


@pytest.fixture
def make_worker(request):
    """make_worker(server, ...): a worker whose events go there; connection options and settings as keywords."""

    def make(server, **keywords):
        fields = {field.name for field in dataclasses.fields(ConnectionOptions)}
        chosen = {name: keywords.pop(name) for name in list(keywords) if name in fields}
        options = ConnectionOptions(**({"servers": (server.url,), "subject": "semantic-kv-events"} | chosen))
        worker = PublishingWorker(options, **keywords)
        request.addfinalizer(worker.publisher.close)
        return worker

    return make


def overlap(sketch, prompt):
    """The estimated share of the prompt that one donor holds, by its meaning."""
    asked = prompt.entries[prompt.levels >= sketch.level]
    return np.isin(asked, sketch.entries).sum() / max(int(prompt.eligible[sketch.level]), 1)
