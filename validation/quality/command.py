"""`python -m validation quality`: serves the families under every arm, and writes what was found."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from kernels import results
from kernels.files import write_bytes
from semblend_trt.files import check_writable
from semblend_trt.printable import printable
from validation import models
from validation.arguments import settings_in_text
from validation.arms import COLD, COLD_AGAIN, POSITION_FIX, VERIFIED, arms_of, names_of
from validation.families.catalog import kinds_of, write_cases
from validation.output import beside, progress, write_json, write_text
from validation.quality.arguments import batch_settings, family_request
from validation.quality.batches import BatchServer
from validation.quality.plot import draw
from validation.quality.report import QualityReport
from validation.quality.rows import FILE_NAME, quality_rows
from validation.quality.samples import QualitySample, samples_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from validation.arms import Arm
    from validation.cases import Case


def run_quality(options: argparse.Namespace, command: str) -> bool:
    """Runs and writes everything; True unless the arm verified is inferior to cold in some family.

    Raises SemBlendError and OSError.
    """
    check_writable(options.output)
    paths = _paths(options)
    for path in filter(None, (*paths, options.record and options.record / FILE_NAME)):
        check_writable(path)
    settings, asked = batch_settings(options), family_request(options)
    asked.family_names()
    profile = models.profile_of(options.model, options.profile)
    torch.manual_seed(options.seed)
    engines = models.engines_of(options.engine, options.model, options.device, options.dtype)
    choices = models.choices_of(engines, options.boundary, profile)
    names = _default_names(profile) if options.arms is None else names_of(options.arms)
    arms = arms_of(names, choices)
    cases = write_cases(engines, asked)
    server = BatchServer(engines, cases, settings)
    samples, seconds = _serve(server, cases, arms, choices.num_layers)
    device, dtype = models.place_of(engines, options.dtype)
    report = QualityReport(
        model=settings.model,
        samples=samples,
        kinds=kinds_of(cases),
        settings=settings_in_text(options, dtype=dtype, profile=profile),
        measured=results.Measured.now(command, device, options.machine),
        seconds=seconds,
        seed=options.seed,
    )
    _write(report, paths, options.record)
    return _show(report, paths)


def _default_names(profile: Path | None) -> tuple[str, ...]:
    names = (COLD, COLD_AGAIN, POSITION_FIX)
    return names if profile is None else (*names, VERIFIED)


def _serve(
    server: BatchServer, cases: Sequence[Case], arms: Sequence[Arm], num_layers: int
) -> tuple[list[QualitySample], dict[str, float]]:
    """All arms one after the other, cold first, and the seconds that each took."""
    samples: list[QualitySample] = []
    seconds: dict[str, float] = {}
    cold = None
    with progress(Console(stderr=True), "Serving", server.num_cases * len(arms)) as on_step:
        for arm in sorted(arms, key=lambda arm: arm.name != COLD):
            began = time.perf_counter()
            answers = server.answers(arm, on_step=on_step)
            seconds[arm.name] = time.perf_counter() - began
            cold = answers if cold is None else cold
            samples += samples_of(arm, cases, answers, cold, num_layers)
    return samples, seconds


def _paths(options: argparse.Namespace) -> tuple[Path, Path | None, Path | None]:
    page = options.page or beside(options.output, ".md")
    return options.output, page, options.plot or (page and beside(page, ".png"))


def _write(report: QualityReport, paths: tuple[Path, Path | None, Path | None], record: Path | None) -> None:
    document, page, plot = paths
    write_json(document, report.to_dict())
    if plot is not None:
        title = f"{report.model}, {report.measured.machine['name']}, {report.measured.date}"
        write_bytes(plot, draw(report.panels(), title))
    if page is not None:
        write_text(page, report.page(None if plot is None else plot.name))
    if record is not None:
        results.write_rows(record / report.measured.machine["name"] / FILE_NAME, quality_rows(report))


def _show(report: QualityReport, paths: Sequence[Path | None]) -> bool:
    console = Console(soft_wrap=True)
    inferior = []
    for line in report.lines():
        bounds = [bound.sentence() for bound in (line.exact_match_bound, line.loss_bound) if bound is not None]
        console.print(f"{line.family} {line.arm}: {'; '.join(bounds)}", markup=False, highlight=False)
        if line.arm == VERIFIED and not line.holds:
            inferior.append(line.family)
    rates = ", ".join(
        f"{arm} {sum(sample.arm == arm for sample in report.samples) / max(took, 1e-9):.1f}"
        for arm, took in report.seconds.items()
    )
    console.print(f"prompts a second: {rates}", markup=False, highlight=False)
    for path in filter(None, paths):
        console.print(printable(path), markup=False, highlight=False)
    if inferior:
        Console(stderr=True, soft_wrap=True).print(
            f"validation: {VERIFIED} is inferior to cold, or not shown otherwise, in {', '.join(inferior)}",
            markup=False,
            highlight=False,
        )
    return not inferior
