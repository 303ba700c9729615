"""The background thread: what it finds, what it forgets, and that it never stands in the way."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref

import numpy as np
import pytest

from semblend_trt.errors import ConfigurationError
from semblend_trt.semantic.embedder import EmbedderKind, embedder_for
from semblend_trt.semantic.index import SemanticIndex
from semblend_trt.semantic.neighbours import Neighbours

WAIT = 60.0


class Records:
    """Keeps what the thread tells."""

    def __init__(self):
        self.found, self.embedded, self.events = {}, {}, []

    def neighbours_found(self, request_id, nearest):
        self.found[request_id] = nearest

    def donor_embedded(self, donor_id, vector):
        self.embedded[donor_id] = vector

    def neighbours_counted(self, event):
        self.events.append(event)


def static():
    return embedder_for(EmbedderKind.STATIC)


def decoder():
    """Token n is the word wN."""
    return lambda tokens: " ".join(f"w{token}" for token in tokens)


class Gate:
    """An embedder that waits to be let through."""

    def __init__(self):
        self._inner, self.begun, self.let = static(), threading.Semaphore(0), threading.Semaphore(1)
        self.identity, self.dim = self._inner.identity, self._inner.dim

    def embed(self, texts):
        self.begun.release()
        self.let.acquire()
        return self._inner.embed(texts)


def text(seed, length=300):
    return np.random.default_rng(seed).integers(0, 100_000, length, dtype=np.int32)


@pytest.fixture
def records():
    return Records()


@pytest.fixture
def made(records):
    neighbours = Neighbours(static, decoder, records, min_similarity=0.6)
    yield neighbours
    neighbours.close()


def test_the_donor_of_a_shared_document_is_found(made, records):
    for number in range(5):
        made.donor_held("space", f"donor-{number}", text(number))
    made.look_up(7, "space", np.concatenate([text(50, 40), text(3)]))
    made.look_up(8, "space", text(99))
    assert made.settle(WAIT)
    (near,) = made.nearest(7)
    assert near.donor_id == "donor-3"
    assert 0.6 <= near.similarity <= 1.0
    assert made.nearest(8) == ()
    assert records.found == {7: (near,), 8: ()}
    assert sorted(records.events) == ["donor_embedded"] * 5 + ["request_embedded"] * 2


def test_the_vectors_of_held_donors_are_told(made, records):
    made.donor_held("space", "donor", text(1))
    made.look_up(1, "space", text(2))
    assert made.settle(WAIT)
    (vector,) = static().embed([decoder()(text(1))])
    assert list(records.embedded) == ["donor"]
    np.testing.assert_array_equal(records.embedded["donor"], vector)


def test_another_salt_finds_nothing(made):
    made.donor_held("space", "donor", text(1))
    made.look_up(1, "space, salted", text(1))
    assert made.settle(WAIT)
    assert made.nearest(1) == ()


def test_a_donor_that_left_is_named_no_more(made):
    made.donor_held("space", "donor", text(1))
    made.look_up(1, "space", text(1))
    assert made.settle(WAIT)
    assert [near.donor_id for near in made.nearest(1)] == ["donor"]
    made.donor_gone("donor")
    assert made.nearest(1) == ()
    made.look_up(2, "space", text(1))
    assert made.settle(WAIT)
    assert made.nearest(2) == ()
    made.donor_gone("never known")


def test_a_donor_that_leaves_while_it_waits_is_never_entered(records):
    gate = Gate()
    made = Neighbours(lambda: gate, decoder, records, min_similarity=0.6)
    made.donor_held("space", "donor", text(1))
    for _ in range(2):  # the thread's first text is its own
        assert gate.begun.acquire(timeout=WAIT)
    made.donor_gone("donor")
    made.look_up(1, "space", text(1))
    gate.let.release(5)
    assert made.settle(WAIT)
    assert made.nearest(1) == ()
    made.close()


@pytest.mark.known_defect(18)
def test_a_full_queue_drops_texts_but_no_removals(records):
    gate = Gate()
    made = Neighbours(lambda: gate, decoder, records, min_similarity=0.6, queue_length=3)
    made.donor_held("space", "donor-0", text(0))
    for _ in range(2):
        assert gate.begun.acquire(timeout=WAIT)
    for number in range(1, 6):
        made.donor_held("space", f"donor-{number}", text(number))
    assert records.events == ["dropped"] * 2
    made.donor_gone("donor-0")
    made.donor_gone("donor-2")
    gate.let.release(100)
    assert made.settle(WAIT)
    for number in range(6):
        made.look_up(number, "space", text(number))
        assert made.settle(WAIT)
    assert [len(made.nearest(number)) for number in range(6)] == [0, 1, 0, 1, 0, 0]
    made.close()


def test_one_text_that_fails_costs_only_itself(records, caplog):
    def broken():
        words = decoder()

        def decode(tokens):
            if len(tokens) == 1:
                raise RuntimeError("injected")
            return words(tokens)

        return decode

    made = Neighbours(static, broken, records, min_similarity=0.6)
    made.donor_held("space", "bad", text(0, 1))
    made.donor_held("space", "worse", text(0, 1))
    made.donor_held("space", "empty", text(0, 0))
    made.donor_held("space", "good", text(1))
    made.look_up(1, "space", text(1))
    made.look_up(2, "space", text(1, 0))
    assert made.settle(WAIT)
    assert [near.donor_id for near in made.nearest(1)] == ["good"]
    assert made.nearest(2) == ()
    assert records.events.count("failed") == 2
    assert sum("cannot be embedded" in line for line in caplog.messages) == 1
    made.close()


@pytest.mark.parametrize("error", [ConfigurationError("pip install 'semblend-trt[onnx]'"), RuntimeError("injected")])
def test_an_embedder_that_cannot_be_made_is_said_once(records, caplog, error):
    def raises():
        raise error

    with caplog.at_level(logging.WARNING):
        made = Neighbours(raises, decoder, records, min_similarity=0.6)
        assert made.settle(WAIT)
        for number in range(1000):
            made.donor_held("space", str(number), text(number, 5))
    assert made.settle(WAIT)
    assert made.refusal == str(error)
    assert made.nearest(1) == ()
    assert [str(error) in line for line in caplog.messages] == [True]
    assert records.events == []
    made.close()


def test_without_the_extra_one_sentence_says_what_to_install(records, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "faiss", None)
    made = Neighbours(static, decoder, records, min_similarity=0.6)
    assert made.settle(WAIT)
    expected = "no semantic neighbours are reported: their index needs faiss; pip install 'semblend-trt[semantic]'"
    assert caplog.messages == [expected]
    made.close()


def test_an_index_that_cannot_forget_ends_the_reports_and_nothing_waits_for_it(records, monkeypatch, caplog):
    def broken(self, entry_id):
        raise RuntimeError("injected")

    monkeypatch.setattr(SemanticIndex, "remove", broken)
    made = Neighbours(static, decoder, records, min_similarity=0.6)
    made.donor_held("space", "donor", text(1))
    assert made.settle(WAIT)
    made.donor_gone("donor")
    assert made.settle(WAIT)
    assert made.refusal == "injected"
    made.donor_held("space", "another", text(2))
    assert made.settle(WAIT)
    assert list(records.embedded) == ["donor"]
    made.close()


def test_close_ends_the_thread_and_later_calls_do_nothing(records):
    made = Neighbours(static, decoder, records, min_similarity=0.6)
    assert made.settle(WAIT)
    made.close()
    made.close()
    made.donor_held("space", "donor", text(1))
    made.look_up(1, "space", text(1))
    made.donor_gone("donor")
    assert made.settle(WAIT)
    assert made.nearest(1) == ()
    assert records.events == []
    assert not [thread for thread in threading.enumerate() if thread is made._worker._thread]


def test_what_opened_the_embedder_is_let_go(records):
    class Held:
        def __call__(self):
            return static()

    opener = Held()
    gone = weakref.ref(opener)
    made = Neighbours(opener, decoder, records, min_similarity=0.6)
    del opener
    assert made.settle(WAIT)
    gc.collect()
    assert gone() is None
    made.close()


def test_the_thread_ends_when_nobody_holds_the_neighbours(records):
    made = Neighbours(static, decoder, records, min_similarity=0.6)
    assert made.settle(WAIT)
    thread, gone = made._worker._thread, weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    thread.join(WAIT)
    assert not thread.is_alive()
