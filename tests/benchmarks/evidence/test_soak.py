"""The soak counts minutes up to growth or a fault, and a short run is whole and dry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.evidence import soak
from benchmarks.evidence.soak import Sample, Soak
from tests.benchmarks.dry_runs import dry_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def steady(minute: float, **grown: int) -> dict[str, int]:
    return {"memory": 1000, "descriptors": 20, "threads": 10} | grown


@pytest.mark.parametrize(
    ("held", "minutes"),
    [
        (lambda at: steady(at, memory=1000 + 300 * (at * 6 % 5 == 0), descriptors=20 + round(at * 6) % 3), 31),
        (lambda at: steady(at, memory=min(1000, round(200 * at))), 31),
        (lambda at: steady(at, descriptors=20 + (12 <= at < 19)), 31),
        (lambda at: steady(at, memory=1000 + round(5 * at)), 14),  # 2 % of 1,037 are 4.2 minutes of growth
        (lambda at: steady(at, descriptors=20 + (at >= 20)), 24),
        (lambda at: steady(at, threads=10 + (at >= 12)), 16),
    ],
)
def test_growth_ends_the_minutes_and_what_comes_and_goes_is_none(
    held: Callable[[float], dict[str, int]], minutes: int
) -> None:
    samples = [Sample(step / 6, held(step / 6)) for step in range(1, 6 * 31)]
    assert Soak(samples, minutes=31).held_minutes == minutes
    assert Soak(samples, minutes=31, faults=[12.5]).held_minutes == 12


def test_a_short_run_is_whole_and_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "MINUTE_SECONDS", 5.0)
    monkeypatch.setattr(soak, "SAMPLE_SECONDS", 1.0)
    monkeypatch.setattr(soak, "TURN_SECONDS", 0.0)
    row = dry_rows(soak, tmp_path, "--minutes", "1")["soak_minutes"]
    assert row.value == 1
    assert "; 0 wrong;" in row.baseline
