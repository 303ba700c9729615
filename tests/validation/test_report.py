"""The report holds every sample, the old names, and tables with a line for each arm."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from validation.arms import DEFAULT_NAMES
from validation.audit_log import AuditCounts
from validation.files import write_json
from validation.gates import Gate
from validation.report import Report
from validation.summary import summarise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernels.results import Measured
    from validation.samples import Sample

    Maker = Callable[..., Sample]


@pytest.fixture
def report(make_sample: Maker, measured: Measured) -> Report:
    samples = [
        make_sample(case_id=f"case-{index}", arm=arm, ttft_s=0.1 * (index + 1), speedup=float(index + 1))
        for index in range(3)
        for arm in DEFAULT_NAMES
    ]
    samples.append(make_sample(workload="unrelated", expects="none", reason="no_runs", outcome="cold_fallback"))
    return Report(
        model="tiny",
        policy="position_fix",
        samples=samples,
        audit={"position_fix": AuditCounts(5, 3, 2, 2, rejection_reasons=(("no_runs", 1),))},
        audit_path="audit.jsonl",
        gates=[Gate("speedup", 2.0, 1.05, "higher", "reads"), Gate("rouge1", 0.1, 0.35, "higher", "reads")],
        settings={"seed": 0},
        measured=measured,
        seconds=1.5,
    )


def test_json_has_every_sample_and_the_old_names(report: Report, tmp_path: Path) -> None:
    write_json(tmp_path / "report.json", report.to_dict())
    document = json.loads((tmp_path / "report.json").read_text())
    assert len(document["samples"]) == len(report.samples)
    assert document["num_samples"] == 3
    assert document["mean_speedup"] == pytest.approx(2.0)
    assert {"mean_rouge1_f1", "mean_token_f1", "versions", "machine", "command", "date"} <= document.keys()
    assert document["audit"]["path"] == "audit.jsonl"
    assert document["audit"]["rejection_reasons"] == {"no_runs": 1}
    assert document["passed"] is False
    assert [gate["holds"] for gate in document["gates"]] == [True, False]
    assert document["noise_floor"]["arm"] == "cold_again"


def test_tables_have_a_line_for_each_workload_and_arm(report: Report) -> None:
    console = Console(width=140, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        for table in report.tables():
            console.print(table)
    text = capture.get()
    for arm in DEFAULT_NAMES:
        assert text.count(f" {arm} ") >= 2
    assert "unrelated" in text
    assert "rouge1" in text


def test_summary_keeps_timed_and_untimed_apart(make_sample: Maker) -> None:
    samples = [make_sample(ttft_s=1.0), make_sample(ttft_s=3.0), make_sample(ttft_s=9.0, timed=False, speedup=None)]
    [line] = summarise(samples)
    assert (line.samples, line.timed, line.ttft_median_s) == (3, 2, 2.0)
    assert line.ttft_p95_s == pytest.approx(2.9)
    assert line.outcomes == {"backend_materialized_reuse": 3}
    assert line.fires == 3
