"""The benchmark's dry run: two processes answer as one does, and everything is measured and written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from validation.benchmarks import tensor_parallel
from validation.scoreboard import read_rows

if TYPE_CHECKING:
    from pathlib import Path


def test_a_dry_run_measures_and_writes_every_row(tmp_path: Path) -> None:
    dry = ["--backend", "gloo", "--layers", "2", "--size", "512", "--repeats", "1"]
    tensor_parallel.main([*dry, "--json", str(tmp_path / "out")])
    rows = {row.name: row for row in read_rows(tmp_path)["out/tensor_parallel"]}
    assert rows["tp2_tokens_equal"].value == 1
    assert rows["tp2_ranks_agree"].value == 1
    assert "128 computed" in rows["tp2_shifted_ttft_512_ms"].baseline
    for name in ("cold_ttft_512_ms", "shifted_over_cold_512", "verified_over_cold_512", "shifted_512_move_ms"):
        assert rows[f"tp2_{name}"].value > 0
    assert all(row.goal is None and row.holds for row in rows.values())
    assert "--backend gloo --layers 2" in rows["tp2_tokens_equal"].command


def test_without_cards_only_a_dry_run_is_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit):
        tensor_parallel.main([])
    assert "torch sees 1 CUDA devices" in capsys.readouterr().err
