"""The report holds every sample, the old names, tables with a line for each arm, and the rows of a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from validation.arms import DEFAULT_NAMES
from validation.audit_log import AuditCounts
from validation.exactness import Exactness
from validation.gates import Gate
from validation.output import write_json
from validation.report import Report, end_to_end_rows, summaries

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
    assert (document["num_samples"], document["mean_speedup"], document["passed"]) == (3, pytest.approx(2.0), False)
    assert {"mean_rouge1_f1", "mean_token_f1", "versions", "machine", "command", "date"} <= document.keys()
    assert (document["audit"]["path"], document["audit"]["rejection_reasons"]) == ("audit.jsonl", {"no_runs": 1})
    assert [gate["holds"] for gate in document["gates"]] == [True, False]
    assert document["noise_floor"]["arm"] == "cold_again"


def test_tables_have_a_line_for_each_workload_and_arm(report: Report) -> None:
    console = Console(width=140, force_terminal=False)
    with console.capture() as capture:
        for table in report.tables():
            console.print(table)
    text = capture.get()
    assert all(text.count(f" {arm} ") >= 2 for arm in DEFAULT_NAMES)
    assert "unrelated" in text
    assert "rouge1" in text


def test_speed_and_tokens_are_over_timed_samples_answers_over_all(make_sample: Maker) -> None:
    samples = [make_sample(ttft_s=1.0, computed_tokens=90), make_sample(ttft_s=3.0, computed_tokens=110)]
    samples += [make_sample(ttft_s=9.0, computed_tokens=4, timed=False, speedup=None, exact_match=False)]
    [line] = summaries(samples)
    assert (line["samples"], line["timed"], line["ttft_median_s"], line["computed_tokens"]) == (3, 2, 2.0, 100)
    assert line["ttft_p95_s"] == pytest.approx(2.9)
    assert line["exact_match"] == pytest.approx(2 / 3)
    assert (line["fires"], line["outcomes"]) == (3, {"backend_materialized_reuse": 3})


def test_the_rows_of_a_run_have_their_names(make_sample: Maker, measured: Measured) -> None:
    samples = []
    for size in ("2048", "4096"):
        samples += [make_sample(size=size, arm="cold", speedup=1.0, ttft_s=0.4), make_sample(size=size)]
    samples.append(make_sample(workload="unrelated", expects="none", reused_tokens=0))
    rows = {row.name: row for row in end_to_end_rows(samples, Exactness(1e-5, "stock"), "cpu", measured)}
    names = ("shifted_2k_ttft_speedup", "shifted_4k_ttft_speedup", "harmless_em_drop", "unrelated_fires")
    assert list(rows) == [*(f"cpu_{name}" for name in names), "wrapper_exactness_max_logit_diff"]
    assert all(row.holds for row in rows.values())
    assert rows["cpu_shifted_4k_ttft_speedup"].value == 4.0
    assert "400 ms" in rows["cpu_shifted_4k_ttft_speedup"].baseline
    assert not end_to_end_rows([make_sample(workload="prompts", size="any")], None, "cpu", measured)


def test_a_run_with_a_profile_and_a_trap_has_rows_of_both(make_sample: Maker, measured: Measured) -> None:
    samples = [make_sample(arm="cold", speedup=1.0, ttft_s=0.4)]
    samples += [make_sample(arm=arm) for arm in ("position_fix", "verified")]
    samples += [
        make_sample(workload="header_trap", arm=arm, exact_match=right)
        for arm, right in (("cold", True), ("position_fix", False), ("verified", True))
    ]
    rows = {row.name: row for row in end_to_end_rows(samples, None, "cpu", measured)}
    assert rows["cpu_verified_2k_ttft_speedup"].value == 4.0
    assert "of which verified computes" in rows["cpu_verified_2k_ttft_speedup"].baseline
    assert (rows["cpu_verified_em_drop"].value, rows["cpu_verified_em_drop"].holds) == (0.0, True)
    assert (rows["cpu_trap_position_fix_em"].value, rows["cpu_trap_position_fix_em"].goal) == (0.0, 0.5)
    # The trap is no harmless prompt.
    assert rows["cpu_harmless_em_drop"].value == 0.0
