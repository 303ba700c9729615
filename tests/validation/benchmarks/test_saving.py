"""The benchmark's dry run: both engines carry the load, one of them saves, and nothing is promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from validation.benchmarks import saving
from validation.benchmarks.saving import Turn
from validation.scoreboard import read_rows

if TYPE_CHECKING:
    from pathlib import Path


def test_a_dry_run_measures_and_writes_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--layers", "2", "--size", "256", "--steps", "3", "--repeats", "2"]
    saving.main([*arguments, "--json", str(tmp_path / "out")])
    rows = {row.name: row for row in read_rows(tmp_path)["out/saving"]}
    parts = ("slowdown_prefill", "slowdown_decode", "slowdown_worst_step", "slowdown", "256_ms")
    assert set(rows) == {f"saving_{kind}{part}" for kind in ("", "snapshot_") for part in parts}
    assert all(row.value > 0 and row.goal is None for row in rows.values())
    assert rows["saving_slowdown"].value >= rows["saving_slowdown_decode"].value
    assert "--layers 2 --size 256 --steps 3 --repeats 2" in rows["saving_slowdown"].command
    assert "saving_slowdown" in capsys.readouterr().out


def test_the_larger_slowdown_is_the_one_that_is_promised() -> None:
    class Rows:
        def __init__(self) -> None:
            self.rows: dict[str, tuple[float, float | None]] = {}

        def add(self, name: str, value: float, unit: str, baseline: str, goal: float | None = None) -> None:
            self.rows[name] = (value, goal)

    rows = Rows()
    pairs = [[Turn(prefill, 33.0, 9.0), Turn(100.0, 30.0, 3.0)] for prefill in (101.0, 102.0, 150.0)]
    saving.rows_of(pairs, 8_192, 32, rows)  # type: ignore[arg-type]
    assert rows.rows == {
        "saving_slowdown_prefill": (pytest.approx(1.02), None),
        "saving_slowdown_decode": (pytest.approx(1.1), None),
        "saving_slowdown_worst_step": (pytest.approx(3.0), None),
        "saving_slowdown": (pytest.approx(1.1), saving.SAVING_SLOWDOWN),
    }


def test_without_a_card_only_a_dry_run_is_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        saving.main([])
    assert "dry run" in capsys.readouterr().err
