"""`python -m validation quality`: many prompts of every family, served in batches under every arm, without times."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from semblend_trt.files import check_writable
from validation import arguments, models
from validation.arms import COLD, COLD_AGAIN, POSITION_FIX, VERIFIED, arms_of, is_reusing, names_of
from validation.families.catalog import Kind, family, write_cases
from validation.measurement import BatchServer
from validation.metrics import CONFIDENCE, MARGIN, RESAMPLES
from validation.output import complain, progress, say, write_json
from validation.quality_plot import FILE_STEM
from validation.report import HEADER_TRAP
from validation.results import Measured, Results, Row, write_rows
from validation.samples import Line, Sample, is_known, line_of, lines_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from validation.arms import Arm

SCHEMA = 1
MIN_REUSED_SHARE = 0.90
MAX_PPL_RATIO = 1.005

_DESCRIPTION = """
Serves many prompts of every family in batches, cold, cold again (the noise floor) and under other arms, and compares
their answers with cold's by a paired bootstrap. Measures no times. Exit status: 0 the run is complete, 1 the arm
verified is inferior to cold somewhere, 2 bad usage or an error, 130 interrupted.
"""


def parse_quality(given: Sequence[str]) -> argparse.Namespace:
    """Arguments of a quality run; exits with status 2 for any that argparse refuses."""
    parser = arguments.Parser("quality", _DESCRIPTION)
    arguments.add(parser, *arguments.MODEL, "--profile")
    arguments.add(
        parser, "--arms", told_default=f"cold, cold_again, position_fix, and {VERIFIED} where there is a reuse profile"
    )
    arguments.add(parser, "--boundary", *arguments.FAMILIES)
    arguments.add(parser, "--output", default=Path("results/quality.json"), help="JSON with every sample")
    arguments.add(parser, "--record", "--machine")
    parser.add_argument("--name", help="what is served, in the names of result rows and of their file")
    return parser.parse_args(given)


def run_quality(options: argparse.Namespace, command: str) -> bool:
    """Runs and writes everything; True unless the arm verified is inferior to cold in some family.

    Raises SemBlendError and OSError.
    """
    suffix = "" if options.name is None else f"_{options.name}"
    file_name = f"{FILE_STEM}{suffix}.json"
    for path in filter(None, (options.output, options.record and options.record / file_name)):
        check_writable(path)
    settings, asked = arguments.serving_settings(options), arguments.family_request(options)
    profile = models.profile_of(options.model, options.profile)
    torch.manual_seed(options.seed)
    engines = models.engines_of(options, options.dtype)
    choices = models.choices_of(engines, options.boundary, profile)
    default = (COLD, COLD_AGAIN, POSITION_FIX, *(() if profile is None else (VERIFIED,)))
    arms = arms_of(default if options.arms is None else names_of(options.arms), choices)
    cases = write_cases(engines, asked)
    samples, seconds = _serve(BatchServer(engines, cases, settings), len(cases), arms)
    device, dtype = models.place_of(engines, options.dtype)
    report = QualityReport(
        model=settings.model,
        samples=samples,
        kinds={case.workload: family(case.workload).kind.value for case in cases},
        settings=arguments.settings_in_text(options, dtype=dtype, profile=profile),
        measured=Measured.now(command, device, options.machine),
        seconds=seconds,
        vocabulary=len(engines.tokenizer),
        seed=options.seed,
    )
    write_json(options.output, report.to_dict())
    if options.record is not None:
        write_rows(options.record / report.measured.machine["name"] / file_name, quality_rows(report, suffix))
    return _show(report, options.output)


def _serve(server: BatchServer, prompts: int, arms: Sequence[Arm]) -> tuple[list[Sample], dict[str, float]]:
    """All arms one after the other, cold first, and the seconds that each took."""
    samples: list[Sample] = []
    seconds: dict[str, float] = {}
    with progress("Serving", prompts * len(arms)) as on_step:
        for arm in sorted(arms, key=lambda arm: arm.name != COLD):
            began = time.perf_counter()
            samples += server.samples(arm, on_step=on_step)
            seconds[arm.name] = time.perf_counter() - began
    return samples, seconds


def _show(report: QualityReport, output: Path) -> bool:
    lines = report.lines
    for line in lines:
        say(f"{line.family} {line.arm}: {'; '.join(bound.sentence() for bound in line.bounds)}")
    rates = ", ".join(
        f"{arm} {sum(sample.arm == arm for sample in report.samples) / max(took, 1e-9):.1f}"
        for arm, took in report.seconds.items()
    )
    say(f"prompts a second: {rates}")
    say(output)
    unknown = report.unknown()
    if unknown:
        say(f"shows nothing, as the model does not know it cold: {', '.join(unknown)}")
    inferior = [each.family for each in lines if each.arm == VERIFIED and not each.holds and each.family not in unknown]
    if inferior:
        complain(f"{VERIFIED} is inferior to cold, or not shown otherwise, in {', '.join(inferior)}")
    return not inferior


@dataclass(frozen=True)  # without slots, as it keeps its lines: their bounds take long
class QualityReport:
    """Everything that a run found. `kinds`: each family's kind, `harmless`, `trap` and so on. `vocabulary`: tokens that
    the model can give."""

    model: str
    samples: Sequence[Sample]
    kinds: Mapping[str, str]
    settings: dict[str, Any]
    measured: Measured
    seconds: Mapping[str, float]
    vocabulary: int
    seed: int = 0

    @cached_property
    def lines(self) -> list[Line]:
        """One line for each family and arm."""
        return lines_of(self.samples, self._cold(), self.seed)

    def unknown(self) -> list[str]:
        """Families that the model does not know cold: whatever an arm does to them decides nothing."""
        cold = self._cold()
        lines = lines_of(cold.values(), cold, is_bounded=False)
        return [each.family for each in lines if not is_known(each.exact_match, each.loss, self.vocabulary)]

    @cached_property
    def kind_lines(self) -> list[Line]:
        """One line for each kind of family and arm, over all families of the kind that the model knows cold."""
        by_key: dict[tuple[str, str], list[Sample]] = {}
        unknown, cold = self.unknown(), self._cold()
        for sample in (each for each in self.samples if each.workload not in unknown):
            by_key.setdefault((self.kinds[sample.workload], sample.arm), []).append(sample)
        return [line_of(kind, arm, chosen, cold, self.seed) for (kind, arm), chosen in by_key.items()]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form with every sample."""
        kind_lines = [_fields_of(line) for line in self.kind_lines]
        return {
            "schema": SCHEMA,
            "model": self.model,
            "margin": MARGIN,
            "confidence": CONFIDENCE,
            "resamples": RESAMPLES,
            "kinds": dict(self.kinds),
            "lines": [_fields_of(line) for line in self.lines],
            "kind_lines": kind_lines,
            "noise_floor": [line for line in kind_lines if line["arm"] == COLD_AGAIN],
            "settings": self.settings,
            **asdict(self.measured),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "samples": [asdict(sample) for sample in self.samples],
        }

    def _cold(self) -> dict[str, Sample]:
        return {sample.case_id: sample for sample in self.samples if sample.arm == COLD}


