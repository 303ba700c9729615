"""The benchmark of the estimate: its prompts are as long as asked for, and its rows come from runs of the command."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from benchmarks.commands import estimate
from tests.benchmarks.dry_runs import dry_rows

if TYPE_CHECKING:
    from pathlib import Path


def test_a_short_run_is_whole_and_dry(tmp_path: Path) -> None:
    rows = dry_rows(estimate, tmp_path, "--prompts", "20", "--served", "30", "--tokens", "400")
    assert set(rows) == {
        "estimate_prompts_per_s",
        "estimate_processor_ms",
        "estimate_peak_mib",
        "estimate_growth_bytes",
        "estimate_equals_served",
    }
    assert "20 prompts of 4" in rows["estimate_prompts_per_s"].baseline
    assert rows["estimate_peak_mib"].value > 50
    assert rows["estimate_equals_served"].value == 1


def test_prompts_are_about_as_long_as_asked_for_and_a_failed_run_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    make = partial(estimate.write_log, log, 10)
    for tokens in (256, 2_048):
        make(tokens)
        assert estimate.estimate(log, 10).tokens / 10 == pytest.approx(tokens, rel=0.15)
    log.write_text("")
    with pytest.raises(estimate.subprocess.CalledProcessError):
        estimate.estimate(log, 10)
