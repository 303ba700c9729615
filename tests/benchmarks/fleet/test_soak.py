"""The soak: it counts minutes up to growth or a fault, and a short run over a real fleet is whole and dry."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from benchmarks.fleet import soak
from benchmarks.fleet.soak import Sample, Soak
from tests.benchmarks.dry_runs import dry_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def seen(held: Callable[[float], dict[str, int]], minutes: int = 31) -> Soak:
    """What `held(minute)` says, every 10 s."""
    moments = [step / 6 for step in range(1, 6 * minutes)]
    return Soak({"worker": [Sample(each, held(each)) for each in moments]}, minutes=minutes)


def steady(minute: float, **grown: int) -> dict[str, int]:
    return {"memory": 1000, "descriptors": 20, "threads": 10} | grown


def test_what_comes_and_goes_is_no_growth() -> None:
    wild = seen(lambda at: steady(at, memory=1000 + 300 * (at * 6 % 5 == 0), descriptors=20 + round(at * 6) % 3))
    assert wild.held_minutes == 31
    filling = seen(lambda at: steady(at, memory=min(1000, round(200 * at))))
    assert filling.held_minutes == 31
    held_for_a_while = seen(lambda at: steady(at, descriptors=20 + (12 <= at < 19)))
    assert held_for_a_while.held_minutes == 31


@pytest.mark.parametrize(
    ("held", "minutes"),
    [
        (lambda at: steady(at, memory=1000 + round(5 * at)), 14),  # 2 % of 1,037 are 4.2 minutes of growth
        (lambda at: steady(at, descriptors=20 + (at >= 20)), 24),
        (lambda at: steady(at, threads=10 + (at >= 12)), 16),
    ],
)
def test_growth_ends_the_minutes(held: Callable[[float], dict[str, int]], minutes: int) -> None:
    assert seen(held).held_minutes == minutes


def test_a_fault_ends_the_minutes() -> None:
    soaked = seen(steady)
    soaked.fault(17.5, "no answer")
    assert soaked.held_minutes == 17


def test_a_process_is_looked_at() -> None:
    before = soak.look(os.getpid())
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    after = soak.look(os.getpid())
    for each in opened:
        os.close(each)
    assert after["descriptors"] == before["descriptors"] + 3
    assert before["threads"] >= 1
    assert before["memory"] > 1 << 20


def test_a_short_run_is_whole_and_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "MINUTE_SECONDS", 5.0)
    monkeypatch.setattr(soak, "SAMPLE_SECONDS", 1.0)
    monkeypatch.setattr(soak, "TURN_SECONDS", 0.0)
    row = dry_rows(soak, tmp_path, "--minutes", "1")["soak_minutes"]
    assert row.value == 1
    assert "0 wrong or missing" in row.baseline
