"""The result rows of a quality run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.results import Row, row
from validation.arms import COLD, POSITION_FIX, VERIFIED, is_reusing
from validation.families.catalog import Kind
from validation.noninferiority import MARGIN
from validation.quality.samples import MIN_COLD_SCORE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.results import Measured
    from validation.quality.report import QualityReport
    from validation.quality.samples import QualityLine

FILE_NAME = "quality.json"
MIN_REUSED_SHARE = 0.90
MAX_PPL_RATIO = 1.005
HEADER_TRAP = "header_trap"


def quality_rows(report: QualityReport, measured: Measured) -> list[Row]:
    """Rows of the run; what it did not measure gets no row."""
    lines = report.lines()
    rows = [each for line in lines if line.arm == VERIFIED for each in _verified_rows(line, measured)]
    harmless = [line for line in report.kind_lines() if line.family == Kind.HARMLESS.value and line.arm == VERIFIED]
    rows += [each for line in harmless for each in _harmless_rows(line, measured)]
    trap = {line.arm: line for line in lines if line.family == HEADER_TRAP}
    if POSITION_FIX in trap and trap[COLD].exact_match and trap[POSITION_FIX].exact_match is not None:
        rows.append(_trap_row(trap[POSITION_FIX], trap[COLD], measured))
    fires = _fires_row(report, measured)
    return rows if fires is None else [*rows, fires]


def _verified_rows(line: QualityLine, measured: Measured) -> Iterator[Row]:
    bound = line.exact_match_bound
    if bound is None or line.exact_match is None:
        return
    cold = line.exact_match - bound.difference
    if cold < MIN_COLD_SCORE:
        return  # what the model cannot answer cold shows nothing by not getting worse
    where = f"cold {cold:.3f}; {bound.samples} prompts in {bound.groups} groups; {_reused(line)}"
    yield row(
        f"verified_em_vs_cold_{line.family}",
        bound.difference,
        "exact match",
        goal=-MARGIN,
        better="higher",
        baseline=where,
        measured=measured,
    )
    if bound.groups > 1:
        yield row(
            f"verified_em_bound_{line.family}",
            bound.lower,
            "exact match",
            goal=-bound.margin,
            better="higher",
            baseline=f"one-sided 95 % lower bound of the difference, paired bootstrap over {bound.groups} groups",
            measured=measured,
        )


def _reused(line: QualityLine) -> str:
    return f"{line.reused:,} of {line.offered:,} offered tokens reused, largest deviation kept {line.largest_kept:.3f}"


def _harmless_rows(line: QualityLine, measured: Measured) -> Iterator[Row]:
    if line.reused_share is not None:
        yield row(
            "verified_reused_share",
            line.reused_share,
            "share",
            goal=MIN_REUSED_SHARE,
            better="higher",
            baseline=f"tokens that the plans offered, harmless families, {line.samples} prompts",
            measured=measured,
        )
    if line.ppl_ratio is not None and line.loss_bound is not None:
        largest = f"{line.loss_bound.largest_ratio:.5f}"
        yield row(
            "verified_ppl_ratio",
            line.ppl_ratio,
            "ratio",
            goal=MAX_PPL_RATIO,
            baseline=f"cold, {line.loss_bound.samples} texts; one-sided 95 % upper bound {largest}",
            measured=measured,
        )


def _trap_row(line: QualityLine, cold: QualityLine, measured: Measured) -> Row:
    assert line.exact_match is not None
    assert cold.exact_match is not None
    return row(
        "position_fix_em_header_trap",
        line.exact_match,
        "exact match",
        goal=cold.exact_match / 2,
        baseline=f"cold {cold.exact_match:.3f}; the trap has to bite; {line.samples} prompts, {line.fires} fires",
        measured=measured,
    )


def _fires_row(report: QualityReport, measured: Measured) -> Row | None:
    unrelated = [s for s in report.samples if report.kinds[s.family] == Kind.NONE.value and is_reusing(s.arm)]
    if not unrelated:
        return None
    arms = list(dict.fromkeys(sample.arm for sample in unrelated))
    return row(
        "unrelated_fires",
        sum(sample.reused > 0 for sample in unrelated),
        "requests",
        goal=0,
        baseline=f"{len(unrelated) // len(arms)} unrelated prompts under each of {', '.join(arms)}",
        measured=measured,
    )
