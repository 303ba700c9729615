"""What the connector tells the fleet: each donor once it is held, where it is, and that it is gone."""

from __future__ import annotations

import base64
import os
import random
import sys
import threading
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from engine_wrapper.embedded.llm import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kernels.layout import KvGeometry
from semblend_trt.audit import AuditEvents
from semblend_trt.config import load_settings
from semblend_trt.connector.donor_index import DonorIndex
from semblend_trt.connector.requests import TrackedRequest
from semblend_trt.fleet import announcer
from semblend_trt.fleet.announcer import DonorAnnouncer, DonorPublisher, announcer_for, generation, worker_id_of
from semblend_trt.fleet.connection import ConnectionOptions, is_meant
from semblend_trt.fleet.sketch import Sketch, overlap, prompt_fingerprints, sketch_key
from semblend_trt.fleet.wire import Emitter, decode
from semblend_trt.metrics import metrics_for
from semblend_trt.namespace import CacheNamespace
from semblend_trt.runtime import PoolFacts, SavedDonor
from semblend_trt.semantic.embedder import embedder_for
from semblend_trt.semantic.neighbours import neighbourhood_for, text_decoder

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


PREFILL = SamplingParams(max_tokens=1, ignore_eos=True)


def ids(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


@pytest.fixture
def engine(tiny_qwen2_path, nats_server, monkeypatch):
    """An embedded engine that tells the server of its donors as worker 4, with room for two of 300 tokens."""
    settings = {"POLICY": "position_fix", "NATS_URL": nats_server.url, "WORKER_ID": "4", "HEARTBEAT_SECONDS": "0.2"}
    for name, value in settings.items():
        monkeypatch.setenv(f"SEMBLEND_{name}", value)
    monkeypatch.setenv("SEMBLEND_MAX_DONORS", "2")
    config = KvCacheConnectorConfig.ours()
    with LLM(
        model=tiny_qwen2_path,
        dtype="float32",
        device="cpu",
        kv_connector_config=config,
        kv_cache_config=KvCacheConfig(tokens_per_block=16, enable_block_reuse=True, max_tokens=4096),
    ) as llm:
        yield llm


def test_an_engines_donors_are_known_to_the_fleet(engine, nats_server, make_reader) -> None:
    reader = make_reader(nats_server.url)
    reader.ask()  # what the engine said before somebody listened
    documents = [ids(seed, 300) for seed in range(3)]
    for document in documents:
        engine.generate(document, PREFILL)
        engine.settle()
    engine.generate(ids(9, 40), PREFILL)  # the scheduler hears of the last save at its next call

    def shown(reader) -> list[list[bool]]:
        """Which of the documents each donor that is known holds."""
        held, shares = reader.directory.donors_of((4, 0)), {}
        for data in (decode(payload).data for payload in reader.payloads):
            if data.kind == "donor_registered" and data.donor_id in held:
                key = sketch_key(CacheNamespace.from_dict(data.namespace).key, None)
                sketch = Sketch.from_bytes(data.segments[0].provider_metadata)
                asked = [prompt_fingerprints(ids(20, 60) + document, key) for document in documents]
                shares[data.donor_id] = [overlap(sketch, each) > 0.5 for each in asked]
        return sorted(shares.values())

    # Two donors are known before the last one is, too.
    assert reader.wait_for(lambda reader: shown(reader) == [[False, False, True], [False, True, False]])
    assert reader.wait_for(lambda reader: reader.directory.compared((4, 0)) > 0)
    assert not reader.directory.problems


MODEL = files("validation") / "assets" / "model"
STREAM = (5, 0)


@pytest.mark.parametrize("is_sent", [True, False])
@pytest.mark.parametrize("is_found_on_disk", [True, False])
def test_embeddings_reach_readers_only_when_they_are_to(
    nats_server, make_reader, namespace, tmp_path, is_sent, is_found_on_disk
) -> None:
    settings = load_settings(
        nats_url=nats_server.url, worker_id=5, event_embeddings=is_sent, heartbeat_seconds=0.1, embedder="static"
    )
    reader = make_reader(nats_server.url)
    neighbourhood = neighbourhood_for(
        settings,
        None,
        lambda: MODEL,
        AuditEvents(tmp_path / "audit"),
        metrics_for(True, CollectorRegistry()),
        announcer_for(settings),
    )
    tokens = np.random.default_rng(1).integers(300, 5000, 400, dtype=np.int32)
    if is_found_on_disk:
        neighbourhood.found("a", namespace.key, tokens, "disk")
        assert neighbourhood.neighbours.drain(60)
        neighbourhood.intended("b", namespace, None)
    else:
        neighbourhood.intended("a", namespace, None)
        neighbourhood.held("a", tokens, "host")
        assert neighbourhood.neighbours.drain(60)

    def sent() -> list[str | None]:
        events = [decode(payload).data for payload in reader.payloads]
        return [data.segments[0].embedding for data in events if data.kind == "donor_registered"]

    try:
        if is_sent:
            assert reader.wait_for(lambda _: any(sent()))
            vector = np.frombuffer(base64.b64decode(sent()[-1]), "<f4")
            (expected,) = embedder_for(settings.embedder).embed([text_decoder(MODEL)(tokens)])
            np.testing.assert_array_equal(vector, expected)
        else:
            assert reader.wait_for(lambda reader: reader.directory.compared(STREAM) > 2 and sent())
            assert not any(sent())
        assert not reader.directory.problems
    finally:
        neighbourhood.close()


@pytest.mark.parametrize(
    ("setting", "host", "expected"),
    [
        (7, "worker-3", 7),
        (0, "worker-3", 0),
        (None, "worker-3", 3),
        (None, "trtllm-decode-12.ns.svc", 12),
        (None, "worker3", 0),
        (None, "worker-3a", 0),
        (None, "localhost", 0),
        (None, "a-" + "9" * 16, (1 << 53) - 1),
        (None, "a-" + "9" * 40, 0),
    ],
)
def test_worker_id(setting, host, expected) -> None:
    assert worker_id_of(setting, host) == expected


def test_one_generation_a_process_that_rises() -> None:
    first = generation()
    assert generation() == first
    assert first < 1 << 53
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(generation()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reading, 100)) > first


@pytest.mark.parametrize(
    ("request_bytes", "meant"),
    [
        (b"", True),
        (b"{}", True),
        (b'{"worker_id": 3}', True),
        (b'{"worker_id": 3, "dp_rank": 1}', True),
        (b'{"worker_id": 4}', False),
        (b'{"worker_id": 3, "dp_rank": 0}', False),
        (b"[3]", False),
        (b"\xff", False),
        (b"[" * 1000, False),
        (b" " * 2000, False),
    ],
)
def test_requests_for_a_resync(request_bytes, meant) -> None:
    assert is_meant(request_bytes, Emitter(3, 1, 9)) is meant
