"""The publisher: readers end up with the donors held, by the fewest events, also when servers are killed."""

import shutil
import subprocess
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from nats.js.client import JetStreamContext

from semblend_trt.config import EventFormat
from semblend_trt.fleet import publisher
from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.events import decode
from semblend_trt.fleet.publisher import GROUP_TOKENS
from semblend_trt.fleet.sketch import sketch_key, sketch_of, token_digest
from tests.semblend_trt.fleet.conftest import donors_of, held_donor, outbox, stored
from tests.semblend_trt.samples import text

STREAM, TOKENS = (3, 0), np.arange(64, dtype=np.int32)


def known(directory):
    return donors_of(directory, STREAM)


def converges(reader, worker):
    return reader.wait_for(lambda reader: reader.directory.is_synced(STREAM) and known(reader.directory) == worker.held)


@pytest.mark.known_defect(31)
@pytest.mark.parametrize("form", EventFormat)
@pytest.mark.parametrize("stream", [None, "DONORS"])
def test_a_donors_life_is_told(nats_server, reader, make_worker, form, stream):
    worker = make_worker(nats_server, form=form, stream=stream)
    move, remove = (lambda: worker.announcer.moved("a", "host")), (lambda: worker.announcer.gone("a"))
    for step in (lambda: worker.add("a"), move, lambda: worker.add("b"), remove):
        step()
        assert worker.publisher.flush(30)
    assert converges(reader, worker)
    kinds = [kind for kind in reader.kinds() if kind != "provider_heartbeat"]
    told = ["donor_registered", "donor_relocated", "donor_registered", "donor_evicted"]
    assert kinds == ["provider_generation_reset", *told]
    events = [decode(payload) for payload in reader.payloads]
    assert [event.event_id for event in events] == list(range(1, len(events) + 1))
    assert {event.generation for event in events} == {7}
    worker.announcer.close()
    assert reader.wait_for(lambda reader: known(reader.directory) == {})
    assert reader.kinds()[-1] == "donors_purged"
    assert not reader.directory.problems


def add_at_once(worker, count):
    """Adds donors while the publisher's thread is busy, so that they are published in one batch."""
    absorb, is_busy, is_free = worker.publisher._absorb, threading.Event(), threading.Event()

    def wait():
        is_busy.set()
        is_free.wait()
        return absorb()

    worker.publisher._absorb = wait
    is_busy.wait()
    for number in range(count):
        worker.add(f"donor-{number}")
    is_free.set()


def test_a_reader_that_cannot_ask_is_told_in_time(nats_server, make_reader, make_worker):
    worker = make_worker(nats_server, resync_seconds=0.2)
    worker.add("a")
    assert worker.publisher.flush(30)
    assert converges(make_reader(nats_server.url), worker)
    assert worker.counters.resyncs["interval"] >= 1


def test_an_overflow_is_counted_and_made_good(nats_server, reader, make_worker, monkeypatch):
    monkeypatch.setattr(publisher, "MAX_CHANGES", 8)
    worker = make_worker(nats_server)
    assert worker.publisher.flush(30)
    add_at_once(worker, 40)
    worker.announcer.gone("donor-3")
    assert converges(reader, worker)
    assert worker.counters.dropped["overflow"] >= 33
    assert worker.counters.resyncs["overflow"] == 1


def test_what_is_too_large_for_the_server_counts_as_dropped_alone(make_nats_server, make_worker):
    worker = make_worker(make_nats_server(config="max_payload: 2048"), heartbeat_seconds=3600.0)
    assert worker.publisher.flush(30)
    worker.add("large", length=4000)
    assert worker.publisher.flush(30)
    assert worker.counters.dropped == {"oversize": 1}
    assert worker.counters.sent == {"provider_generation_reset": 1, "provider_heartbeat": 1}


@pytest.fixture
def acks(monkeypatch):
    """The stream's acknowledgements: the next `keep` do not reach the publisher; `repeats` counts duplicates."""
    made, publish = SimpleNamespace(keep=0, repeats=0), JetStreamContext.publish

    async def keep_acks(*arguments, **keywords):
        ack = await publish(*arguments, **keywords)
        made.repeats += bool(ack.duplicate)
        if made.keep:
            made.keep -= 1
            raise TimeoutError
        return ack

    monkeypatch.setattr(JetStreamContext, "publish", keep_acks)
    return made


