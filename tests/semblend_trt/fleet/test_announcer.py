"""What the connector tells the fleet: each donor once it is held, where it is, and that it is gone."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from kernels.layout import KvGeometry
from semblend_trt.config import load_settings
from semblend_trt.connector.donor_index import DonorIndex
from semblend_trt.connector.requests import TrackedRequest
from semblend_trt.fleet import announcer
from semblend_trt.fleet.announcer import DonorAnnouncer, DonorPublisher, announcer_for
from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.sketch import Sketch, overlap, prompt_fingerprints, sketch_key
from semblend_trt.fleet.wire import decode
from semblend_trt.namespace import CacheNamespace
from semblend_trt.runtime import PoolFacts, SavedDonor

GEOMETRY = KvGeometry(num_layers=2, kv_heads=1, head_dim=8, block_size=16)
TOKEN_BYTES = GEOMETRY.bytes_per_token(torch.float32)


class Notebook(DonorPublisher):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def held(self, donor_id: str, tokens: Any, tier: str) -> None:
        self.told.append(("held", donor_id, len(tokens), tier))

    def moved(self, donor_id: str, tier: str) -> None:
        self.told.append(("moved", donor_id, tier))

    def gone(self, donor_id: str) -> None:
        self.told.append(("gone", donor_id))


def library(news: Any, host_tokens: int = 500, **overrides: Any) -> DonorIndex:
    settings = load_settings(policy="position_fix", host_bytes=host_tokens * TOKEN_BYTES, **overrides)
    return DonorIndex(settings, PoolFacts(GEOMETRY, 64, torch.float32), news, None, lambda kind: None, None)


def keep(books: DonorIndex, donor_id: str, tokens: Any, error: str | None = None) -> None:
    intent = books.intend(donor_id, TrackedRequest(1, "namespace", tokens, 0), 0)
    assert intent is not None
    assert books.begin_save(intent, "namespace", tokens)
    books.saved(SavedDonor(donor_id, 0 if error else len(tokens), error))


def test_a_library_tells_of_donors_that_are_held_and_gone(text) -> None:
    news = Notebook()
    books = library(news)
    keep(books, "a", text(1, 200))
    keep(books, "b", text(2, 200))
    keep(books, "c", text(3, 200))
    books.lost({"b"})
    assert news.told == [
        ("held", "a", 200, "host"),
        ("held", "b", 200, "host"),
        ("gone", "a"),
        ("held", "c", 200, "host"),
        ("gone", "b"),
    ]


def test_a_library_tells_of_donors_that_move_down(text) -> None:
    news = Notebook()
    books = library(news, host_tokens=300, device_bytes=15 * 16 * TOKEN_BYTES)
    keep(books, "a", text(1, 200))
    keep(books, "b", text(2, 200))
    assert news.told == [("held", "a", 200, "device"), ("moved", "a", "host"), ("held", "b", 200, "device")]


def test_a_failed_save_is_never_announced(text) -> None:
    news = Notebook()
    keep(library(news), "a", text(1, 200), "disk on fire")
    assert news.told == [("gone", "a")]


def test_without_a_server_nobody_is_told(monkeypatch) -> None:
    monkeypatch.delenv("SEMBLEND_NATS_URL", raising=False)
    assert type(announcer_for(load_settings())) is DonorPublisher
    assert type(announcer_for(load_settings(nats_url="nats://127.0.0.1:1", enabled=False))) is DonorPublisher


def test_engines_of_a_process_share_one_publisher(nats_server) -> None:
    settings = load_settings(nats_url=nats_server.url, worker_id=5, metrics=False)
    first, second = announcer_for(settings), announcer_for(settings)
    assert isinstance(first, DonorAnnouncer)
    assert isinstance(second, DonorAnnouncer)
    publisher = first._publisher
    assert second._publisher is publisher
    first.close()
    first.close()
    assert publisher._thread.is_alive()
    second.close()
    publisher._thread.join(60)
    assert not publisher._thread.is_alive()
    assert announcer._publishers == {}


@pytest.mark.parametrize("salt", [None, "tenant-acme"])
def test_a_router_with_the_salt_estimates_the_overlap(nats_server, make_reader, base_namespace, text, salt) -> None:
    reader = make_reader(nats_server.url)
    news = announcer_for(load_settings(nats_url=nats_server.url, worker_id=5, metrics=False))
    namespace, tokens = base_namespace.for_request(salt, None), text(1, 4000)
    news.intended("a", namespace, salt)
    news.held("a", tokens, "host")
    assert reader.wait_for(lambda reader: "donor_registered" in reader.kinds())
    news.close()
    payload = next(each for each in reader.payloads if b"donor_registered" in each)
    data = decode(payload).data
    assert CacheNamespace.from_dict(data.namespace) == namespace
    assert b"tenant-acme" not in payload
    sketch = Sketch.from_bytes(data.segments[0].provider_metadata)
    prompt = np.concatenate([text(2, 1000), tokens[500:3500]])

    def share(key_salt: str | None) -> float:
        return overlap(sketch, prompt_fingerprints(prompt, sketch_key(namespace.key, key_salt)))

    assert share(salt) == pytest.approx(0.75, abs=0.12)
    assert share("another") == 0
    assert share("" if salt is None else None) == 0


def test_a_donor_of_an_earlier_process_is_told_once_its_namespace_is_named(
    nats_server, make_reader, base_namespace, text
) -> None:
    reader = make_reader(nats_server.url)
    news = announcer_for(load_settings(nats_url=nats_server.url, worker_id=5, metrics=False))
    salted, plain = base_namespace.for_request("acme", None), base_namespace.for_request(None, None)
    for number in range(40):
        news.found(f"salted-{number}", salted.key, text(number, 100), "disk")
    news.found("lost", plain.key, text(50, 100), "disk")
    news.found("plain", plain.key, text(51, 100), "disk")
    news.gone("lost")
    news.moved("plain", "host")
    news.intended("next", plain, None)
    for _ in range(3):
        news.intended("next", salted, "acme")

    def tells_all(reader) -> bool:
        return any(each.donors == 41 for each in reader.directory.workers())

    assert reader.wait_for(tells_all)
    events = [decode(payload).data for payload in reader.payloads]
    told = {data.donor_id: data for data in events if data.kind == "donor_registered"}
    assert told["plain"].location.tier == "host"
    assert CacheNamespace.from_dict(told["salted-7"].namespace) == salted
    sketch = Sketch.from_bytes(told["salted-7"].segments[0].provider_metadata)
    assert overlap(sketch, prompt_fingerprints(text(7, 100), sketch_key(salted.key, "acme"))) == 1.0
    news.close()


class BrokenPublisher:
    """Fails whatever it is asked."""

    def add(self, library: object) -> None: ...

    def changed(self, *_: Any) -> None:
        raise RuntimeError("injected")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("injected")


def test_nothing_is_raised_into_serving(namespace, text, caplog) -> None:
    news = DonorAnnouncer(BrokenPublisher(), lambda: None)
    news.intended("a", namespace, None)
    news.held("a", text(1, 100), "host")
    news.embedded("a", np.ones(4, dtype=np.float32))
    news.moved("a", "device")
    news.found("b", namespace.key, text(1, 100), "disk")
    news.intended("c", namespace, None)
    news.gone("a")
    news.close()
    assert "the fleet is not told of a donor" in caplog.text


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_a_worker_without_the_extra_serves_silently(form, monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "msgspec", None)
    news = announcer_for(load_settings(nats_url="nats://127.0.0.1:1", event_format=form, metrics=False))
    assert type(news) is DonorPublisher
    assert "events need msgspec; install semblend-trt[nats]" in caplog.text


def test_options_show_no_secret() -> None:
    settings = load_settings(nats_url="nats://user:hunter2@127.0.0.1:4222, nats://other", nats_token="s3cret")
    options = ConnectionOptions.of(settings)
    assert options is not None
    assert options.servers == ("nats://user:hunter2@127.0.0.1:4222", "nats://other")
    for shown in (repr(options), repr(settings), settings.model_dump_json()):
        assert "hunter2" not in shown
        assert "s3cret" not in shown


def test_no_thread_is_left_without_a_server(monkeypatch) -> None:
    before = threading.active_count()
    announcer_for(load_settings(enabled=False)).close()
    assert threading.active_count() == before
