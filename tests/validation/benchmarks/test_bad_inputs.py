"""The benchmark of bad inputs: it tells refusals from faults at every door, and a short run is whole and dry."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest

from semblend_trt.fleet.wire import EventFormat
from tests.validation.benchmarks.dry_runs import dry_rows
from validation.benchmarks import bad_data, bad_inputs
from validation.benchmarks.bad_data import Answer, TooLongError, spoiled_bytes, spoiled_value, within

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.validation.benchmarks.conftest import Server


def test_what_takes_too_long_is_ended() -> None:
    with pytest.raises(TooLongError, match="longer than"), within(0.01):
        threading.Event().wait(60)


def test_spoiling_is_seeded_and_leaves_the_good_one_as_it_was() -> None:
    good = {"a": [1, {"b": "c"}], "d": 2}
    values = [[spoiled_value(random.Random(seed), good) for seed in range(20)] for _ in range(2)]
    data = [[spoiled_bytes(random.Random(seed), b"some bytes") for seed in range(20)] for _ in range(2)]
    assert repr(values[0]) == repr(values[1])
    assert data[0] == data[1]
    assert good == {"a": [1, {"b": "c"}], "d": 2}
    assert all(each != good for each in values[0])


@pytest.mark.parametrize(
    ("status", "is_bad", "answer"),
    [
        (400, True, Answer.REFUSED),
        (429, False, Answer.REFUSED),
        (200, False, Answer.TAKEN),
        (200, True, Answer.FAULT),
        (500, False, Answer.FAULT),
    ],
)
def test_statuses_are_judged(server: Server, status: int, is_bad: bool, answer: Answer) -> None:
    sent = f"GET /{status} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
    assert bad_inputs._tried("stub", server.port, ("what", sent, is_bad)).answer is answer


def test_no_answer_is_a_fault(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_inputs, "PATIENCE", 0.2)
    tried = bad_inputs._tried("stub", server.port, ("what", b"GET /400 HTTP/1.1\r\n", True))
    assert (tried.answer, "no answer in time" in tried.told) == (Answer.FAULT, True)


@pytest.mark.parametrize(
    ("status", "said", "answer"),
    [
        (2, "--x is 7; give 8", Answer.REFUSED),
        (2, "", Answer.FAULT),
        (2, "Traceback (most recent call last)", Answer.FAULT),
        (1, "a gate failed", Answer.FAULT),
        (0, "fine", Answer.FAULT),
    ],
)
def test_commands_are_judged(monkeypatch: pytest.MonkeyPatch, status: int, said: str, answer: Answer) -> None:
    def command(_: Sequence[str]) -> int:
        print(said)
        return status

    monkeypatch.setitem(bad_inputs.PROGRAMS, "stub", ((), command))
    assert bad_inputs._in_this_process("stub", ["--x", "7"]).answer is answer


def test_a_command_that_raises_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bad_inputs.PROGRAMS, "stub", ((), lambda words: int(words[0])))
    assert "ValueError" in bad_inputs._in_this_process("stub", ["x"]).told


def test_forged_events_that_are_believed_are_faults() -> None:
    reset, *_, purged = bad_data.messages(EventFormat.JSON)
    answers = [
        bad_data._given("what", reset, None, is_bad=True).answer,  # it was said before
        bad_data._given("what", purged, None, is_bad=True).answer,
        bad_data._given("what", purged, None).answer,
    ]
    assert answers == [Answer.REFUSED, Answer.FAULT, Answer.TAKEN]


def test_readers_that_raise_something_else_or_take_bad_files_are_faults(tmp_path: Path) -> None:
    path = tmp_path / "file"
    raising = bad_data._read("what", path, b"x", lambda path: int(path.read_bytes()), is_bad=False)
    taking = bad_data._read("what", path, b"7", lambda path: int(path.read_bytes()), is_bad=True)
    assert (raising.answer, taking.answer) == (Answer.FAULT, Answer.FAULT)


def test_a_short_run_is_whole_and_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All doors are real ones; the longest lists are cut."""
    monkeypatch.setattr(bad_inputs, "_OPTIONS", bad_inputs._OPTIONS[-2:])
    monkeypatch.setattr(bad_inputs, "settings_table", list)
    monkeypatch.setattr(bad_inputs, "_WRONG_FIELDS", {"prompt": (7,), "seed": ("x",)})
    row = dry_rows(bad_inputs, tmp_path, "--spoiled", "4", "--processes", "1")["bad_inputs_refused"]
    assert row.value > 150
    assert "; 0 crashed, hung, ended in 500 or were taken" in row.baseline
    assert all(door in row.baseline for door in ("router", "worker", "events", "files", "command line"))
