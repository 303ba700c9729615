"""The publisher against a real nats-server: readers end up with what is held, whatever is killed in between."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
from typing import Any

import numpy as np
import pytest

from semblend_trt.fleet import connection
from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.wire import EventFormat, decode
from tests.semblend_trt.conftest import WatchedDirectory

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
        assert worker.publisher.settle(30)
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
        assert worker.publisher.settle(30)
        nats_server.kill()
        worker.churn(rng, 60)
        nats_server.start()
        worker.churn(rng, 20)
        assert converges(reader, worker)
    assert worker.counters.connections >= 3
    assert worker.counters.resyncs["connected"] == worker.counters.connections


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
    assert worker.publisher.settle(30)
    reader = make_reader(nats_server.url)
    reader.ask()
    assert converges(reader, worker)
    assert worker.counters.resyncs["requested"] >= 1


def test_a_reader_that_cannot_ask_is_told_in_time(nats_server, make_reader, make_worker) -> None:
    worker = make_worker(nats_server, resync_seconds=0.2)
    worker.add("a")
    assert worker.publisher.settle(30)
    assert converges(make_reader(nats_server.url), worker)
    assert worker.counters.resyncs["interval"] >= 1


def test_an_overflow_is_counted_and_made_good(nats_server, make_reader, make_worker) -> None:
    reader = make_reader(nats_server.url)
    worker = make_worker(nats_server, max_changes=8)
    assert worker.publisher.settle(30)
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
    assert worker.publisher.settle(30)
    held = threading.Event()
    worker.publisher._loop.call_soon_threadsafe(held.wait)
    worker.add("short-lived")
    worker.remove("short-lived")
    worker.add("moved")
    worker.move("moved")
    held.set()
    assert worker.publisher.settle(30)
    assert converges(reader, worker)
    kinds = [kind for kind in reader.kinds() if kind != "provider_heartbeat"]
    assert kinds == ["provider_generation_reset", "donor_registered"]


def test_what_is_too_large_for_the_server_counts_as_dropped_alone(make_nats_server, make_worker, tmp_path) -> None:
    (tmp_path / "small.conf").write_text("max_payload: 2048")
    worker = make_worker(make_nats_server("-c", str(tmp_path / "small.conf")), heartbeat_seconds=3600.0)
    assert worker.publisher.settle(30)
    worker.add("large", length=4000)
    assert worker.publisher.settle(30)
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
    assert worker.publisher.settle(30)
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
    assert worker_of_a_stream.publisher.settle(30)
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
    assert worker.publisher.settle(30)
    assert relay.repeats == lost
    assert (counters.connections, counters.sent["donor_registered"]) == (1, 20)
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
    assert worker.publisher.settle(30)
    assert counters.dropped == {"disconnected": 20}
    assert (counters.connections, counters.resyncs["connected"]) == (2, 2)
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
    assert not worker.publisher.settle(0.5)
    assert worker.counters.connections == 0
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
    assert not stranger.publisher.settle(0.5)
    assert stranger.counters.connections == 0
