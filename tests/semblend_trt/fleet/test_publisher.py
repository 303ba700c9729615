"""The publisher: readers end up with what is held, by the fewest events, whatever is killed in between."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as Series

from semblend_trt.fleet import connection
from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.publisher import DROP_REASONS, PORTION_TOKENS, EventCounters, Held, HeldDonors, Outbox
from semblend_trt.fleet.sketch import sketch_key, sketch_of
from semblend_trt.fleet.wire import Emitter, EventFormat, EventWriter, decode, token_digest
from tests.semblend_trt.conftest import WatchedDirectory
from tests.semblend_trt.fleet.conftest import NAMESPACE

STREAM = (3, 0)


def known(directory: WatchedDirectory) -> dict[str, str]:
    return directory.donors_of(STREAM)


def converges(reader: Any, worker: Any) -> bool:
    return reader.wait_for(lambda reader: reader.directory.is_synced(STREAM) and known(reader.directory) == worker.held)


@pytest.mark.known_defect(31)
@pytest.mark.parametrize("form", EventFormat)
@pytest.mark.parametrize("stream", [None, "DONORS"])
def test_a_donors_life_is_told(nats_server, make_reader, make_worker, form, stream) -> None:
    reader = make_reader(nats_server.url)
    worker = make_worker(nats_server, form=form, stream=stream)
    for step in (
        lambda: worker.add("a"),
        lambda: worker.move("a"),
        lambda: worker.add("b"),
        lambda: worker.remove("a"),
    ):
        step()
        assert worker.publisher.flush(30)
    assert converges(reader, worker)
    kinds = [kind for kind in reader.kinds() if kind != "provider_heartbeat"]
    assert kinds == [
        "provider_generation_reset",
        "donor_registered",
        "donor_relocated",
        "donor_registered",
        "donor_evicted",
    ]
    events = [decode(payload) for payload in reader.payloads]
    assert [event.event_id for event in events] == list(range(1, len(events) + 1))
    assert {event.generation for event in events} == {7}
    worker.news.close()
    assert reader.wait_for(lambda reader: known(reader.directory) == {})
    assert reader.kinds()[-1] == "donors_purged"
    assert not reader.directory.problems


def test_heartbeats_say_what_is_held(nats_server, make_reader, make_worker) -> None:
    reader = make_reader(nats_server.url)
    worker = make_worker(nats_server)
    for count in range(5):
        worker.add(f"donor-{count}")
    worker.move("donor-2")
    assert reader.wait_for(lambda reader: len(known(reader.directory)) == 5 and reader.directory.compared(STREAM) > 2)
    assert not reader.directory.problems


@pytest.mark.known_defect(31)
@pytest.mark.parametrize("stream", [None, "DONORS"])
def test_readers_converge_after_the_server_was_killed(nats_server, make_reader, make_worker, stream) -> None:
    rng = np.random.default_rng(5)
    reader = make_reader(nats_server.url)
    worker = make_worker(nats_server, stream=stream)
    for _ in range(2):
        worker.churn(rng, 60)
        assert worker.publisher.flush(30)
        nats_server.kill()
        worker.churn(rng, 60)
        nats_server.start()
        worker.churn(rng, 20)
        assert converges(reader, worker)
    assert worker.counters.connections["made"] >= 3
    assert worker.counters.resyncs["connected"] == worker.counters.connections["made"]


def test_a_server_that_comes_late_hears_everything(make_nats_server, make_reader, make_worker) -> None:
    server = make_nats_server()
    server.kill()
    worker = make_worker(server)
    worker.churn(np.random.default_rng(1), 50)
    server.start()
    assert converges(make_reader(server.url), worker)


def test_a_late_reader_asks_and_is_told(nats_server, make_reader, make_worker) -> None:
    worker = make_worker(nats_server)
    worker.churn(np.random.default_rng(2), 50)
    assert worker.publisher.flush(30)
    reader = make_reader(nats_server.url)
    reader.ask()
    assert converges(reader, worker)
    assert worker.counters.resyncs["requested"] >= 1


def test_a_reader_that_cannot_ask_is_told_in_time(nats_server, make_reader, make_worker) -> None:
    worker = make_worker(nats_server, resync_seconds=0.2)
    worker.add("a")
    assert worker.publisher.flush(30)
    assert converges(make_reader(nats_server.url), worker)
    assert worker.counters.resyncs["interval"] >= 1


def test_an_overflow_is_counted_and_made_good(nats_server, make_reader, make_worker) -> None:
    reader = make_reader(nats_server.url)
    worker = make_worker(nats_server, max_changes=8)
    assert worker.publisher.flush(30)
    held = threading.Event()
    worker.publisher._loop.call_soon_threadsafe(held.wait)  # the thread is busy while changes come
    for number in range(40):
        worker.add(f"donor-{number}")
    worker.remove("donor-3")
    held.set()
    assert converges(reader, worker)
    assert worker.counters.dropped["overflow"] >= 33
    assert worker.counters.resyncs["overflow"] == 1


def test_changes_that_nobody_saw_in_between_become_one_event_or_none(nats_server, make_reader, make_worker) -> None:
    reader = make_reader(nats_server.url)
    worker = make_worker(nats_server)
    assert worker.publisher.flush(30)
    held = threading.Event()
    worker.publisher._loop.call_soon_threadsafe(held.wait)
    worker.add("short-lived")
    worker.remove("short-lived")
    worker.add("moved")
    worker.move("moved")
    held.set()
    assert worker.publisher.flush(30)
    assert converges(reader, worker)
    kinds = [kind for kind in reader.kinds() if kind != "provider_heartbeat"]
    assert kinds == ["provider_generation_reset", "donor_registered"]


def test_what_is_too_large_for_the_server_counts_as_dropped_alone(make_nats_server, make_worker, tmp_path) -> None:
    (tmp_path / "small.conf").write_text("max_payload: 2048")
    worker = make_worker(make_nats_server("-c", str(tmp_path / "small.conf")), heartbeat_seconds=3600.0)
    assert worker.publisher.flush(30)
    worker.add("large", length=4000)
    assert worker.publisher.flush(30)
    assert worker.counters.dropped == {"oversize": 1}
    assert worker.counters.sent == {"provider_generation_reset": 1, "provider_heartbeat": 1}


def test_garbage_on_the_subjects_changes_nothing(nats_server, make_reader, make_worker) -> None:
    reader = make_reader(nats_server.url)
    worker = make_worker(nats_server)
    worker.add("a")
    assert converges(reader, worker)
    rng = np.random.default_rng(3)
    for length in (0, 1, 100, 70_000):
        reader.publish(rng.bytes(length))
        reader.publish(rng.bytes(min(length, 2000)), "semantic-kv-events.resync")
    reader.publish(b'{"worker_id": 99}', "semantic-kv-events.resync")
    worker.add("b")
    assert converges(reader, worker)
    assert reader.wait_for(lambda reader: sum(reader.directory.problems.values()) == 4)
    assert set(reader.directory.problems) == {"malformed", "oversize"}


@pytest.mark.known_defect(31)
def test_a_restarted_worker_replaces_what_it_held(nats_server, make_reader, make_worker) -> None:
    reader = make_reader(nats_server.url)
    first = make_worker(nats_server, generation=7)
    first.add("old")
    assert converges(reader, first)
    second = make_worker(nats_server, generation=8)
    second.add("new")
    assert converges(reader, second)


def stored(server: Any) -> list[Any]:
    """All messages of the stream, in its order."""
    import nats

    async def read() -> list[Any]:
        client = await nats.connect(server.url)
        jetstream = client.jetstream()
        count = (await jetstream.stream_info("DONORS")).state.messages
        subscription = await jetstream.subscribe("semantic-kv-events", ordered_consumer=True)
        messages = [await subscription.next_msg(timeout=30) for _ in range(count)]
        await client.close()
        return messages

    return asyncio.run(read())


def read_back(server: Any, count: int) -> WatchedDirectory:
    """A directory to which the whole stream of `count` messages was told; the stream has each event once."""
    messages, directory = stored(server), WatchedDirectory()
    for message in messages:
        directory.observe(message.data)
    assert len(messages) == count
    ids = [decode(message.data).event_id for message in messages]
    assert ids == list(range(1, len(ids) + 1))
    assert [message.headers["Nats-Msg-Id"] for message in messages] == [f"3.0.7.{event_id}" for event_id in ids]
    assert not directory.problems
    return directory


@pytest.fixture
def worker_of_a_stream(relay, make_worker):
    """A worker behind the relay whose stream has its reset and its first heartbeat."""
    worker = make_worker(relay, stream="DONORS", heartbeat_seconds=3600.0)
    assert worker.publisher.flush(30)
    return worker


def add_at_once(worker: Any, count: int) -> None:
    """Adds donors of which one batch will tell."""
    held = threading.Event()
    worker.publisher._loop.call_soon_threadsafe(held.wait)
    for number in range(count):
        worker.add(f"donor-{number}")
    held.set()


def test_a_stream_keeps_each_event_once(nats_server, worker_of_a_stream) -> None:
    for number in range(20):
        worker_of_a_stream.add(f"donor-{number}")
    assert worker_of_a_stream.publisher.flush(30)
    assert known(read_back(nats_server, 22)) == worker_of_a_stream.held


@pytest.mark.parametrize("lost", [1, 20])
def test_what_was_not_acknowledged_is_sent_again_and_kept_once(
    nats_server, relay, worker_of_a_stream, make_reader, monkeypatch, lost
) -> None:
    worker, counters = worker_of_a_stream, worker_of_a_stream.counters
    reader = make_reader(nats_server.url)
    relay.keep(lost, after=20 - lost)
    with monkeypatch.context() as patch:
        patch.setattr(connection, "ANSWER_SECONDS", 0.5)
        add_at_once(worker, 20)
        assert relay.wait_for_kept(lost)
    assert worker.publisher.flush(30)
    assert relay.repeats == lost
    assert (counters.connections["made"], counters.sent["donor_registered"]) == (1, 20)
    assert not counters.dropped
    assert known(read_back(nats_server, 22)) == worker.held
    # Readers of the subject alone get both, and count the second.
    assert reader.wait_for(lambda reader: reader.directory.problems == {"duplicate": lost})
    assert known(reader.directory) == worker.held


def test_a_connection_cut_before_it_acknowledged_is_made_good_under_other_ids(
    nats_server, relay, worker_of_a_stream, monkeypatch
) -> None:
    worker, counters = worker_of_a_stream, worker_of_a_stream.counters
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 3600.0)  # nobody waits for answers of a connection that is cut
    relay.keep(20, is_to_cut=True)
    add_at_once(worker, 20)
    assert relay.wait_for_kept(20)
    assert worker.publisher.flush(30)
    assert counters.dropped == {"disconnected": 20}
    assert (counters.connections["made"], counters.resyncs["connected"]) == (2, 2)
    assert counters.sent["donor_registered"] == 20
    assert relay.repeats == 0
    directory = read_back(nats_server, 44)
    assert directory.state(STREAM).events["provider_generation_reset"] == 2
    assert directory.is_synced(STREAM)
    assert known(directory) == worker.held


@pytest.mark.parametrize("token", ["wrong", None])
def test_without_the_right_token_nothing_is_sent(make_nats_server, make_worker, token, caplog) -> None:
    server = make_nats_server("--auth", "right-secret")
    worker = make_worker(server, token=token)
    worker.add("a")
    assert not worker.publisher.flush(0.5)
    assert worker.counters.connections["made"] == 0
    assert "right-secret" not in caplog.text


def test_the_right_token_opens(make_nats_server, make_reader, make_worker) -> None:
    server = make_nats_server("--auth", "right-secret")
    reader = make_reader(server.url, token="right-secret")
    worker = make_worker(server, token="right-secret")
    worker.add("a")
    assert converges(reader, worker)


def test_serving_never_sees_a_dead_server(make_nats_server, make_worker) -> None:
    server = make_nats_server()
    server.kill()
    worker = make_worker(server)
    worker.churn(np.random.default_rng(4), 300)
    worker.news.close()
    worker.add("after the end")
    worker.publisher.close(60)
    assert not worker.publisher._thread.is_alive()


def test_tls_with_certificates_of_both_sides(make_nats_server, make_reader, make_worker, tmp_path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("skipped: openssl is not installed")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    new = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run([*new, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    both = ["--tlscert", str(certificate), "--tlskey", str(key), "--tlscacert", str(certificate)]
    server = make_nats_server("--tls", "--tlsverify", *both)
    files = {"tls_ca": certificate, "tls_cert": certificate, "tls_key": key}
    options = ConnectionOptions(servers=(server.url,), subject="semantic-kv-events", **files)
    reader = make_reader(server.url, tls=options.tls_context())
    worker, stranger = make_worker(server, **files), make_worker(server, tls_ca=certificate, generation=8)
    worker.add("a")
    assert converges(reader, worker)
    assert not stranger.publisher.flush(0.5)
    assert stranger.counters.connections["made"] == 0


TOKENS = np.arange(64, dtype=np.int32)
NAMES = st.sampled_from([f"donor-{number}" for number in range(6)])


def donor(tier: str = "device", tokens=TOKENS) -> Held:
    return Held(NAMESPACE, b"", tier, len(tokens), tokens)


def outbox() -> Outbox:
    return Outbox(EventWriter(Emitter(3, 0, 7), EventFormat.JSON), EventCounters(enabled=False))


def announced(box: Outbox) -> dict[str, str]:
    """What a reader that followed knows: tier by donor id."""
    return {donor_id: told.tier for donor_id, told in box._told.items()}


class Telling(RuleBasedStateMachine):
    """Two libraries change, messages are taken in any portions, and some are lost together with the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = outbox()
        self.libraries = [HeldDonors(), HeldDonors()]
        for library in self.libraries:
            self.outbox.add(library)
        self.reader = WatchedDirectory()

    def _note(self, which: int, name: str) -> None:
        self.outbox.changes.append((self.libraries[which], f"{which}-{name}"))

    @rule(which=st.integers(0, 1), name=NAMES, tier=st.sampled_from(["device", "host"]))
    def hold(self, which, name, tier):
        self.libraries[which].donors[f"{which}-{name}"] = donor(tier)
        self._note(which, name)

    @rule(which=st.integers(0, 1), name=NAMES, tier=st.sampled_from(["device", "host"]))
    def move(self, which, name, tier):
        held = self.libraries[which].donors.get(f"{which}-{name}")
        if held is not None:
            held.tier = tier
            self._note(which, name)

    @rule(which=st.integers(0, 1), name=NAMES)
    def drop(self, which, name):
        if self.libraries[which].donors.pop(f"{which}-{name}", None):
            self._note(which, name)

    @rule(limit=st.integers(0, 5))
    def absorb(self, limit):
        self.outbox.absorb(limit)

    @rule(limit=st.integers(0, 5))
    def deliver(self, limit):
        for notice in self.outbox.take(limit):
            self.reader.observe(notice.payload)

    @rule(limit=st.integers(0, 5))
    def lose(self, limit):
        self.outbox.take(limit)
        self.outbox.forget_changes()
        self.outbox.resync()

    @rule()
    def overflow(self):
        self.outbox.changes.clear()
        self.outbox.forget_changes()
        self.outbox.describe_all()
        self.outbox.resync()

    @rule(which=st.integers(0, 1))
    def replace_library(self, which):
        self.outbox.remove(self.libraries[which])
        self.libraries[which] = HeldDonors()
        self.outbox.add(self.libraries[which])

    @rule()
    def settle(self):
        self.outbox.absorb(1000)
        while len(self.outbox):
            self.deliver(7)
        self.reader.observe(self.outbox.heartbeat(1.0).payload)
        truth = {name: held.tier for library in self.libraries for name, held in library.donors.items()}
        assert self.reader.is_synced((3, 0))
        assert self.reader.donors_of((3, 0)) == truth == announced(self.outbox)
        assert set(self.reader.problems) <= {"gap"}

    @invariant()
    def described_donors_have_let_their_tokens_go(self):
        for library in self.libraries:
            for name, held in library.donors.items():
                assert name not in announced(self.outbox) or held.tokens is None or held.tokens is TOKENS

    def teardown(self):
        self.settle()


