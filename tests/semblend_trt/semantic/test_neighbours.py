"""Neighbours: what is found and forgotten, and that serving never waits for it."""

import gc
import json
import logging
import threading
import weakref
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from semblend_trt.audit import AuditLog
from semblend_trt.config import EmbedderKind, load_settings
from semblend_trt.connector.lookup import tokenizer_folder
from semblend_trt.errors import ConfigurationError
from semblend_trt.metrics import TEXT_EVENTS, metrics_for
from semblend_trt.semantic.embedders import embedder_for
from semblend_trt.semantic.neighbours import Neighbours, SemanticIndex, neighbours_for
from tests.semblend_trt import samples
from tests.semblend_trt.engine_specs import engine
from tests.server_process import MODEL

WAIT = 60.0


class Records:
    """Where neighbours are reported: the audit log, the metrics and the announcer of donors."""

    def __init__(self, path):
        self._path, self.registry, self.vectors = path, CollectorRegistry(), {}
        self.audit, self.metrics = AuditLog(path), metrics_for(self.registry)
        self.announcer = SimpleNamespace(embedded=self.vectors.__setitem__)

    def events(self):
        self.audit.flush()
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == "neighbours"]

    def count(self, event):
        return self.registry.get_sample_value("semblend_neighbour_texts_total", {"event": event})

    def counts(self):
        return {event: count for event in TEXT_EVENTS if (count := self.count(event))}


def static():
    return embedder_for(EmbedderKind.STATIC)


def decoder():
    """Token n is the word wN."""
    return lambda tokens: " ".join(f"w{token}" for token in tokens)


class Gate:
    """An embedder that waits to be let through."""

    def __init__(self):
        self._inner, self.begun, self.let = static(), threading.Semaphore(0), threading.Semaphore(1)

    def embed(self, texts):
        self.begun.release()
        self.let.acquire()
        return self._inner.embed(texts)


def text(seed, length=300):
    return 300 + samples.text(seed, length, vocabulary=4_700)


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path / "audit")


@pytest.fixture
def neighbours_of(records, request):
    """Makes neighbours that end with the test."""

    def make(open_embedder=static, open_decoder=decoder, **rest):
        reported_to = records.audit, records.metrics, records.announcer
        made = Neighbours(open_embedder, open_decoder, *reported_to, min_similarity=0.6, **rest)
        request.addfinalizer(made.close)
        return made

    return make


@pytest.fixture
def made(neighbours_of):
    return neighbours_of()


def test_the_donor_of_a_shared_document_is_found(made, records):
    for number in range(5):
        made.found(f"donor-{number}", "space", text(number), "host")
    made.found("foreign", "another salt", text(3), "host")
    made.look_up(7, "space", np.concatenate([text(50, 40), text(3)]))
    made.look_up(8, "space", text(99))
    made._thread.drain()
    (near,) = made.nearest(7)
    assert near.donor_id == "donor-3"
    assert 0.6 <= near.similarity <= 1.0
    assert made.nearest(8) == ()
    reported = [(event["request_id"], [name for name, _ in event["nearest"]]) for event in records.events()]
    assert reported == [(7, ["donor-3"]), (8, [])]
    assert records.counts() == {"donor_embedded": 6, "request_embedded": 2}
    assert records.registry.get_sample_value("semblend_neighbour_similarity_count") == 1
    for number in range(5):
        (vector,) = static().embed([decoder()(text(number))])
        np.testing.assert_array_equal(records.vectors[f"donor-{number}"], vector)


@pytest.mark.known_defect(18)
def test_a_full_queue_drops_texts_but_no_removals(records, monkeypatch, neighbours_of):
    monkeypatch.setattr("semblend_trt.semantic.neighbours.QUEUE_LENGTH", 3)
    gate = Gate()
    made = neighbours_of(lambda: gate)
    made.found("donor-0", "space", text(0), "host")
    for _ in range(2):
        assert gate.begun.acquire(timeout=WAIT)
    for number in range(1, 6):
        made.found(f"donor-{number}", "space", text(number), "host")
    assert records.count("dropped") == 2
    made.gone("donor-0")
    made.gone("donor-2")
    gate.let.release(100)
    made._thread.drain()
    for number in range(6):
        made.look_up(number, "space", text(number))
        made._thread.drain()
    assert [len(made.nearest(number)) for number in range(6)] == [0, 1, 0, 1, 0, 0]