@pytest.mark.promise("fleet", "A JetStream stream keeps each event once; TLS, credentials and tokens are passed on")
def test_what_was_not_acknowledged_is_sent_again_and_kept_once(nats_server, acks, make_worker, reader):
    worker = make_worker(nats_server, stream="DONORS", heartbeat_seconds=3600.0)
    counters = worker.counters
    assert worker.publisher.flush(30)  # the stream has its reset and its first heartbeat
    acks.keep = 5
    add_at_once(worker, 20)
    assert worker.publisher.flush(30)
    assert acks.repeats == 5
    assert (counters.connections["made"], counters.sent["donor_registered"]) == (1, 20)
    assert not counters.dropped
    assert stored(nats_server.url) == 22
    # Readers of the subject alone get both, and count the second.
    assert reader.wait_for(lambda reader: reader.directory.problems == {"duplicate": 5})
    assert known(reader.directory) == worker.held


def test_events_need_the_servers_token(make_nats_server, make_reader, make_worker, caplog):
    server = make_nats_server("--auth", "right-secret")
    reader = make_reader(server.url, token="right-secret")
    for token in ("wrong", None):
        refused = make_worker(server, token=token)
        refused.add("a")
        assert not refused.publisher.flush(0.5)
        assert refused.counters.connections["made"] == 0
    worker = make_worker(server, token="right-secret")
    worker.add("b")
    assert converges(reader, worker)
    assert "right-secret" not in caplog.text


@pytest.mark.promise("fleet", "Serving neither waits for NATS nor fails by it")
def test_serving_never_sees_a_dead_server(make_nats_server, make_worker):
    server = make_nats_server()
    server.kill()
    worker = make_worker(server)
    worker.churn(np.random.default_rng(4), 300)
    worker.announcer.close()
    worker.add("after the end")
    worker.publisher.close(60)
    assert not worker.publisher._thread.is_alive()


@pytest.mark.promise("fleet", "A JetStream stream keeps each event...")
def test_tls_with_certificates_of_both_sides(make_nats_server, make_reader, make_worker, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("skipped: openssl is not installed")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    new = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*new.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    both = f"--tls --tlsverify --tlscert {certificate} --tlskey {key} --tlscacert {certificate}"
    server = make_nats_server(*both.split())
    files = {"tls_ca": certificate, "tls_cert": certificate, "tls_key": key}
    options = ConnectionOptions(servers=(server.url,), subject="semantic-kv-events", **files)
    reader = make_reader(server.url, tls=options.client_arguments()["tls"])
    worker, stranger = make_worker(server, **files), make_worker(server, tls_ca=certificate, generation=8)
    worker.add("a")
    assert converges(reader, worker)
    assert not stranger.publisher.flush(0.5)
    assert stranger.counters.connections["made"] == 0


def kinds_of(box, *changed):
    """The kinds of the messages after these donors have changed."""
    box.changes.extend(changed)
    box.absorb(10)
    return [notice.kind for notice in box.take(10)]


def test_a_donor_that_cannot_be_sketched_costs_only_itself():
    box = outbox()
    box.donors |= {"bad": held_donor(np.array(["token"] * 64)), "good": held_donor(TOKENS)}
    assert kinds_of(box, "bad", "good", "good") == ["provider_generation_reset", "donor_registered"]
    assert list(box._announced) == ["good"]


def test_donors_are_sketched_together_as_each_alone():
    box, texts = outbox(), [text(3, length) for length in (0, 31, GROUP_TOKENS, 400, 800, 5)]
    texts.append(texts[4][::2])
    salts = [None, "one", None, "two", None, "one", "one"]
    for number, (tokens, salt) in enumerate(zip(texts, salts, strict=True)):
        box.donors[str(number)] = held_donor(tokens, salt)
        box.changes.extend([str(number)] * 2)  # held, then moved
    assert box.absorb(20) == 14
    for tokens, salt, held in zip(texts, salts, box.donors.values(), strict=True):
        assert held.tokens is None
        assert held.sketch == sketch_of(tokens, sketch_key(held.namespace.key, salt)).to_bytes()
        assert held.digest == token_digest(tokens, held.salted_key)


def test_changes_between_two_looks_become_one_event_or_none():
    box = outbox()
    assert kinds_of(box) == ["provider_generation_reset"]
    box.donors["a"] = held_donor(TOKENS, tier="host")
    assert kinds_of(box, "short-lived", "a", "short-lived", "a") == ["donor_registered"]
    box.donors["a"] = held_donor(TOKENS)  # another one of its id
    assert [kinds_of(box, "a") for _ in range(2)] == [["donor_registered"], []]
    box.donors["a"].embedding = np.ones(4, dtype=np.float32)
    assert [kinds_of(box, "a") for _ in range(2)] == [["donor_registered"], []]
    box.donors["a"].tier = "host"
    assert [kinds_of(box, "a") for _ in range(2)] == [["donor_relocated"], []]