def _fields_of(line: Line) -> dict[str, Any]:
    return {**asdict(line), "non_inferior": line.holds}


def quality_rows(report: QualityReport, suffix: str = "") -> list[Row]:
    """Rows of the figures that the run measured; `suffix` stands behind what a row tells, in front of its family, or
    of its arm where it is over all families of a kind."""
    results = Results(measured=report.measured, is_shown=False)
    lines = report.lines
    unknown = report.unknown()
    cold = {
        line.family: line.exact_match
        for line in lines
        if line.arm == COLD and line.exact_match is not None and line.family not in unknown
    }
    for line in (each for each in lines if each.family in cold):
        if line.arm == COLD:
            where = f"{line.samples} prompts in {line.groups} groups"
            results.add(f"cold_em{suffix}_{line.family}", cold[line.family], "exact match", where)
        elif line.arm == VERIFIED:
            _add_verified(results, line, suffix)
        elif is_reusing(line.arm) and report.kinds[line.family] == Kind.TRAP.value:
            _add_unchecked(results, line, cold[line.family], suffix)
    for line in report.kind_lines:
        if line.family in (Kind.HARMLESS.value, Kind.TRAP.value):
            _add_kind(results, line, suffix)
        if line.family == Kind.HARMLESS.value and line.arm == VERIFIED:
            _add_harmless(results, line, suffix)
    unrelated = [s for s in report.samples if report.kinds[s.workload] == Kind.NONE.value and is_reusing(s.arm)]
    if unrelated:
        arms = list(dict.fromkeys(sample.arm for sample in unrelated))
        baseline = f"{len(unrelated) // len(arms)} unrelated prompts under each of {', '.join(arms)}"
        fires = sum(sample.reused_tokens > 0 for sample in unrelated)
        results.add(f"unrelated_fires{suffix}", fires, "requests", baseline, 0)
    return results.rows


