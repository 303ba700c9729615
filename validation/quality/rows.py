"""The result rows of a quality run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.results import Results, Row
from validation.arms import COLD, POSITION_FIX, VERIFIED, is_reusing
from validation.families.catalog import Kind
from validation.metrics import MARGIN
from validation.quality.samples import MIN_COLD_SCORE

if TYPE_CHECKING:
    from validation.quality.report import QualityReport
    from validation.quality.samples import QualityLine

FILE_NAME = "quality.json"
MIN_REUSED_SHARE = 0.90
MAX_PPL_RATIO = 1.005
HEADER_TRAP = "header_trap"


def quality_rows(report: QualityReport) -> list[Row]:
    """Rows of the run; what it did not measure gets no row."""
    results = Results(measured=report.measured, is_shown=False)
    lines = report.lines()
    for line in lines:
        if line.arm == VERIFIED:
            _add_verified(results, line)
    for line in report.kind_lines():
        if line.family == Kind.HARMLESS.value and line.arm == VERIFIED:
            _add_harmless(results, line)
    trap = {line.arm: line for line in lines if line.family == HEADER_TRAP}
    cold, ours = (trap[arm].exact_match if arm in trap else None for arm in (COLD, POSITION_FIX))
    if cold and ours is not None:
        line = trap[POSITION_FIX]
        baseline = f"cold {cold:.3f}; the trap has to bite; {line.samples} prompts, {line.fires} fires"
        results.add("position_fix_em_header_trap", ours, "exact match", baseline, cold / 2)
    unrelated = [s for s in report.samples if report.kinds[s.family] == Kind.NONE.value and is_reusing(s.arm)]
    if unrelated:
        arms = list(dict.fromkeys(sample.arm for sample in unrelated))
        baseline = f"{len(unrelated) // len(arms)} unrelated prompts under each of {', '.join(arms)}"
        results.add("unrelated_fires", sum(sample.reused > 0 for sample in unrelated), "requests", baseline, 0)
    return results.rows


def _add_verified(results: Results, line: QualityLine) -> None:
    bound = line.exact_match_bound
    if bound is None or line.exact_match is None:
        return
    cold = line.exact_match - bound.difference
    if cold < MIN_COLD_SCORE:
        return  # what the model cannot answer cold shows nothing by not getting worse
    reused = (
        f"{line.reused:,} of {line.offered:,} offered tokens reused, largest deviation kept {line.largest_kept:.3f}"
    )
    where = f"cold {cold:.3f}; {bound.samples} prompts in {bound.groups} groups; {reused}"
    results.add(f"verified_em_vs_cold_{line.family}", bound.difference, "exact match", where, -MARGIN, "higher")
    if bound.groups > 1:
        how = f"one-sided 95 % lower bound of the difference, paired bootstrap over {bound.groups} groups"
        results.add(f"verified_em_bound_{line.family}", bound.lower, "exact match", how, -bound.margin, "higher")


def _add_harmless(results: Results, line: QualityLine) -> None:
    if line.reused_share is not None:
        where = f"tokens that the plans offered, harmless families, {line.samples} prompts"
        results.add("verified_reused_share", line.reused_share, "share", where, MIN_REUSED_SHARE, "higher")
    if (loss := line.loss_bound) is not None and line.ppl_ratio is not None:
        where = f"cold, {loss.samples} texts; one-sided 95 % upper bound {loss.largest_ratio:.5f}"
        results.add("verified_ppl_ratio", line.ppl_ratio, "ratio", where, MAX_PPL_RATIO)
