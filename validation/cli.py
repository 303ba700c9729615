"""`python -m validation`: runs the comparison, shows it, writes it, and turns the gates into an exit status."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from kernels import results
from semblend_trt.command_line import ended
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable
from semblend_trt.printable import printable
from validation import models, scoreboard
from validation.arguments import PROGRAM, check_integers, parse_run, parse_scoreboard, settings_in_text
from validation.arms import (
    COLD,
    COLD_AGAIN,
    EXACT_PREFIX,
    POSITION_FIX,
    VERIFIED,
    arms_of,
    default_names,
    is_reusing,
    names_of,
)
from validation.calibration.arguments import parse_calibrate, parse_confirm
from validation.calibration.command import run_calibrate, run_confirm
from validation.cases import MAX_FORCED_TOKENS, read_cases
from validation.embedded_engine import EmbeddedEngines
from validation.engines import EMBEDDED
from validation.exactness import plain_difference, stock_difference
from validation.families.catalog import FamilyRequest, write_cases
from validation.gates import GateBounds, gates_of
from validation.judge import Judge, Scorer, judged, scored
from validation.measurement import Measurement, MeasurementSettings
from validation.models import shipped_model
from validation.output import progress, write_json, write_text
from validation.quality.arguments import parse_quality
from validation.quality.command import run_quality
from validation.record import FILE_NAME, end_to_end_rows
from validation.replay.arguments import parse_replay
from validation.replay.command import run_replay
from validation.report import Report
from validation.workloads import DEFAULT_BATCHES, WorkloadWriter

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from validation.arms import ArmChoices
    from validation.cases import Case
    from validation.engines import Engines
    from validation.exactness import Exactness
    from validation.measurement import Measured
    from validation.samples import Sample

ALL_HOLD, GATE_FAILED = 0, 1
# Narrower tables would be cut where the output is no terminal.
_TABLE_WIDTH = 140
_TRAP = FamilyRequest(("header_trap",), groups=3, questions=6, tokens=2_048)
_MACHINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def main(arguments: Sequence[str]) -> int:
    """Runs one command line (without the program's name) and returns its exit status."""
    return ended("validation", lambda: _status(arguments))


def _status(arguments: Sequence[str]) -> int:
    try:
        if arguments and arguments[0] == "scoreboard":
            return _scoreboard(parse_scoreboard(arguments[1:]))
        if arguments and arguments[0] == "quality":
            return ALL_HOLD if run_quality(parse_quality(arguments[1:]), _command(arguments)) else GATE_FAILED
        if arguments and arguments[0] == "calibrate":
            return ALL_HOLD if run_calibrate(parse_calibrate(arguments[1:]), _command(arguments)) else GATE_FAILED
        if arguments and arguments[0] == "confirm":
            return ALL_HOLD if run_confirm(parse_confirm(arguments[1:]), _command(arguments)) else GATE_FAILED
        if arguments and arguments[0] == "replay":
            run_replay(parse_replay(arguments[1:]), _command(arguments))
            return ALL_HOLD
        return _run(parse_run(arguments), _command(arguments))
    except SystemExit as exit_of_argparse:
        return int(exit_of_argparse.code or 0)


def _command(arguments: Sequence[str]) -> str:
    return shlex.join([*PROGRAM.split(), *arguments])


def _run(options: argparse.Namespace, command: str) -> int:
    began = time.perf_counter()
    bounds = GateBounds(**{name: getattr(options, name) for name in GateBounds.__slots__})
    _check_options(options)
    judge = None if options.judge_command is None else Judge.parse(options.judge_command)
    own_cases = None if options.prompts is None else read_cases(options.prompts)
    prefix = "" if options.engine == EMBEDDED else f"{options.engine}_"
    rows_path = None if options.record is None else options.record / f"{prefix}{FILE_NAME}"
    for path in filter(None, (options.output, options.audit_path, rows_path)):
        check_writable(path)
    profile = models.profile_of(options.model, options.profile)
    policy = options.policy or (POSITION_FIX if profile is None else VERIFIED)
    torch.manual_seed(options.seed)
    engines = models.engines_of(options.engine, options.model, options.device, options.dtype)
    device, dtype = models.place_of(engines, options.dtype)
    scorer = None if options.ppl_model is None else Scorer(options.ppl_model, device)
    cases = own_cases or _built_in(engines, options)
    choices = models.choices_of(engines, options.boundary, profile)
    settings = MeasurementSettings(
        model=str(options.model or shipped_model()),
        arms=arms_of(_arm_names(options.arms, policy, choices), choices),
        max_tokens=options.max_tokens,
        min_span=options.min_match_length,
        repeats=options.repeat,
    )
    measured, exactness = _measure(engines, options.engine, cases, settings)
    samples = _scores(measured, cases, scorer, judge)
    report = Report(
        model=settings.model,
        policy=policy,
        samples=samples,
        audit=measured.audit,
        audit_path=str(options.audit_path),
        gates=gates_of(samples, measured.audit[policy], policy, bounds, exactness),
        settings=settings_in_text(options, boundary=choices.boundary, dtype=dtype),
        measured=results.Measured.now(command, device, options.machine),
        seconds=time.perf_counter() - began,
        notes=engines.notes,
    )
    _write(options, report, measured)
    if options.record is not None:
        rows = end_to_end_rows(samples, exactness, device, report.measured, prefix)
        results.write_rows(options.record / report.measured.machine["name"] / f"{prefix}{FILE_NAME}", rows)
    return _show(report, options)


def _arm_names(asked: str | None, policy: str, choices: ArmChoices) -> tuple[str, ...]:
    """The arms of the run; whatever is asked for, those that gates and comparisons read are among them."""
    if not is_reusing(policy):
        raise ConfigurationError(f"--policy is {policy}, an arm that reuses no donor; name one that does.")
    names = default_names(choices) if asked is None else names_of(asked)
    return tuple(dict.fromkeys((COLD, COLD_AGAIN, EXACT_PREFIX, *names, *names_of(policy, "--policy"))))


def _measure(
    engines: Engines, name: str, cases: Sequence[Case], settings: MeasurementSettings
) -> tuple[Measured, Exactness | None]:
    """All samples, and how exact the wrapper is; in the embedded engine where the weights are float32."""
    measurement, exactness = Measurement(engines, cases, settings), None
    prompt = measurement.longest_prompt
    if not isinstance(engines, EmbeddedEngines):
        exactness = stock_difference(engines, settings.model, name, prompt, settings.min_span)
    elif engines.runner.dtype is torch.float32:
        exactness = plain_difference(engines.runner, prompt)
    with progress(Console(stderr=True), "Measuring", measurement.steps) as on_step:
        return measurement.run(on_step), exactness


def _scores(measured: Measured, cases: Sequence[Case], scorer: Scorer | None, judge: Judge | None) -> list[Sample]:
    samples = measured.samples
    if scorer is not None:
        with progress(Console(stderr=True), "Scoring", len(samples)) as on_step:
            samples = scored(samples, cases, scorer, on_step)
    if judge is not None:
        with progress(Console(stderr=True), "Judging", len(samples)) as on_step:
            samples = judged(samples, cases, judge, on_step)
    return samples


def _built_in(engines: Engines, options: argparse.Namespace) -> list[Case]:
    """Harmless prompts, controls, and a trap: rows that stood under other headers in the donor."""
    tokenizer = engines.tokenizer
    writer = WorkloadWriter(lambda text: len(tokenizer.encode(text, add_special_tokens=False)), options.seed)
    context = engines.facts.max_positions - max(options.max_tokens, MAX_FORCED_TOKENS)
    cases = writer.write(DEFAULT_BATCHES, context)
    return cases + write_cases(engines, replace(_TRAP, seed=options.seed, tokens=min(_TRAP.tokens, context)))


def _check_options(options: argparse.Namespace) -> None:
    check_integers(options, max_tokens=1, min_match_length=1, repeat=1, seed=0)
    if options.machine is not None and not _MACHINE_NAME.fullmatch(options.machine):
        raise ConfigurationError(f"--machine is {options.machine!r}; use letters, digits, '-', '_' and '.'.")


def _write(options: argparse.Namespace, report: Report, measured: Measured) -> None:
    write_text(options.audit_path, "".join(json.dumps(event, sort_keys=True) + "\n" for event in measured.events))
    write_json(options.output, report.to_dict())


def _show(report: Report, options: argparse.Namespace) -> int:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    for table in report.tables():
        console.print(table)
    failures = [sample.judge_error for sample in report.samples if sample.judge_error is not None]
    if failures:
        _complain(f"the judge gave no score for {len(failures)} answers; the first time: {failures[0]}")
    for note in report.notes:
        console.print(printable(f"note: {note}"), markup=False, highlight=False)
    told = printable(f"{report.seconds:.0f} s; every sample is in {options.output}")
    console.print(told, markup=False, highlight=False)
    for gate in report.failed:
        _complain(f"gate failed: {gate.sentence()}")
    refused = report.audit[report.policy].rejection_reasons
    if report.failed and refused:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in refused)
        _complain(f"look-ups of the arm {report.policy} that placed nothing: {reasons}")
    return GATE_FAILED if report.failed else ALL_HOLD


def _scoreboard(options: argparse.Namespace) -> int:
    rows = scoreboard.read_rows(options.results)
    if not (options.check or options.write):
        console = Console()
        console = console if console.is_terminal else Console(width=_TABLE_WIDTH)
        console.print(scoreboard.terminal_table(rows))
        return ALL_HOLD
    text = options.readme.read_text(encoding="utf-8")
    renewed = scoreboard.with_tables(text, rows)
    if options.write:
        write_text(options.readme, renewed)
    elif renewed != text:
        _complain(
            f"the tables of {options.readme} differ from the rows in {options.results}; rewrite them with --write"
        )
        return GATE_FAILED
    return ALL_HOLD


def _complain(sentence: str) -> None:
    sys.stderr.write(printable(f"validation: {sentence}") + "\n")