def _add_verified(results: Results, line: Line, suffix: str) -> None:
    bound = line.exact_match_bound
    if bound is None or line.exact_match is None:
        return
    reused = (
        f"{line.reused:,} of {line.offered:,} offered tokens reused, largest deviation kept {line.largest_kept:.3f}"
    )
    cold = line.exact_match - bound.difference
    where = f"cold {cold:.3f}; {bound.samples} prompts in {bound.groups} groups; {reused}"
    results.add(f"verified_em_vs_cold{suffix}_{line.family}", bound.difference, "exact match", where, -MARGIN, "higher")
    if bound.groups > 1:
        how = f"one-sided 95 % lower bound of the difference, paired bootstrap over {bound.groups} groups"
        results.add(
            f"verified_em_bound{suffix}_{line.family}", bound.lower, "exact match", how, -bound.margin, "higher"
        )


def _add_unchecked(results: Results, line: Line, cold: float, suffix: str) -> None:
    """What an arm without a calibrated check makes of a trap. The header trap has to bite where nothing is computed
    again."""
    if line.exact_match is None:
        return
    baseline = f"cold {cold:.3f}; {line.samples} prompts, {line.fires} fires"
    goal = cold / 2 if (line.family, line.arm) == (HEADER_TRAP, POSITION_FIX) else None
    results.add(f"{line.arm}_em{suffix}_{line.family}", line.exact_match, "exact match", baseline, goal)


def _add_kind(results: Results, line: Line, suffix: str) -> None:
    """A point of the plot: one arm over all families of a kind. Arms that reuse nothing compute all."""
    bound = line.exact_match_bound
    if bound is not None and line.exact_match is not None:
        where = f"{bound.difference:+.4f} from cold, one-sided 95 % lower bound {bound.lower:+.4f}; "
        where += f"{bound.samples} prompts in {bound.groups} groups"
        results.add(f"{line.family}_em{suffix}_{line.arm}", line.exact_match, "exact match", where)
    if is_reusing(line.arm):
        where = f"tokens times layers behind the exact prefix, {line.samples} prompts"
        results.add(f"{line.family}_computed_share{suffix}_{line.arm}", line.computed_share, "share", where)


def _add_harmless(results: Results, line: Line, suffix: str) -> None:
    if line.reused_share is not None:
        where = f"tokens that the plans offered, harmless families, {line.samples} prompts"
        results.add(f"verified_reused_share{suffix}", line.reused_share, "share", where, MIN_REUSED_SHARE, "higher")
    if (loss := line.loss_bound) is not None and line.ppl_ratio is not None:
        where = f"cold, {loss.samples} texts; one-sided 95 % upper bound {loss.largest_ratio:.5f}"
        results.add(f"verified_ppl_ratio{suffix}", line.ppl_ratio, "ratio", where, MAX_PPL_RATIO)
