"""Calls run in order on one thread, also after one that raises; a warning that repeats is said once a minute."""

import errno
import logging
import threading

import pytest

from semblend_trt.background import Background, OnceAMinute

logger = logging.getLogger("test_background")


def test_a_call_that_fails_is_told_and_ends_nothing(caplog):
    thread, ran = Background("semblend-test"), []
    for call in (lambda: ran.append(0), lambda: [][0], lambda: ran.append(threading.current_thread().name)):
        thread.submit(call)
    thread.drain()
    assert ran == [0, "semblend-test"]
    assert "a call in the background failed" in caplog.text
    assert thread.close(60)


def test_close_gives_a_call_up_that_never_ends():
    thread, gate = Background("semblend-test"), threading.Event()
    thread.submit(gate.wait)  # and waits for nothing
    assert thread.close(0) is False
    gate.set()
    assert thread.close(60)


@pytest.fixture
def said(caplog):
    """said(): the messages that the filter let through; a log call's `now` sets the filter's clock."""
    seconds = [0.0]

    class Clocked(OnceAMinute):
        def filter(self, record):
            seconds[0] = getattr(record, "now", seconds[0])
            return super().filter(record)

    quiet = Clocked(lambda: seconds[0])
    caplog.handler.addFilter(quiet)
    caplog.set_level(logging.INFO)
    yield lambda: [record.getMessage() for record in caplog.records]
    caplog.handler.removeFilter(quiet)  # all tests have one handler


def test_one_kind_is_said_once_a_minute_with_its_count(said):
    for now in (0, 1, 59, 61, 62, 200):
        logger.error("no descriptors: %s", "EMFILE", extra={"now": now})
    again = [f" (and {count} more like it since it was last said)" for count in (2, 1)]
    assert said() == ["no descriptors: EMFILE" + each for each in ("", *again)]


def test_other_failures_are_said_and_a_donors_name_makes_no_new_kind(said):
    full, broken = OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken")
    for name, error in (("a", full), ("b", full), ("c", broken), ("d", ValueError()), ("e", broken)):
        logger.warning("%s is not written: %s", name, error)
    for error in (ValueError("x"), KeyError("x"), ValueError("y")):
        logger.error("it failed", exc_info=error)
    for _ in range(2):
        logger.info("as asked")
    assert [each[:1] for each in said()[:3]] == ["a", "c", "d"]
    assert said()[3:] == ["it failed", "it failed", "as asked", "as asked"]
