"""`python -m validation replay`: replays a trace under every policy and capacity, and writes what was found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kernels import results
from kernels.files import write_bytes
from semblend_trt.donors.eviction import Eviction
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable
from validation import arguments
from validation.output import progress, say, show, write_json, write_text
from validation.replay.latency import MIN_OF_A_TRACE, LatencyModel, recorded_observations
from validation.replay.report import BASELINE, ReplayReport, draw, lines_of
from validation.replay.simulation import EXACT_PREFIX, OPTIMUM, SPAN, Outcome, ReuseRule, simulate
from validation.replay.trace import Trace, trace_file, trace_of
from validation.replay.workloads import WORKLOADS, workload_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

FILE_NAMES = ("replay_results.json", "replay_metrics.csv", "replay_summary.md", "replay_plot.png")
MAX_WORKLOAD_REQUESTS = 100_000
_DEFAULT_SHARES = (0.1, 0.25, 0.5)
_TABLE_WIDTH = 170
_DESCRIPTION = """
Replays request telemetry through the eviction policies, for an exact prefix cache and for reuse of spans, and predicts
the time to the first token by a fitted model; nothing is measured. Writes replay_results.json, replay_metrics.csv,
replay_summary.md and replay_plot.png. Exit status: 0 the replay is complete, 2 bad usage or an
error, 130 interrupted.
"""
LATENCY_PROFILE = Path("benchmarks/results/h200/ttft.json")


def parse_replay(given: Sequence[str]) -> argparse.Namespace:
    """Arguments of a replay; exits with status 2 for any that argparse refuses."""
    parser = arguments.Parser("replay", _DESCRIPTION)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE.jsonl", help="request telemetry as a router writes it")
    source.add_argument("--workload", metavar="NAME", help=f"a built-in trace: {', '.join(WORKLOADS)}")
    parser.add_argument("--skip-bad", action="store_true", help="count lines that cannot be read and pass over them")
    parser.add_argument("--requests", type=int, default=600, help="requests of a built-in trace")
    arguments.add(parser, "--seed", help="seed of a built-in trace and of the bootstrap")
    parser.add_argument("--write-trace", type=Path, metavar="FILE.jsonl", help="save the built-in trace")
    names = [each.value for each in Eviction]
    told = f"eviction policies: {', '.join(names)}; lru is always among them"
    parser.add_argument("--policies", nargs="+", default=names, metavar="NAME", help=told)
    told = "tokens that a cache holds (default: a tenth, a quarter and half of the trace's distinct tokens)"
    parser.add_argument("--capacity-tokens", nargs="+", type=int, metavar="N", help=told)
    arguments.add(parser, "--min-match-length", help="shortest span that is reused, in tokens")
    told = "first tokens of each reused span that are computed again"
    parser.add_argument("--recompute-tokens", type=int, default=16, help=told)
    told = (
        "result rows to fit the latency model to (default: the trace's own observations where it has "
        f"{MIN_OF_A_TRACE} or more, else {LATENCY_PROFILE})"
    )
    parser.add_argument("--latency-profile", type=Path, metavar="FILE.json", help=told)
    arguments.add(parser, "--output", default=Path("results/replay"), metavar="DIR", help="folder of the files")
    return parser.parse_args(given)


def run_replay(options: argparse.Namespace, command: str) -> bool:
    """Runs and writes everything, which is all that can be asked of it. Raises SemBlendError and OSError."""
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
        settings=arguments.settings_in_text(options),
        measured=results.Measured.now(command, "cpu"),
    )
    _write(report, paths)
    _show(report, [*paths, *filter(None, [options.write_trace])])
    return True


def _policies(names: Sequence[str]) -> tuple[str, ...]:
    """The baseline, the policies that were asked for, and the optimum."""
    known = [each.value for each in Eviction]
    for name in names:
        if name not in known:
            raise ConfigurationError(f"--policies names {name!r}; there are {', '.join(known)}.")
    return tuple(dict.fromkeys((BASELINE, *names, OPTIMUM)))


def _check_options(options: argparse.Namespace) -> None:
    arguments.check_integers(options, requests=1, seed=0, min_match_length=1, recompute_tokens=0)
    if options.requests > MAX_WORKLOAD_REQUESTS:
        raise ConfigurationError(f"--requests is {options.requests}; it must be at most {MAX_WORKLOAD_REQUESTS}.")
    for capacity in options.capacity_tokens or ():
        if not 1 <= capacity <= arguments.HIGHEST:
            raise ConfigurationError(f"--capacity-tokens holds {capacity}; a cache holds 1 to {arguments.HIGHEST}.")
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
    with progress("Replaying", len(runs) + len(rules)) as on_step:
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
    show(report.tables(), _TABLE_WIDTH)
    for sentence in (*report.facts, report.model.sentence(), *paths):
        say(sentence)