def test_one_text_that_fails_costs_only_itself(records, caplog, made):
    made.found("bad", "space", None, "host")
    made.found("worse", "space", None, "host")
    made.found("empty", "space", text(0, 0), "host")
    made.found("good", "space", text(1), "host")
    made.look_up(1, "space", text(1))
    made.look_up(2, "space", text(1, 0))
    made._thread.drain()
    assert [near.donor_id for near in made.nearest(1)] == ["good"]
    assert made.nearest(2) == ()
    assert records.count("failed") == 2
    assert sum("cannot be embedded" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("error", [ConfigurationError("pip install 'semblend-trt[onnx]'"), RuntimeError("injected")])
def test_an_embedder_that_cannot_be_made_is_logged_once(records, caplog, error, neighbours_of):
    with caplog.at_level(logging.WARNING):
        made = neighbours_of(Mock(side_effect=error))
        made._thread.drain()
        for number in range(1000):
            made.found(str(number), "space", text(number, 5), "host")
    made._thread.drain()
    assert made.refusal == str(error)
    assert made.nearest(1) == ()
    assert [str(error) in line for line in caplog.messages] == [True]
    assert records.counts() == {}


def test_close_ends_the_thread_and_later_calls_do_nothing(records, made):
    made._thread.drain()
    made.close()
    made.close()
    made.found("donor", "space", text(1), "host")
    made.look_up(1, "space", text(1))
    made.gone("donor")
    assert made.nearest(1) == ()
    assert records.counts() == {}
    assert not [thread for thread in threading.enumerate() if thread is made._thread._thread]


def test_the_thread_ends_with_the_last_reference(records):
    made = Neighbours(static, decoder, records.audit, records.metrics, records.announcer, min_similarity=0.6)
    made._thread.drain()
    thread, gone = made._thread._thread, weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    thread.join(WAIT)
    assert not thread.is_alive()


def hold(made, donor_id, tokens):
    made.intended(donor_id, SimpleNamespace(key="space"), None)
    made.held(donor_id, tokens, "host")


def nearest(made, request_id, tokens):
    made.look_up(request_id, "space", tokens)
    made._thread.drain()
    return [each.donor_id for each in made.nearest(request_id)]


def test_donors_near_a_request_are_given_to_the_scheduler_once(made):
    hold(made, "one", text(1))
    nearest(made, 5, text(7))
    assert made.near_donors() == []
    nearest(made, 6, text(1))
    assert [made.near_donors() for _ in range(2)] == [["one"], []]
    made.gone("one")
    assert made.nearest(6) == ()


def test_a_donor_whose_namespace_no_request_named_is_not_entered(made):
    made.held("one", text(1), "host")
    hold(made, "two", text(2))
    made.intended("three", SimpleNamespace(key="space"), None)
    made.gone("three")
    made.held("three", text(3), "host")
    assert [nearest(made, number, text(number)) for number in (1, 2, 3)] == [[], ["two"], []]


@pytest.mark.parametrize("model", ["no-such-org/no-such-model", "empty", MODEL])
def test_a_model_without_a_tokenizer_is_served_without_neighbours(records, tmp_path, model):
    (tmp_path / "empty").mkdir()
    folder = partial(tokenizer_folder, engine(tmp_path / "empty" if model == "empty" else model))
    made = neighbours_for(load_settings(embedder="static"), folder, records.audit, records.metrics, records.announcer)
    hold(made, "one", text(1))
    assert nearest(made, 1, text(1)) == (["one"] if model == MODEL else [])
    assert (made.refusal is None) == (model == MODEL)
    made.close()


def unit(seed):
    vector = np.random.default_rng(seed).standard_normal(32).astype(np.float32)
    return vector / np.linalg.norm(vector)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.booleans()), max_size=40))
def test_a_search_is_that_of_all_vectors_of_the_namespace(history):
    """Vectors are added, replaced and removed in any order."""
    index, held = SemanticIndex(), {}
    for seed, (key, name, is_removed) in enumerate(history):
        held.pop(str(name), None)
        if is_removed:
            index.remove(str(name))
        else:
            held[str(name)] = (key, unit(seed))
            index.add(key, str(name), unit(seed))
    for key in "abc":
        expected = sorted((float(vector @ unit(99)) for of, vector in held.values() if of == key), reverse=True)
        found = index.find(key, unit(99), 5)
        np.testing.assert_allclose([similarity for _, similarity in found], expected[:5], atol=1e-3)
        assert all(held[name][0] == key for name, _ in found)
