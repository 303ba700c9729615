"""The benchmarks of the model: dry runs measure and write every row, and nothing else runs without a card."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.embedded import saving, tensor_parallel, ttft, verified
from benchmarks.embedded.bench_model import (
    CHECKED_PARTS,
    DONOR_INSTRUCTION,
    GOAL_SIZE,
    INSTRUCTION,
    MISS_SIZE,
    NEW_TOKENS,
    Prompts,
    label,
)
from benchmarks.embedded.saving import Turn
from engine_wrapper.layer_schedule import DeviationCheck
from tests.benchmarks.dry_runs import dry_rows
from validation.results import Measured, Results

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


def test_ttft_measures_and_writes_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = dry_rows(ttft, tmp_path, "--layers", "2", "--sizes", "512", "1024", "--repeats", "1")
    for size in ("512", "1k"):
        for name in ("transformers_cold", "cold_ttft", "shifted_ttft", "host_ttft"):
            assert rows[f"{name}_{size}_ms"].value > 0
        for part in ("lookup", "move", "forward", "rest"):
            assert f"shifted_{size}_{part}_ms" in rows
        assert "128 computed" in rows[f"shifted_ttft_{size}_ms"].baseline
    assert {"miss_overhead_512", "boundary3_over_cold_1k"} <= set(rows)
    assert "shifted_ttft_512_ms" in capsys.readouterr().out


def test_verified_measures_and_writes_every_row(tmp_path: Path) -> None:
    decide = DeviationCheck.decide
    rows = dry_rows(verified, tmp_path, "--layers", "4", "--size", "768", "--repeats", "1")
    assert DeviationCheck.decide is decide
    assert rows["verified_over_cold_768"].value > 0
    assert rows["verified_sampled_over_cold_768"].value > 0
    assert "8 documents of 80 tokens out of 24" in rows["verified_over_cold_640_rag"].baseline
    assert "check layer 2 of 4" in rows["verified_over_cold_768"].baseline
    assert "128 computed" in rows["verified_ttft_768_ms"].baseline
    assert "at most 256 tokens in a forward" in rows["verified_ttft_768_in_parts_ms"].baseline
    assert all(rows[f"verified_768_{part}_ms"].value > 0 for part in CHECKED_PARTS if part != "rest")


def test_saving_measures_and_writes_every_row(tmp_path: Path) -> None:
    """Both engines carry the load, one of them saves."""
    rows = dry_rows(saving, tmp_path, "--layers", "2", "--size", "256", "--steps", "3", "--repeats", "2")
    parts = ("slowdown_prefill", "slowdown_decode", "slowdown_worst_step", "slowdown", "256_ms")
    assert set(rows) == {f"saving_{kind}{part}" for kind in ("", "snapshot_") for part in parts}
    assert all(row.value > 0 for row in rows.values())
    assert rows["saving_slowdown"].value >= rows["saving_slowdown_decode"].value


def test_tensor_parallel_measures_and_writes_every_row(tmp_path: Path) -> None:
    """Two processes answer as one does."""
    dry = ("--backend", "gloo", "--layers", "2", "--size", "512", "--repeats", "1")
    rows = dry_rows(tensor_parallel, tmp_path, *dry)
    assert rows["tp2_tokens_equal"].value == rows["tp2_ranks_agree"].value == 1
    assert "128 computed" in rows["tp2_shifted_ttft_512_ms"].baseline
    for name in ("cold_ttft_512_ms", "shifted_over_cold_512", "verified_over_cold_512", "shifted_512_move_ms"):
        assert rows[f"tp2_{name}"].value > 0


@pytest.mark.parametrize(
    ("benchmark", "arguments", "told"),
    [
        (ttft, [], "is a dry run"),
        (saving, [], "is a dry run"),
        (verified, [], "is a dry run"),
        (verified, ["--layers", "2", "--size", "512", "--check-layer", "2"], "outside 0..1"),
        (tensor_parallel, [], "torch sees 0 CUDA devices"),
    ],
)
def test_bad_arguments_are_refused_and_without_a_card_a_dry_run_is_offered(
    benchmark: ModuleType,
    arguments: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    assert told in capsys.readouterr().err


def test_the_goals_are_of_sizes_that_are_measured() -> None:
    assert (label(GOAL_SIZE), label(500)) == ("24k", "500")
    assert {*ttft.SHIFTED_GOAL_MS, *ttft.VLLM_COLD_MS, *ttft.GROWTH_SIZES, MISS_SIZE, GOAL_SIZE} <= set(ttft.SIZES)


def test_the_larger_slowdown_is_the_one_that_is_promised() -> None:
    rows = Results(measured=Measured("command", {}, {}, "2026-11-21"))
    pairs = [[Turn(prefill, 33.0, 9.0), Turn(100.0, 30.0, 3.0)] for prefill in (101.0, 102.0, 150.0)]
    saving.rows_of(pairs, 8_192, 32, rows)
    assert [(row.name, row.value, row.goal) for row in rows.rows] == [
        ("saving_slowdown_prefill", pytest.approx(1.02), None),
        ("saving_slowdown_decode", pytest.approx(1.1), None),
        ("saving_slowdown_worst_step", pytest.approx(3.0), None),
        ("saving_slowdown", pytest.approx(1.1), saving.SAVING_SLOWDOWN),
    ]


def test_prompts_share_the_document_and_nothing_else() -> None:
    prompts = Prompts(1000)
    document = prompts.document(600)
    assert len(document) == 600 - NEW_TOKENS
    donor, first, second = prompts.donor(document), prompts.shifted(document), prompts.shifted(document)
    assert len(donor) == len(first) == len(second) == 600
    assert donor[DONOR_INSTRUCTION:][: len(document)] == first[INSTRUCTION:][: len(document)] == document
    assert first[:INSTRUCTION] != second[:INSTRUCTION]
