"""Calls run in order on one thread, also behind one that raises."""

import threading

import pytest

from semblend_trt.background import Background


@pytest.fixture
def thread():
    background = Background("semblend-test")
    yield background
    assert background.close(60)


def test_calls_run_in_order_on_a_thread_of_that_name(thread):
    ran = []
    for number in range(50):
        thread.submit(lambda number=number: ran.append((number, threading.current_thread().name)))
    thread.drain()
    assert ran == [(number, "semblend-test") for number in range(50)]


def test_a_call_that_fails_is_told_and_ends_nothing(thread, caplog):
    ran = []
    thread.submit(lambda: [][0])
    thread.submit(lambda: ran.append(1))
    thread.drain()
    assert ran == [1]
    assert "a call in the background failed" in caplog.text


def test_submitting_waits_for_nothing(thread):
    gate, ran = threading.Event(), []
    thread.submit(gate.wait)
    thread.submit(lambda: ran.append(1))
    assert ran == []
    gate.set()
    thread.drain()
    assert ran == [1]


def test_close_gives_a_call_up_that_never_ends():
    thread, gate = Background("semblend-test"), threading.Event()
    thread.submit(gate.wait)
    assert thread.close(0) is False
    gate.set()
    assert thread.close(60)


def test_the_process_may_end_while_a_call_runs():
    thread = Background("semblend-test")
    assert thread._thread.daemon
    assert thread.close(60)
