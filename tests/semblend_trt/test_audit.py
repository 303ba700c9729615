"""Audit lines can be parsed and joined; losing them costs a count, never a request."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from semblend_trt.audit import SCHEMA, AuditLog
from semblend_trt.outcome import Outcome
from tests.engine_wrapper.watching import watched

os_write = os.write


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def lost(log):
    return {reason: count for reason, count in log.dropped.items() if count}


@pytest.fixture
def writes(monkeypatch):
    """What `os.write` is asked for: `gate` closed holds it back, `begun` says that it was called."""
    held = SimpleNamespace(gate=threading.Event(), begun=threading.Event(), threads=set())
    held.gate.set()

    def write(descriptor, data):
        held.threads.add(threading.current_thread().name)
        held.begun.set()
        assert held.gate.wait(60)
        return os_write(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    return held


@pytest.fixture
def path(tmp_path):
    return tmp_path / "logs" / "audit.jsonl"


@pytest.mark.promise("commands", "The audit log says of every...")
def test_who_records_an_event_never_touches_the_file(path, writes):
    """The disk does not answer: events are taken, in order, up to the bound, and written when it answers again."""
    log = AuditLog(path, max_waiting_bytes=1000)
    writes.gate.clear()
    log.event("step", number=0)
    assert writes.begun.wait(60)
    for number in range(1, 100):
        log.event("step", number=number)
    waiting = 100 - lost(log)["slow_disk"]
    assert 1 < waiting < 20
    writes.gate.set()
    log.flush()
    assert [line["number"] for line in read(path)] == list(range(waiting))
    log.event("step", number=100)
    log.close()
    assert [line["number"] for line in read(path)][-1] == 100
    assert lost(log) == {"slow_disk": 100 - waiting}
    assert "semblend-audit" in writes.threads
    assert threading.current_thread().name not in writes.threads


def test_a_disk_that_never_answers_holds_up_no_shutdown(path, writes, monkeypatch, caplog):
    monkeypatch.setattr("semblend_trt.audit._CLOSE_SECONDS", 0.0)
    log = AuditLog(path)
    writes.gate.clear()
    log.event("first")
    assert writes.begun.wait(60)
    log.event("second")
    log.close()
    assert lost(log) == {"slow_disk": 1}
    assert "was not written within 0 seconds" in caplog.text
    writes.gate.set()


def test_a_log_may_end_on_its_own_thread(path):
    """Where the garbage collector happens to run."""
    log = AuditLog(path)
    log._file._background.submit(log.close)
    log._file._background._thread.join(60)
    log.event("late")
    assert lost(log) == {"closed": 1}


@pytest.mark.known_defect(35)
def test_one_file_stays_open(path, monkeypatch):
    opened = watched(monkeypatch, os, "open", lambda _, path, *__: path)
    log = AuditLog(path)
    for number in range(50):
        log.event("step", number=number)
    log.close()
    assert opened == [path]
    assert [line["number"] for line in read(path)] == list(range(50))


@pytest.mark.parametrize("ends", ["del log; gc.collect(); assert pathlib.Path(sys.argv[1]).stat().st_size", ""])
def test_a_log_or_process_that_ends_writes_its_lines(path, ends):
    code = "import gc, pathlib, sys; from semblend_trt.audit import AuditLog; log = AuditLog(sys.argv[1])"
    subprocess.run([sys.executable, "-c", f"{code}; log.event('last'); {ends}", str(path)], check=True)
    assert [line["event"] for line in read(path)] == ["last"]


@pytest.mark.known_defect(35)
def test_processes_that_share_a_file_never_mix_within_a_line(path):
    code = (
        "import sys; from semblend_trt.audit import AuditLog\n"
        "log = AuditLog(sys.argv[1])\n"
        "for number in range(2000): log.event(sys.argv[2], number=number, text='x' * (number % 257))\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "ab"]
    assert [process.wait() for process in processes] == [0, 0]
    lines = read(path)
    for name in "ab":
        assert [line["number"] for line in lines if line["event"] == name] == list(range(2000))


def test_values_of_every_kind_become_json_and_one_without_a_json_form_costs_its_line(path):
    log, endless = AuditLog(path), []
    endless.append(endless)
    kinds = [Outcome.COLD_FALLBACK, np.int32(3), np.arange(3), (1, 2), None, "zeile\nü", float("nan"), [float("inf")]]
    for value in (object(), endless, {1: 2, "a": 3}, {1, "a"}, b"bytes", kinds):
        log.event("kinds", value=value)
    log.close()
    (line,) = read(path)
    assert lost(log) == {"not_json": 5}
    assert line["value"] == ["cold_fallback", 3, [0, 1, 2], [1, 2], None, "zeile\nü", None, [None]]


@pytest.mark.known_defect(35)
def test_line_carries_schema_time_rank_and_event_which_fields_cannot_forge(path):
    before = time.time()
    log = AuditLog(path)
    log.event("real", rank=9, event="forged", schema=0, time=0, name="kept", self="kept")
    log.close()
    (line,) = read(path)
    assert line.pop("time") == pytest.approx(before, abs=60)
    assert line == {"schema": SCHEMA, "rank": 0, "event": "real", "name": "kept", "self": "kept"}


@pytest.mark.promise("commands", "The audit log says of every...")
def test_unwritable_path_is_counted_and_told_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = AuditLog(tmp_path / "file" / "audit.jsonl")
    for _ in range(5):
        log.event("lost")
    log.flush()
    log.close()
    log.event("late")
    assert lost(log) == {"not_written": 5, "closed": 1}
    assert len(caplog.records) == 1


def test_full_disk_loses_only_what_did_not_fit(path, monkeypatch):
    """Two lines of an append fit, and a part of the third one; later lines begin behind its end."""
    log, room = AuditLog(path), [180]

    def write(descriptor, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "full")
        written = os_write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", write)
    gate = threading.Event()
    log._file._background.submit(gate.wait)  # so that all lines go out in one append
    for number in range(4):
        log.event("step", number=number)
    gate.set()
    log.flush()
    assert lost(log) == {"not_written": 2}
    room[0] = 10_000
    log.event("step", number=4)
    log.close()
    *_, torn, _ = lines = path.read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines if line != torn] == [0, 1, 4]
    assert not torn.endswith("}")


def test_a_pipe_without_a_reader_holds_nothing_up(path):
    path.parent.mkdir()
    os.mkfifo(path)
    log = AuditLog(path)
    log.event("told")
    log.flush()
    assert lost(log) == {"not_written": 1}
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        log.event("told")
        log.flush()
        assert json.loads(reader.read())["event"] == "told"
    log.close()