TestTelling = Telling.TestCase
TestTelling.settings = hypothesis_settings(max_examples=40, stateful_step_count=40)


def test_a_donor_that_cannot_be_described_costs_only_itself() -> None:
    box, library = outbox(), HeldDonors()
    box.add(library)
    library.donors["bad"] = donor(tokens=np.array(["token"] * 64))
    library.donors["good"] = donor()
    box.changes.extend([(library, "bad"), (library, "good"), (library, "good")])
    box.absorb(10)
    assert [notice.kind for notice in box.take(10)] == ["provider_generation_reset", "donor_registered"]
    assert list(announced(box)) == ["good"]


def test_donors_are_described_together_as_each_by_itself() -> None:
    box, library, rng = outbox(), HeldDonors(), np.random.default_rng(3)
    box.add(library)
    texts = [rng.integers(0, 150_000, length, dtype=np.int32) for length in (0, 31, PORTION_TOKENS, 400, 800, 5)]
    texts.append(texts[4][::2])
    salts = [None, "one", None, "two", None, "one", "one"]
    for number, (tokens, salt) in enumerate(zip(texts, salts, strict=True)):
        key = b"" if salt is None else sketch_key(NAMESPACE.key, salt)
        library.donors[str(number)] = Held(NAMESPACE, key, "host", len(tokens), tokens)
        # Noted twice, as a donor that comes and is moved.
        box.changes.extend([(library, str(number))] * 2)
    assert box.absorb(20) == 14
    for tokens, salt, held in zip(texts, salts, library.donors.values(), strict=True):
        assert held.tokens is None
        assert held.sketch == sketch_of(tokens, sketch_key(NAMESPACE.key, salt)).to_bytes()
        assert held.digest == token_digest(tokens, held.salted_key)


