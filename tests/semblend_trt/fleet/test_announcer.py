"""What an engine announces: each donor once it is held, its tier, and that it is gone."""

import os
import sys
import threading

import numpy as np
import pytest

from semblend_trt.config import load_settings
from semblend_trt.fleet import announcer
from semblend_trt.fleet.announcer import DonorAnnouncer, announcer_for, generation_of, worker_id_of
from semblend_trt.fleet.connection import meant
from semblend_trt.fleet.events import Emitter, decode
from semblend_trt.fleet.sketch import Sketch, sketch_key
from semblend_trt.namespace import CacheNamespace
from tests.semblend_trt.donors.test_donor_index import Observer, index_of, keep_approximate
from tests.semblend_trt.fleet.conftest import donors_of, overlap
from tests.semblend_trt.samples import BASE_NAMESPACE, NAMESPACE, prompt_fingerprints, text


@pytest.mark.promise("reuse", "A donor keeps its generation on...")
def test_a_donor_built_from_approximate_kv_is_not_announced():
    observer = Observer("held", "gone")
    keep_approximate(index_of(500, observer, policy="verified"), "approximate", text(1, 200), 1)
    assert observer.told == [("gone", "approximate")]


def test_without_a_server_nothing_is_announced_and_no_thread_runs(monkeypatch):
    monkeypatch.delenv("SEMBLEND_NATS_URL", raising=False)
    before = threading.active_count()
    for settings in (load_settings(), load_settings(nats_url="nats://127.0.0.1:1", enabled=False)):
        assert announcer_for(settings) is None
    assert threading.active_count() <= before  # threads of earlier tests may end


def test_engines_of_a_process_share_one_publisher(nats_server):
    settings = load_settings(nats_url=nats_server.url, worker_id=5, metrics=False)
    first, second = announcer_for(settings), announcer_for(settings)
    publisher = first._publisher
    assert second._publisher is publisher
    first.close()
    first.close()
    assert publisher._thread.is_alive()
    second.close()
    publisher._thread.join(60)
    assert not publisher._thread.is_alive()
    assert announcer._publishers == {}


def test_a_donor_of_an_earlier_process_is_announced_once_a_request_names_its_namespace(nats_server, reader):
    donors = announcer_for(load_settings(nats_url=nats_server.url, worker_id=5, metrics=False))
    salted, plain = BASE_NAMESPACE.for_request("acme", None), BASE_NAMESPACE.for_request(None, None)
    for number in range(40):
        donors.found(f"salted-{number}", salted.key, text(number, 100), "disk")
    donors.found("lost", plain.key, text(50, 100), "disk")
    donors.found("plain", plain.key, text(51, 100), "disk")
    donors.gone("lost")
    donors.moved("plain", "host")
    donors.intended("next", plain, None)
    for _ in range(3):
        donors.intended("next", salted, "acme")
    assert donors._found == {}
    assert reader.wait_for(lambda reader: len(donors_of(reader.directory, (5, 0))) == 41)
    events = [decode(payload).data for payload in reader.payloads]
    told = {data.donor_id: data for data in events if data.kind == "donor_registered"}
    assert told["plain"].location.tier == "host"
    assert CacheNamespace.from_dict(told["salted-7"].namespace) == salted
    assert not any(b"acme" in payload for payload in reader.payloads)
    asked = ("salted-7", 7, salted, ("acme", "another")), ("plain", 51, plain, (None, ""))
    for name, seed, namespace, salts in asked:
        sketch = Sketch.from_bytes(told[name].segments[0].provider_metadata)
        keys = (sketch_key(namespace.key, salt) for salt in salts)
        assert [overlap(sketch, prompt_fingerprints(text(seed, 100), key)) for key in keys] == [1.0, 0.0]
    donors.close()


def test_engines_that_share_a_publisher_withdraw_their_own_donors_only(make_worker, nats_server, reader):
    worker = make_worker(nats_server)
    other = DonorAnnouncer(worker.publisher, lambda: None)
    other.intended("other", NAMESPACE, None)
    other.held("other", text(1, 100), "host")
    worker.add("own")
    assert reader.wait_for(lambda reader: len(donors_of(reader.directory, (3, 0))) == 2)
    other.close()
    assert reader.wait_for(lambda reader: donors_of(reader.directory, (3, 0)) == worker.held)


@pytest.mark.promise("fleet", "Serving neither waits for NATS nor...")
def test_nothing_is_raised_into_serving(caplog):
    donors = DonorAnnouncer(object(), lambda: None)  # has nothing that a publisher has
    donors.intended("a", NAMESPACE, None)
    donors.held("a", text(1, 100), "host")
    donors.embedded("a", np.ones(4, dtype=np.float32))
    donors.moved("a", "device")
    donors.found("b", NAMESPACE.key, text(1, 100), "disk")
    donors.intended("c", NAMESPACE, None)
    donors.gone("a")
    donors.close()
    assert caplog.messages.count("a change of a donor is not announced") == 1  # in a minute


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_a_worker_without_the_extra_serves_silently(form, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    monkeypatch.delitem(sys.modules, "semblend_trt.fleet.events")
    assert announcer_for(load_settings(nats_url="nats://127.0.0.1:1", event_format=form, metrics=False)) is None
    assert "events need msgspec; install semblend-trt[nats]" in caplog.text


@pytest.mark.parametrize(
    ("setting", "host", "expected"),
    [
        *((number, "worker-3", number) for number in (7, 0)),
        *((None, host, number) for host, number in (("worker-3", 3), ("trtllm-decode-12.ns.svc", 12))),
        *((None, host, 0) for host in ("worker3", "worker-3a", "localhost", "a-" + "9" * 40)),
        (None, "a-" + "9" * 16, (1 << 53) - 1),
    ],
)
def test_worker_id(monkeypatch, setting, host, expected):
    monkeypatch.setattr(announcer.socket, "gethostname", lambda: host)
    assert worker_id_of(setting) == expected


def test_one_generation_a_process_that_rises():
    first = generation_of(os.getpid())
    assert generation_of(os.getpid()) == first
    assert first < 1 << 53
    assert generation_of(os.getpid() + 1) > first  # a forked child's


@pytest.mark.parametrize(
    ("request_bytes", "is_meant"),
    [
        *((each, True) for each in (b"", b"{}", b'{"worker_id": 3}', b'{"worker_id": 3, "dp_rank": 1}')),
        *((each, False) for each in (b'{"worker_id": 4}', b'{"worker_id": 3, "dp_rank": 0}')),
        *((each, False) for each in (b"[3]", b"\xff", b"[" * 1000, b" " * 2000)),
    ],
)
def test_requests_for_a_resync(request_bytes, is_meant):
    assert (meant(request_bytes, Emitter(3, 1, 9)) is not None) == is_meant
