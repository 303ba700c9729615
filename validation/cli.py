"""`python -m validation`: run the comparison, show it, write it, and turn the gates into an exit status."""

import argparse
import json
import os
import re
import shlex
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from semblend_trt.command_line import ended, named
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable, read_text, write_bytes
from validation import arguments, models, results
from validation.arms import POSITION_FIX, VERIFIED, arms_of, names_of_run
from validation.calibration.calibration import parse_calibrate, parse_confirm, run_calibrate, run_confirm
from validation.cases import MAX_FORCED_TOKENS
from validation.embedded_engine import EmbeddedEngines
from validation.engines import EMBEDDED, SGLANG, VLLM, Engines, audit_counts
from validation.exactness import Exactness, plain_difference, stock_difference
from validation.families.catalog import write_timed
from validation.measurement import Measurement, ServingSettings
from validation.models import shipped_model
from validation.quality import parse_quality, run_quality
from validation.replay.command import parse_replay, run_replay
from validation.report import BOUNDS, FILE_NAME, Report, check_bounds, end_to_end_rows, gates_of, page, show

_DESCRIPTION = """
Serves the same prompts cold, cold again (the noise floor), with an exact prefix cache, and with reuse under several
policies; compares times and answers. As the first word, `quality` compares answers at scale and without times,
`calibrate` finds what a model may safely reuse, `confirm` whether that holds in another engine, `replay` predicts what
eviction policies do with request telemetry, `scoreboard` prints the recorded results; each has a --help of its own.
Exit status: 0 all gates hold, 1 a gate failed (named on stderr), 2 bad usage or an error, 130 interrupted.
"""
_GATES = """
gates:
  speedup, rouge1, token_f1: of the arm named by --policy, where reuse is expected: median of cold's TTFT over its own;
  mean ROUGE-1 and mean token F1 of its answers against cold's.
  exact_match_drop: cold's exact match minus the arm's, there, where the answer is known; at most the noise floor's drop
  and 0.01 more. perplexity_ratio: geometric mean of the arm's perplexity over cold's, there; at most 1.01 times the
  noise floor's.
  unrelated_fires (= 0) and exact_prefix_untouched (= 1) read every reusing arm.
  donor_registrations to rope_corrections count events in the audit log of the arm named by --policy.
  wrapper_exactness (<= 1e-4): logits of the wrapper against the plain forward; float32 only. With --engine vllm or
  --kv-dtype fp8 against the engine's own, in any type, and no more than those differ among themselves.
  A gate without a sample to read (with --prompts or --log) is shown as such and does not fail.
"""