def test_a_donor_of_the_same_id_replaces_the_other() -> None:
    box, library = outbox(), HeldDonors()
    box.add(library)
    library.donors["a"] = donor()
    box.take(10)
    library.donors["a"] = donor()
    box.changes.append((library, "a"))
    box.absorb(10)
    assert [notice.kind for notice in box.take(10)] == ["donor_registered"]
    box.changes.append((library, "a"))
    box.absorb(10)
    assert box.take(10) == []


def test_the_last_word_says_that_nothing_is_held() -> None:
    box, library, reader = outbox(), HeldDonors(), WatchedDirectory()
    box.add(library)
    library.donors["a"] = donor()
    for notice in [*box.take(10), box.purge(), box.heartbeat(1.0)]:
        reader.observe(notice.payload)
    assert reader.compared((3, 0)) == 1
    assert reader.donors_of((3, 0)) == {}
    assert not reader.problems


def test_an_embedding_that_comes_later_is_told_by_one_more_registration() -> None:
    box, library = outbox(), HeldDonors()
    box.add(library)
    library.donors["a"] = donor()
    box.take(10)
    library.donors["a"].embedding = np.ones(4, dtype=np.float32)
    for kinds in (["donor_registered"], []):
        box.changes.append((library, "a"))
        box.absorb(10)
        assert [notice.kind for notice in box.take(10)] == kinds
    library.donors["a"].tier = "host"
    box.changes.append((library, "a"))
    box.absorb(10)
    assert [notice.kind for notice in box.take(10)] == ["donor_relocated"]
    assert announced(box) == {"a": "host"}


def test_counts_are_shown_in_prometheus() -> None:
    registry = CollectorRegistry()
    first, second = EventCounters(registry=registry), EventCounters(registry=registry)
    first.count("dropped", "overflow", 3)
    second.count("dropped", "overflow")
    second.count("dropped", "closed", 0)
    first.count("sent", "donor_registered", 5)
    first.count("resyncs", "connected")
    first.count("connections", "failed")

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"semblend_{name}_total", labels)

    assert (first.dropped["overflow"], second.dropped["overflow"], first.connections["failed"]) == (3, 1, 1)
    assert value("events_dropped", reason="overflow") == 4
    assert {value("events_dropped", reason=reason) for reason in DROP_REASONS} == {4, 0}
    assert value("events", kind="donor_registered") == 5
    assert value("event_resyncs", reason="connected") == 1
    assert value("event_connections", result="failed") == 1


def test_names_that_are_taken_cost_the_series_only() -> None:
    registry = CollectorRegistry()
    Series("semblend_events", "Somebody else's.", registry=registry)
    counters = EventCounters(registry=registry)
    counters.count("sent", "donor_registered", 5)
    assert counters.sent["donor_registered"] == 5
