"""Rows say what was measured, under the names that documents quote."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from validation.quality.plot import draw
from validation.quality.report import QualityReport
from validation.quality.rows import quality_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.results import Measured
    from validation.quality.samples import QualitySample

    Maker = Callable[..., QualitySample]

KINDS = {"reordered": "harmless", "prose": "harmless", "header_trap": "trap", "unrelated": "none"}


@pytest.fixture
def report(make_quality_sample: Maker, measured: Measured) -> QualityReport:
    samples = []
    for arm in ("cold", "cold_again", "position_fix", "verified"):
        reuses = arm in ("position_fix", "verified")
        for family in KINDS:
            for index in range(8):
                places = reuses and family != "unrelated"
                changes = {
                    "exact_match": None
                    if family == "prose"
                    else not (arm == "position_fix" and family == "header_trap"),
                    "loss": (2.002 if reuses else 2.0) if family == "prose" else None,
                    "offered": 900 if places else 0,
                    "reused": (880 if arm == "verified" else 900) if places else 0,
                }
                case_id = f"{family}-{index}"
                samples.append(make_quality_sample(case_id=case_id, family=family, group=case_id, arm=arm, **changes))
    return QualityReport("tiny", samples, KINDS, {}, measured, {})


def test_rows_have_the_values_and_goals_of_the_run(report: QualityReport) -> None:
    rows = {row.name: row for row in quality_rows(report)}
    assert set(rows) == {
        *(f"verified_em_{what}_{family}" for what in ("vs_cold", "bound") for family in KINDS if family != "prose"),
        *("verified_reused_share", "verified_ppl_ratio", "position_fix_em_header_trap", "unrelated_fires"),
    }
    assert all(row.holds for row in rows.values())
    assert (rows["verified_em_vs_cold_header_trap"].value, rows["verified_em_vs_cold_header_trap"].goal) == (0.0, -0.01)
    assert rows["verified_reused_share"].value == pytest.approx(880 / 900)
    assert rows["verified_ppl_ratio"].value == pytest.approx(1.002002, abs=1e-6)
    assert (rows["position_fix_em_header_trap"].value, rows["position_fix_em_header_trap"].goal) == (0.0, 0.5)
    assert "cold 1.000" in rows["position_fix_em_header_trap"].baseline
    assert rows["unrelated_fires"].value == 0
    assert "8 unrelated prompts under each of position_fix, verified" in rows["unrelated_fires"].baseline


def test_a_family_that_the_model_cannot_answer_gets_no_row(report: QualityReport) -> None:
    samples = [replace(each, exact_match=False) if each.family == "reordered" else each for each in report.samples]
    names = {row.name for row in quality_rows(replace(report, samples=samples))}
    assert {"verified_em_vs_cold_header_trap", "verified_reused_share"} <= names
    assert not {name for name in names if name.endswith("_reordered")}


def test_a_page_has_a_row_for_each_family_and_arm_and_names_the_plot(report: QualityReport) -> None:
    page = report.page("quality.png")
    assert "(quality.png)" in page
    for family in KINDS:
        for arm in ("cold", "cold_again", "position_fix", "verified"):
            assert page.count(f"| {family} | {KINDS[family]} | {arm} |") == 1
    widths = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert len(widths) == 1
    assert "| header_trap | trap | position_fix | 8 | 8 | 0.000 | -1.0000 |" in page
    assert page.count("**no**") == 2  # the family, and all traps together


def test_the_plot_is_a_png_and_its_band_is_the_noise_floor(report: QualityReport) -> None:
    panels = report.panels()
    assert draw(panels, "title").startswith(b"\x89PNG")
    assert {panel.name for panel in panels} == {"harmless", "trap", "none"}
    assert panels[0].noise_floor() == pytest.approx((0.99, 1.01))


def test_the_document_holds_every_sample_and_the_kinds_together(report: QualityReport) -> None:
    document = report.to_dict()
    assert len(document["samples"]) == len(report.samples)
    assert {line["family"] for line in document["kind_lines"]} == {"harmless", "trap", "none"}
    assert [line["arm"] for line in document["noise_floor"]] == ["cold_again"] * 3