def parse_scoreboard(given: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of `scoreboard`; exits with status 2 for any that argparse refuses."""
    what = "Prints all result rows; compares or rewrites the tables on pages that are made of them."
    parser = arguments.Parser("scoreboard", what)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder of result rows")
    pages = ("README.md", "docs/results.md", "docs/quality.md", "docs/fleet.md")
    which = f"pages that hold tables (default: {' '.join(pages)})"
    parser.add_argument("--pages", type=Path, nargs="+", default=[*map(Path, pages)], metavar="FILE", help=which)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="exit with 1 when the pages' tables differ from the rows")
    action.add_argument("--write", action="store_true", help="rewrite the pages' tables")
    return parser.parse_args(given)


def run_scoreboard(options: argparse.Namespace, command: str) -> bool:  # noqa: ARG001 - as all commands are run
    """Show, compare or rewrite; False if the tables differ. Raises SemBlendError and OSError."""
    rows = results.read_rows(options.results)
    if not (options.check or options.write):
        for line in results.markdown_table("*", rows).splitlines():
            results.say(line)
        return True
    made = {
        page: results.with_tables(read_text(page), rows, Path(os.path.relpath(options.results, page.parent)).as_posix())
        for page in options.pages
    }
    old = [path for path, text in made.items() if text != read_text(path)]
    for path in old:
        if options.write:
            write_bytes(path, made[path].encode())
        else:
            arguments.complain(f"{path} differs from the rows in {options.results}; rewrite it with --write")
    return options.write or not old


_COMMANDS = {
    "quality": (parse_quality, run_quality),
    "calibrate": (parse_calibrate, run_calibrate),
    "confirm": (parse_confirm, run_confirm),
    "replay": (parse_replay, run_replay),
    "scoreboard": (parse_scoreboard, run_scoreboard),
}


def main(given: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit status."""
    parse, run = _COMMANDS.get(given[0] if given else "", (parse_validation, run_validation))

    def status() -> int:
        try:
            options = parse(given if parse is parse_validation else given[1:])
        except SystemExit as exit_of_argparse:
            return int(exit_of_argparse.code or 0)
        if getattr(options, "model", None) == models.SMOLLM2:
            options.model = str(models.smollm2_folder())
        return 0 if run(options, shlex.join([*arguments.PROGRAM.split(), *given])) else 1

    return ended("validation", status)


def parse_validation(given: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a validation run; exits with status 2 for any that argparse refuses."""
    parser = arguments.Parser("", _DESCRIPTION, textwrap.dedent(_GATES))
    what = parser.add_argument_group("what is run")
    arguments.add(what, "--model")
    arguments.add(what, "--engine", choices=(EMBEDDED, VLLM, SGLANG))
    arguments.add(what, "--prompts", "--log")
    arguments.add(what, "--arms", default_in_words="those without a number")
    which = f"arm that the gates read (default: {VERIFIED} with a reuse profile, else {POSITION_FIX})"
    what.add_argument("--policy", type=named, metavar="ARM", help=which)
    arguments.add(what, "--profile", "--boundary", "--min-match-length", "--device", "--dtype", "--kv-dtype")
    arguments.add(what, "--max-tokens", default=64)
    arguments.add(what, "--seed", help="seed of the built-in prompts")
    full = "all built-in prompts and the arm boundary too; so does --record"
    what.add_argument("--full", action="store_true", help=full)
    repeat = "measure everything N times, each with fresh engines"
    what.add_argument("--repeat", type=int, default=1, metavar="N", help=repeat)
    gates = parser.add_argument_group("gates")
    for name, (default, what_for) in BOUNDS.items():
        gates.add_argument(f"--min-{name.replace('_', '-')}", type=type(default), default=default, help=what_for)
    files = parser.add_argument_group("files")
    arguments.add(files, "--output", default=Path("results/trtllm-semblend.json"), help="JSON report")
    files.add_argument("--page", type=Path, help="HTML page (default: report.html beside the JSON)")
    audit = Path("results/trtllm-semblend-audit.jsonl")
    files.add_argument("--audit-path", type=Path, default=audit, help="audit log of the reusing arms")
    arguments.add(files, "--record", "--machine")
    return parser.parse_args(given)


def run_validation(options: argparse.Namespace, command: str) -> bool:
    """Run and write everything; True when all gates hold. Raises SemBlendError and OSError."""
    began = time.perf_counter()
    options.full |= options.record is not None  # rows are those of a full run
    bounds = {name: getattr(options, f"min_{name}") for name in BOUNDS}
    check_bounds(bounds)
    arguments.check_integers(options, max_tokens=1, min_match_length=1, repeat=1, seed=0)
    if options.machine is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options.machine):
        raise ConfigurationError(f"--machine is {options.machine!r}; use letters, digits, '-', '_' and '.'.")
    prefix = "" if options.engine == EMBEDDED else f"{options.engine}_"
    rows_path = None if options.record is None else options.record / f"{prefix}{FILE_NAME}"
    page_path = options.page or (arguments.beside(options.output, ".html") and options.output.with_name("report.html"))
    for path in filter(None, (options.output, page_path, options.audit_path, rows_path)):
        check_writable(path)
    profile = models.profile_of(options.model, options.profile)
    policy = options.policy or (POSITION_FIX if profile is None else VERIFIED)
    torch.manual_seed(options.seed)
    engines = models.engines_of(options, options.dtype)
    device, dtype = models.place_of(engines, options.dtype)
    context = engines.facts.max_positions - max(options.max_tokens, MAX_FORCED_TOKENS)
    cases = arguments.own_cases(options, engines.tokenizer) or write_timed(engines, options.seed, context, options.full)
    choices = models.choices_of(engines, options.boundary, profile)
    settings = ServingSettings(str(options.model or shipped_model()), options.max_tokens, options.min_match_length)
    arms = arms_of(names_of_run(options.arms, policy, choices, options.full), choices)
    measurement = Measurement(engines, cases, settings, arms)
    exactness = _exactness(engines, options.engine, measurement.longest_prompt, settings)
    with arguments.progress("Measuring", options.repeat * measurement.steps) as on_step:
        samples, events = measurement.run(options.repeat, on_step)
    audit = {arm.name: audit_counts(events, arm.name) for arm in arms if arm.variables is not None}
    report = Report(
        model=models.shown_name(settings.model),
        policy=policy,
        samples=samples,
        audit=audit,
        audit_path=str(options.audit_path),
        gates=gates_of(samples, audit[policy], policy, bounds, exactness),
        settings=arguments.settings_in_text(options, boundary=choices.boundary, dtype=dtype),
        measured=results.Measured.now(command, device, options.machine),
        seconds=time.perf_counter() - began,
        notes=engines.notes,
    )
    write_bytes(options.audit_path, "".join(json.dumps(event, sort_keys=True) + "\n" for event in events).encode())
    results.write_json(options.output, report.to_dict())
    if page_path is not None:
        write_bytes(page_path, page(report, cases, engines.tokenizer).encode())
    if rows_path is not None:
        rows = end_to_end_rows(samples, exactness, device, report.measured, prefix)
        results.write_rows(rows_path.parent / report.measured.machine["name"] / rows_path.name, rows)
    return _show(report, options, page_path)


def _exactness(engines: Engines, name: str, prompt: list[int], settings: ServingSettings) -> Exactness | None:
    """Return the wrapper's exactness; in the embedded engine only with float32 weights or fp8 KV, else None."""
    if not isinstance(engines, EmbeddedEngines) or engines.kv_dtype != models.AUTO:
        return stock_difference(engines, settings.model, name, prompt, settings.min_span)
    return plain_difference(engines.runner, prompt) if engines.runner.dtype is torch.float32 else None


def _show(report: Report, options: argparse.Namespace, page_path: Path | None) -> bool:
    show(report, report.seconds, options.output, page_path)
    for gate in report.failed:
        arguments.complain(f"gate failed: {gate.sentence()}")
    refused = report.audit[report.policy]["rejection_reasons"]
    if report.failed and refused:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in refused.items())
        arguments.complain(f"look-ups of the arm {report.policy} that placed nothing: {reasons}")
    return not report.failed
