"""`python -m validation quality` serves every family in batches, without times."""

import argparse
import math
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from semblend_trt.files import check_writable, write_bytes
from validation import arguments, models
from validation.arms import COLD, FLOOR_ARMS, POSITION_FIX, VERIFIED, arms_of, is_reusing, names_of
from validation.families.catalog import FAMILIES, Kind, family, write_cases
from validation.measurement import BatchServer
from validation.metrics import CONFIDENCE, MARGIN, RESAMPLES, mean
from validation.report import ARM_NAMES, HEADER_TRAP, Grid, page, show, wrapped
from validation.results import Measured, Results, Row, write_json, write_rows
from validation.samples import Line, Sample, is_known, lines_of

FILE_STEM, _EM = "quality", "exact match"
# Of the columns that a terminal shows.
_WIDTHS = (18, 14, 8, 8, 11, 8, 6, 7)
_MARKED = {each.name for each in FAMILIES if each.marks}
_DESCRIPTION = """
Serves many prompts of every family in batches, cold, cold again in other batches and chunks (the rounding floor) and
under other arms. Compares what they give along cold's own answer by its KL, and scores by a paired bootstrap. Measures
no times. Exit status: 0 the run is complete, 1 the arm verified is inferior to cold somewhere, 2 bad usage or an
error, 130 interrupted.
"""


