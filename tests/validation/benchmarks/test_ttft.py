"""The benchmark's dry run: everything is measured and written, nothing is promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from validation.benchmarks import ttft
from validation.benchmarks.bench_model import (
    DONOR_INSTRUCTION,
    GOAL_SIZE,
    INSTRUCTION,
    MISS_SIZE,
    NEW_TOKENS,
    Prompts,
    label,
)
from validation.scoreboard import read_rows

if TYPE_CHECKING:
    from pathlib import Path


def test_a_dry_run_measures_and_writes_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ttft.main(["--layers", "2", "--sizes", "512", "1024", "--repeats", "1", "--json", str(tmp_path / "out")])
    rows = {row.name: row for row in read_rows(tmp_path)["out/ttft"]}
    for size in ("512", "1k"):
        for name in ("transformers_cold", "cold_ttft", "shifted_ttft", "host_ttft"):
            assert rows[f"{name}_{size}_ms"].value > 0
        for part in ("lookup", "move", "forward", "rest"):
            assert f"shifted_{size}_{part}_ms" in rows
        assert "128 computed" in rows[f"shifted_ttft_{size}_ms"].baseline
    assert {"miss_overhead_512", "boundary3_over_cold_1k"} <= set(rows)
    assert all(row.goal is None and row.holds for row in rows.values())
    assert "--layers 2" in rows["miss_overhead_512"].command
    assert "shifted_ttft_512_ms" in capsys.readouterr().out


def test_without_a_card_only_a_dry_run_is_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        ttft.main([])
    assert "dry run" in capsys.readouterr().err


def test_the_goals_have_the_names_of_the_measured_sizes() -> None:
    assert label(GOAL_SIZE) == "24k"
    assert label(500) == "500"
    assert set(ttft.SHIFTED_GOAL_MS) == set(ttft.VLLM_COLD_MS)
    assert {*ttft.SHIFTED_GOAL_MS, *ttft.GROWTH_SIZES, MISS_SIZE, GOAL_SIZE} <= set(ttft.SIZES)
    assert ttft.cold_goal(4096) is None


def test_prompts_share_the_document_and_nothing_else() -> None:
    prompts = Prompts(1000)
    document = prompts.document(600)
    assert len(document) == 600 - NEW_TOKENS
    donor, first, second = prompts.donor(document), prompts.shifted(document), prompts.shifted(document)
    assert len(donor) == len(first) == len(second) == 600
    assert donor[DONOR_INSTRUCTION:][: len(document)] == first[INSTRUCTION:][: len(document)] == document
    assert first[:INSTRUCTION] != second[:INSTRUCTION]
