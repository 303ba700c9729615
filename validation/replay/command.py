"""`python -m validation replay`: replays a trace under every policy and capacity, and writes what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from kernels import results
from kernels.files import write_bytes
from semblend_trt.donors.eviction import Eviction
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable
from semblend_trt.printable import printable
from validation.arguments import HIGHEST, check_integers, settings_in_text
from validation.output import progress, write_json, write_text
from validation.replay.arguments import LATENCY_PROFILE
from validation.replay.latency import MIN_OF_A_TRACE, LatencyModel, recorded_observations
from validation.replay.report import BASELINE, ReplayReport, draw, lines_of
from validation.replay.simulation import EXACT_PREFIX, OPTIMUM, SPAN, Outcome, ReuseRule, simulate
from validation.replay.trace import Trace, trace_file, trace_of
from validation.replay.workloads import workload_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

FILE_NAMES = ("replay_results.json", "replay_metrics.csv", "replay_summary.md", "replay_plot.png")
MAX_WORKLOAD_REQUESTS = 100_000
_DEFAULT_SHARES = (0.1, 0.25, 0.5)
_TABLE_WIDTH = 170


def run_replay(options: argparse.Namespace, command: str) -> None:
    """Runs and writes everything. Raises SemBlendError and OSError."""
    policies = _policies(options.policies)
    _check_options(options)
    paths = [options.output / name for name in FILE_NAMES]
    for path in filter(None, (*paths, options.write_trace)):
        check_writable(path)
    trace = _trace(options)
    model = _latency_model(trace, options.latency_profile)
    rules = (
        ReuseRule(EXACT_PREFIX, as_prefixes=True),
        ReuseRule(SPAN, False, min_tokens=options.min_match_length, recompute_tokens=options.recompute_tokens),
    )
    outcomes, unlimited = _outcomes(trace, rules, policies, options.capacity_tokens or _capacities(trace))
    report = ReplayReport(
        source=str(options.trace or options.workload),
        facts=_facts(trace),
        model=model,
        rules=rules,
        lines=lines_of(trace, outcomes, model, options.seed),
        unlimited_share=unlimited,
        settings=settings_in_text(options),
        measured=results.Measured.now(command, "cpu"),
    )
    _write(report, paths)
    _show(report, [*paths, *filter(None, [options.write_trace])])


def _policies(names: Sequence[str]) -> tuple[str, ...]:
    """The baseline, the policies that were asked for, and the optimum."""
    known = [each.value for each in Eviction]
    for name in names:
        if name not in known:
            raise ConfigurationError(f"--policies names {name!r}; there are {', '.join(known)}.")
    return tuple(dict.fromkeys((BASELINE, *names, OPTIMUM)))


def _check_options(options: argparse.Namespace) -> None:
    check_integers(options, requests=1, seed=0, min_match_length=1, recompute_tokens=0)
    if options.requests > MAX_WORKLOAD_REQUESTS:
        raise ConfigurationError(f"--requests is {options.requests}; it must be at most {MAX_WORKLOAD_REQUESTS}.")
    for capacity in options.capacity_tokens or ():
        if not 1 <= capacity <= HIGHEST:
            raise ConfigurationError(f"--capacity-tokens holds {capacity}; a cache holds 1 to {HIGHEST}.")
    if options.write_trace is not None and options.workload is None:
        raise ConfigurationError("--write-trace saves a built-in trace; name one with --workload.")


def _trace(options: argparse.Namespace) -> Trace:
    if options.trace is not None:
        return trace_file(options.trace, skip_bad=options.skip_bad)
    lines = list(workload_lines(options.workload, options.requests, options.seed))
    if options.write_trace is not None:
        write_text(options.write_trace, "".join(line.to_json() + "\n" for line in lines))
    return trace_of(lines)


def _latency_model(trace: Trace, profile: Path | None) -> LatencyModel:
    """Fitted to the rows that were named, else to the trace where it suffices, else to the rows of a checkout."""
    if profile is None and len(trace.observations) >= MIN_OF_A_TRACE:
        return LatencyModel.fitted(trace.observations, "the trace itself")
    if profile is None and not LATENCY_PROFILE.is_file():
        raise ConfigurationError(
            f"the trace has {len(trace.observations)} times to the first token, and a latency model needs "
            f"{MIN_OF_A_TRACE}; name a file of result rows with --latency-profile."
        )
    profile = LATENCY_PROFILE if profile is None else profile
    return LatencyModel.fitted(recorded_observations(profile), str(profile))


def _capacities(trace: Trace) -> list[int]:
    distinct = sum(trace.spans.tokens)
    return sorted({max(1, round(distinct * share)) for share in _DEFAULT_SHARES})


def _outcomes(
    trace: Trace, rules: Sequence[ReuseRule], policies: Sequence[str], capacities: Sequence[int]
) -> tuple[list[Outcome], dict[str, float]]:
    """All outcomes, and for each rule the share of tokens that is reused where nothing has to go."""
    runs = [(rule, policy, n) for rule in rules for n in dict.fromkeys(capacities) for policy in policies]
    outcomes, unlimited = [], {}
    with progress(Console(stderr=True), "Replaying", len(runs) + len(rules)) as on_step:
        for rule, policy, capacity in runs:
            outcomes.append(simulate(trace, rule, policy, capacity))
            on_step(policy)
        for rule in rules:
            everything = simulate(trace, rule, BASELINE, max(1, sum(rule.blocks(trace).tokens)))
            unlimited[rule.name] = float(everything.reused.sum() / sum(trace.prompt_tokens()))
            on_step("unlimited")
    return outcomes, unlimited


def _facts(trace: Trace) -> list[str]:
    facts = [
        f"{len(trace):,} requests of {trace.block_uses:,} blocks and {sum(trace.prompt_tokens()):,} tokens, "
        f"{len(trace.spans):,} blocks and {sum(trace.spans.tokens):,} tokens of them distinct.",
        f"Times to the first token observed: {len(trace.observations):,}.",
    ]
    if trace.empty:
        facts.append(f"Requests without tokens, which are not replayed: {trace.empty:,}.")
    if trace.skipped:
        facts.append(f"Lines that were passed over: {trace.skipped:,}; the first time because {trace.first_skipped}.")
    if abs(trace.observed_over_counted - 1.0) > 0.05:
        facts.append(
            f"Engines computed or found cached {trace.observed_over_counted:.2f} tokens for each of the blocks' tokens."
        )
    return facts


def _write(report: ReplayReport, paths: Sequence[Path]) -> None:
    document, table, page, plot = paths
    write_json(document, report.to_dict())
    write_text(table, report.csv())
    write_bytes(plot, draw(report.lines, f"{report.source}, {report.measured.date}"))
    write_text(page, report.page(plot.name))


def _show(report: ReplayReport, paths: Sequence[Path]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    for table in report.tables():
        console.print(table)
    plain = Console(soft_wrap=True)
    for sentence in (*report.facts, report.model.sentence(), *map(str, paths)):
        plain.print(printable(sentence), markup=False, highlight=False)