def parse_quality(given: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a quality run; exits with status 2 for any that argparse refuses."""
    parser = arguments.Parser("quality", _DESCRIPTION)
    arguments.add(parser, *arguments.MODEL, "--profile")
    arms = f"position_fix, and {VERIFIED} where there is a reuse profile; cold, cold_again and cold_otherwise always"
    arguments.add(parser, "--arms", default_in_words=arms)
    arguments.add(parser, "--boundary", "--prompts", "--log", *arguments.FAMILIES)
    arguments.add(parser, "--output", default=Path("results/quality.json"), help="JSON; a page has its name and .html")
    arguments.add(parser, "--record", "--machine")
    parser.add_argument("--name", help="what is served, in the names of result rows and of their file")
    return parser.parse_args(given)


def run_quality(options: argparse.Namespace, command: str) -> bool:
    """Run and write all; True unless verified is inferior to cold somewhere. Raises SemBlendError and OSError."""
    suffix = "" if options.name is None else f"_{options.name}"
    file_name = f"{FILE_STEM}{suffix}.json"
    page_path = arguments.beside(options.output, ".html")
    for path in filter(None, (options.output, page_path, options.record and options.record / file_name)):
        check_writable(path)
    settings, asked = arguments.serving_settings(options), arguments.family_request(options)
    profile = models.profile_of(options.model, options.profile)
    torch.manual_seed(options.seed)
    engines = models.engines_of(options, options.dtype)
    choices = models.choices_of(engines, options.boundary, profile)
    default = (POSITION_FIX, *(() if profile is None else (VERIFIED,)))
    asked_arms = default if options.arms is None else names_of(options.arms)
    arms = arms_of(dict.fromkeys((COLD, *FLOOR_ARMS, *asked_arms)), choices)
    own = arguments.own_cases(options, engines.tokenizer)
    cases = own or write_cases(engines, asked)
    traps = {case.workload for case in own if case.donor_answer is not None}
    of_own = {case.workload: (Kind.TRAP if case.workload in traps else Kind.HARMLESS).value for case in own}
    kinds = of_own or {case.workload: family(case.workload).kind.value for case in cases}
    server = BatchServer(engines, cases, settings)
    samples: list[Sample] = []
    seconds: dict[str, float] = {}
    with arguments.progress("Serving", len(cases) * len(arms)) as on_step:
        for arm in sorted(arms, key=lambda arm: arm.name != COLD):
            began = time.perf_counter()
            samples += server.samples(arm, on_step=on_step)
            seconds[arm.name] = time.perf_counter() - began
    device, dtype = models.place_of(engines, options.dtype)
    report = QualityReport(
        model=models.shown_name(settings.model),
        samples=samples,
        kinds=kinds,
        settings=arguments.settings_in_text(options, dtype=dtype, profile=profile),
        measured=Measured.now(command, device, options.machine),
        seconds=seconds,
        vocabulary=len(engines.tokenizer),
        seed=options.seed,
    )
    write_json(options.output, report.to_dict())
    if options.record is not None:
        write_rows(options.record / report.measured.machine["name"] / file_name, quality_rows(report, suffix))
    if page_path is not None:
        write_bytes(page_path, page(report, cases, engines.tokenizer).encode())
    return _show(report, options.output, page_path)


def _show(report: "QualityReport", output: Path, page_path: Path | None = None) -> bool:
    show(report, sum(report.seconds.values()), output, page_path)
    verified, unknown = [line for line in report.lines if line.arm == VERIFIED], report.unknown()
    inferior = [line.family for line in verified if not line.holds and line.family not in unknown]
    if inferior:
        arguments.complain(f"{VERIFIED} is inferior to cold, or not shown otherwise, in {', '.join(inferior)}")
    return not inferior


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


@dataclass(frozen=True)  # without slots, as it keeps its lines: their bounds take long
class QualityReport:
    """A run's findings. `kinds`: each family's, such as `harmless`. `vocabulary`: tokens the model can give."""

    model: str
    samples: Sequence[Sample]
    kinds: Mapping[str, str]
    settings: dict[str, Any]
    measured: Measured
    seconds: Mapping[str, float]
    vocabulary: int
    seed: int = 0

    @cached_property
    def _cold(self) -> dict[str, Sample]:
        return {sample.case_id: sample for sample in self.samples if sample.arm == COLD}

    @cached_property
    def lines(self) -> list[Line]:
        """One line for each family and arm."""
        return lines_of(self.samples, self._cold, self.seed)

    @property
    def unrelated(self) -> list[Sample]:
        """What reusing arms answered where a prompt shares nothing with a donor."""
        return [s for s in self.samples if self.kinds[s.workload] == Kind.NONE.value and is_reusing(s.arm)]

    @property
    def _moved(self) -> list[Line]:
        """The lines of prompts that hold text which the arm could move."""
        return [line for line in self.lines if is_reusing(line.arm) and line.offered]

    def unknown(self) -> list[str]:
        """Return the families that the model does not know cold: there, an arm's answers decide nothing."""
        colds = (line for line in self.lines if line.arm == COLD)
        return [each.family for each in colds if not is_known(each.exact_match, each.loss, self.vocabulary)]

    @cached_property
    def kind_lines(self) -> list[Line]:
        """One line for each kind of family and arm, over all families of the kind that the model knows cold."""
        unknown = self.unknown()
        # Only texts count by their loss, as the other families are right or wrong.
        by_kind = (
            replace(each, workload=self.kinds[each.workload], loss=each.loss if each.exact_match is None else None)
            for each in self.samples
            if each.workload not in unknown
        )
        return lines_of(by_kind, self._cold, self.seed)

    def floor(self, family: str | None = None) -> float | None:
        """Return the rounding floor of one family, or of all: the larger mean KL in nats of cold's other runs."""
        chosen = [each for each in self.samples if family in (None, each.workload)]
        kls = (mean(each.answer_kl for each in chosen if each.arm == arm) for arm in FLOOR_ARMS)
        return max((kl for kl in kls if kl is not None), default=None)

    def headline(self) -> str:
        """Say in one sentence how far the reusing arms' answers are from cold's."""
        parts = []
        for arm in dict.fromkeys(line.arm for line in self._moved):
            lines = [line for line in self._moved if line.arm == arm]
            changed, prompts = sum(round(x.changed * x.samples) for x in lines), sum(x.samples for x in lines)
            worst = max(lines, key=lambda line: line.answer_kl or 0.0)
            furthest = f"furthest in {worst.family}, KL {_short(worst.answer_kl)}"
            parts.append(f"{ARM_NAMES.get(arm, arm)}: {changed} of {prompts} answers changed, {furthest}")
        if not any(line.arm == VERIFIED for line in self.lines):
            parts.append("checked: not measured, without a reuse profile")
        return "; ".join(parts)

    def figures(self) -> list[tuple[str, str]]:
        """Return a name and a sentence for how to read the table, controls, what shows nothing, and the speed."""
        what = "distance of the next token's probabilities from cold's, along cold's answer, nats a token"
        found = [("KL", f"{what}; floor: that of cold in other batches and chunks, {_short(self.floor())} over all")]
        if unrelated := self.unrelated:
            fires = sum(sample.reused_tokens > 0 for sample in unrelated)
            found.append(("controls", f"{fires} of {len(unrelated)} unrelated prompts reused KV"))
        if unknown := ", ".join(self.unknown()):
            found.append(("exact match", f"decides nothing, as cold rarely answers word for word: {unknown}"))
        for line in self.lines:
            if line.arm == COLD and line.exact_match == line.contains == 0.0:
                cold = [each for each in self._cold.values() if each.workload == line.family][:3]
                said = (f"{textwrap.shorten(each.answer, 60)!r}, not {each.reference!r}" for each in cold)
                found.append((line.family, f"cold answered {'; '.join(said)}"))
        counts = Counter(sample.arm for sample in self.samples)
        rates = (f"{arm} {counts[arm] / max(took, 1e-9):.1f}" for arm, took in self.seconds.items())
        return [*found, ("prompts/s", ", ".join(rates))]

    def screen(self) -> list[str]:
        """Return headline, a table of what the reusing arms do, and figures, as lines of 80 columns."""
        [(_, headings, rows)] = self.grids()
        return wrapped(self, ("".join(map(str.ljust, row, _WIDTHS)).rstrip() for row in (headings, *rows)))

    def grids(self) -> list[Grid]:
        """Return a table of what the reusing arms do, with a row for each line."""
        headings = ["family", "arm", "KL", "floor", "95 % below", "changed", "right", "in cold", "reused", "computed"]
        colds, rows = {line.family: line.contains for line in self.lines if line.arm == COLD}, []
        unknown = self.unknown()
        for line in self._moved:
            kls = (line.answer_kl, self.floor(line.family), line.answer_kl_q95)
            shares = (line.changed, line.contains, colds[line.family], line.reused_share, line.computed_share)
            bounds = (("exact match", line.exact_match_bound), ("log-likelihood", line.loss_bound))
            said = "; ".join(f"{what} {bound.sentence()}" for what, bound in bounds if bound is not None)
            said = "decides nothing: the model does not answer it cold" if line.family in unknown else said
            arm = ARM_NAMES.get(line.arm, line.arm)
            percents = ("-" if each is None else f"{each:.0%}" for each in shares)
            rows.append([line.family, arm, *map(_short, kls), *percents, said])
        return [("Answers beside cold's", [*headings, "bounds"], rows)]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON with every sample. `non_inferior` is null where answers decide nothing: no score has a bound, or
        the model does not know the family cold."""
        unknown = self.unknown()
        lines, kind_lines = (
            [{**asdict(x), "non_inferior": x.holds if x.bounds and x.family not in unknown else None} for x in each]
            for each in (self.lines, self.kind_lines)
        )
        return {
            "schema": 1,
            "model": self.model,
            "margin": MARGIN,
            "confidence": CONFIDENCE,
            "resamples": RESAMPLES,
            "kinds": dict(self.kinds),
            "lines": lines,
            "kind_lines": kind_lines,
            "rounding_floor": self.floor(),
            "settings": self.settings,
            **asdict(self.measured),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "samples": [asdict(sample) for sample in self.samples],
        }


def quality_rows(report: QualityReport, suffix: str = "") -> list[Row]:
    """Return rows of the run's figures; in their names `suffix` comes before the family or the arm."""
    results = Results(measured=report.measured, is_shown=False)
    unknown = report.unknown()
    colds = {line.family: line.exact_match for line in report.lines if line.arm == COLD and line.family not in unknown}
    for line in report.lines:
        # A reusing arm's KL, where the family is for any model.
        if line.answer_kl is not None and is_reusing(line.arm) and line.fires and line.family not in _MARKED:
            where = (
                f"floor {report.floor(line.family) or 0.0:.2g}; 95 % of the prompts below {line.answer_kl_q95:.2g}, "
                f"{line.changed:.1%} changed; {line.computed_share:.3f} computed; {line.samples} prompts in "
                f"{line.groups} groups"
            )
            results.add(f"answer_kl{suffix}_{line.arm}_{line.family}", line.answer_kl, "nats", where)
        cold, score, where = colds.get(line.family), line.exact_match, f"{line.samples} prompts"
        if cold is None or score is None:
            continue
        if line.arm == COLD:
            results.add(f"cold_em{suffix}_{line.family}", score, _EM, f"{where} in {line.groups} groups")
        elif line.arm == VERIFIED:
            _add_verified(results, line, score, suffix)
        elif is_reusing(line.arm) and report.kinds[line.family] == Kind.TRAP.value:
            # The header trap has to bite if nothing is checked or computed again.
            goal = cold / 2 if (line.family, line.arm) == (HEADER_TRAP, POSITION_FIX) else None
            baseline = f"cold {cold:.3f}; {where}, {line.fires} fires"
            results.add(f"{line.arm}_em{suffix}_{line.family}", score, _EM, baseline, goal)
    for line in report.kind_lines:
        if line.family in (Kind.HARMLESS.value, Kind.TRAP.value):
            _add_kind(results, line, suffix)
    if unrelated := report.unrelated:
        arms = list(dict.fromkeys(sample.arm for sample in unrelated))
        baseline = f"{len(unrelated) // len(arms)} unrelated prompts under each of {', '.join(arms)}"
        fires = sum(sample.reused_tokens > 0 for sample in unrelated)
        results.add(f"unrelated_fires{suffix}", fires, "requests", baseline, 0)
    return results.rows


def _add_verified(results: Results, line: Line, score: float, suffix: str) -> None:
    if (bound := line.exact_match_bound) is None:
        return
    where = (
        f"cold {score - bound.difference:.3f}; {bound.samples} prompts in {bound.groups} groups; "
        f"{line.reused:,} of {line.offered:,} offered tokens reused, largest deviation kept {line.largest_kept:.3f}"
    )
    results.add(f"verified_em_vs_cold{suffix}_{line.family}", bound.difference, _EM, where, -MARGIN, "higher")
    if bound.groups > 1:
        how = f"one-sided 95 % lower bound of the difference, paired bootstrap over {bound.groups} groups"
        results.add(f"verified_em_bound{suffix}_{line.family}", bound.lower, _EM, how, -bound.margin, "higher")


def _add_kind(results: Results, line: Line, suffix: str) -> None:
    """Add one arm's figures over a kind's families; an arm that reuses nothing computes all."""
    bound, name = line.exact_match_bound, f"{suffix}_{line.arm}"
    if bound is not None and line.exact_match is not None:
        where = (
            f"{bound.difference:+.4f} from cold, one-sided 95 % lower bound {bound.lower:+.4f}; "
            f"{bound.samples} prompts in {bound.groups} groups"
        )
        results.add(f"{line.family}_em{name}", line.exact_match, _EM, where)
    if is_reusing(line.arm):
        where = f"tokens times layers after the exact prefix, {line.samples} prompts"
        results.add(f"{line.family}_computed_share{name}", line.computed_share, "share", where)
    if (line.family, line.arm) != (Kind.HARMLESS.value, VERIFIED):
        return
    if line.reused_share is not None:
        where = f"tokens that the plans offered, harmless families, {line.samples} prompts"
        results.add(f"verified_reused_share{suffix}", line.reused_share, "share", where, 0.90, "higher")
    if (loss := line.loss_bound) is not None and line.ppl_ratio is not None:
        where = f"cold, {loss.samples} texts; one-sided 95 % upper bound {math.exp(-loss.lower):.5f}"
        results.add(f"verified_ppl_ratio{suffix}", line.ppl_ratio, "ratio", where, 1.005)
