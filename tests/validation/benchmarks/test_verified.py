"""The benchmark's dry run: everything is measured and written, nothing is promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine_wrapper.layer_schedule import DeviationCheck
from validation.benchmarks import verified
from validation.benchmarks.bench_model import CHECKED_PARTS
from validation.scoreboard import read_rows

if TYPE_CHECKING:
    from pathlib import Path


def test_a_dry_run_measures_and_writes_every_row(tmp_path: Path) -> None:
    decide = DeviationCheck.decide
    arguments = ["--layers", "4", "--size", "768", "--repeats", "1", "--json", str(tmp_path / "out")]
    verified.main(arguments)
    assert DeviationCheck.decide is decide
    rows = {row.name: row for row in read_rows(tmp_path)["out/verified"]}
    assert rows["verified_over_cold_768"].value > 0
    assert "check layer 2 of 4" in rows["verified_over_cold_768"].baseline
    assert "128 computed" in rows["verified_ttft_768_ms"].baseline
    assert "at most 256 tokens in a forward" in rows["verified_ttft_768_in_parts_ms"].baseline
    parts = {part: rows[f"verified_768_{part}_ms"].value for part in CHECKED_PARTS}
    assert all(parts[part] > 0 for part in CHECKED_PARTS if part != "rest")
    assert all(row.goal is None and row.holds for row in rows.values())
    assert "--layers 4 --size 768" in rows["verified_over_cold_768"].command


def test_bad_arguments_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        verified.main([])
    assert "dry run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        verified.main(["--layers", "2", "--size", "512", "--check-layer", "2"])
    assert "outside 0..1" in capsys.readouterr().err
