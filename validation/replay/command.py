"""`python -m validation replay`: replays a trace under every policy and capacity, and reports what was found.

The report has figures with intervals: as JSON, CSV, a Markdown page, a plot and tables for the terminal.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable, write_bytes
from semblend_trt.fleet.routing_policy import POLICIES
from validation import arguments
from validation.output import markdown_table, png, progress, say, show, table_of, write_json, write_text
from validation.replay.latency import H200_PROFILE, MIN_OF_A_TRACE, LatencyModel, recorded_observations
from validation.replay.policies import ReplayPolicy
from validation.replay.simulation import (
    EXACT_PREFIX,
    OPTIMUM,
    SPAN,
    FleetOutcome,
    Outcome,
    ReuseRule,
    simulate,
    simulate_fleet,
)
from validation.replay.trace import (
    MAX_REQUESTS,
    WORKLOADS,
    Trace,
    TraceFormat,
    trace_file,
    trace_of,
    workload_lines,
)
from validation.results import Measured

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    import numpy.typing as npt
    from rich.table import Table

FILE_NAMES = ("replay_results.json", "replay_metrics.csv", "replay_summary.md", "replay_plot.png")
MAX_WORKLOAD_REQUESTS, _WORKLOAD_REQUESTS = 100_000, 600
MAX_REPLICAS = 64
_DEFAULT_SHARES = (0.1, 0.25, 0.5)
_TABLE_WIDTH = 170
_DESCRIPTION = """
Replays requests through the eviction policies, for an exact prefix cache and for reuse of spans, and through the
router's policies for several replicas, and predicts the time to the first token by a fitted model; nothing is measured.
Reads the router's telemetry and traces as Mooncake, Azure and WEKA (sessions of Claude Code) publish them; lines that
cannot be read are passed over and counted. Writes replay_results.json, replay_metrics.csv, replay_summary.md and
replay_plot.png. Exit status: 0 the replay is complete, 2 bad usage, an error, or nothing could be read, 130
interrupted.
"""


def parse_replay(given: Sequence[str]) -> argparse.Namespace:
    """Arguments of a replay; exits with status 2 for any that argparse refuses."""
    parser = arguments.Parser("replay", _DESCRIPTION)
    source = parser.add_mutually_exclusive_group(required=True)
    told = (
        "request telemetry or a published trace: JSON lines, Azure's CSV, or a folder of sessions, a file *.json each"
    )
    source.add_argument("--trace", type=Path, metavar="FILE", help=told)
    source.add_argument("--workload", metavar="NAME", help=f"a built-in trace: {', '.join(WORKLOADS)}")
    told = f"the first N requests of a file (default: all), or of a built-in trace (default: {_WORKLOAD_REQUESTS})"
    parser.add_argument("--requests", type=int, metavar="N", help=told)
    arguments.add(parser, "--seed", help="seed of a built-in trace and of the bootstrap")
    parser.add_argument("--write-trace", type=Path, metavar="FILE.jsonl", help="save the built-in trace")
    names = [each.value for each in ReplayPolicy]
    told = f"eviction policies: {', '.join(names)}; lru is always among them"
    parser.add_argument("--policies", nargs="+", default=names, metavar="NAME", help=told)
    told = "tokens that a cache holds (default: a tenth, a quarter and half of the trace's distinct tokens)"
    parser.add_argument("--capacity-tokens", nargs="+", type=int, metavar="N", help=told)
    told = "replicas behind the router, which together hold as much (default: %(default)s)"
    parser.add_argument("--replicas", type=int, default=4, metavar="N", help=told)
    arguments.add(parser, "--min-match-length", help="shortest span that is reused, in tokens")
    told = "first tokens of each reused span that are computed again"
    parser.add_argument("--recompute-tokens", type=int, default=16, help=told)
    told = (
        "result rows, or observations, to fit the latency model to (default: the trace's own observations where it has "
        f"{MIN_OF_A_TRACE} or more, else those of an H200)"
    )
    parser.add_argument("--latency-profile", type=Path, metavar="FILE.json", help=told)
    arguments.add(parser, "--output", default=Path("results/replay"), metavar="DIR", help="folder of the files")
    return parser.parse_args(given)


def run_replay(options: argparse.Namespace, command: str) -> bool:
    """Runs and writes everything; always True. Raises SemBlendError and OSError."""
    policies = _policies(options.policies)
    _check_options(options)
    paths = [options.output / name for name in FILE_NAMES]
    for path in filter(None, (*paths, options.write_trace)):
        check_writable(path)
    trace = _trace(options)
    model = _latency_model(trace, options.latency_profile)
    rules, capacities = _rules(trace, options), options.capacity_tokens or _capacities(trace)
    outcomes, unlimited = _outcomes(trace, rules, policies, capacities)
    routed = _routed(trace, rules, options.replicas, capacities, model)
    report = ReplayReport(
        source=str(options.trace or options.workload),
        facts=_facts(trace),
        model=model,
        rules=rules,
        lines=lines_of(trace, outcomes, model, options.seed),
        routed=routed,
        replicas=options.replicas,
        unlimited_share=unlimited,
        settings=arguments.settings_in_text(options),
        measured=Measured.now(command, "cpu"),
    )
    written = _write(report, paths)
    _show(report, [*written, *filter(None, [options.write_trace])])
    return True


def _policies(names: Sequence[str]) -> tuple[str, ...]:
    """The baseline, the policies that were asked for, and the optimum."""
    known = [each.value for each in ReplayPolicy]
    for name in names:
        if name not in known:
            raise ConfigurationError(f"--policies names {name!r}; there are {', '.join(known)}.")
    return tuple(dict.fromkeys((BASELINE, *names, OPTIMUM)))


def _check_options(options: argparse.Namespace) -> None:
    arguments.check_integers(options, replicas=1, seed=0, min_match_length=1, recompute_tokens=0)
    if options.requests is not None:
        arguments.check_integers(options, requests=1)
    for name, most in (
        ("requests", MAX_REQUESTS if options.trace else MAX_WORKLOAD_REQUESTS),
        ("replicas", MAX_REPLICAS),
    ):
        if (getattr(options, name) or 0) > most:
            raise ConfigurationError(f"--{name} is {getattr(options, name)}; it must be at most {most}.")
    for capacity in options.capacity_tokens or ():
        if not 1 <= capacity <= arguments.HIGHEST:
            raise ConfigurationError(f"--capacity-tokens holds {capacity}; a cache holds 1 to {arguments.HIGHEST}.")
    if options.write_trace is not None and options.workload is None:
        raise ConfigurationError("--write-trace saves a built-in trace; name one with --workload.")


def _trace(options: argparse.Namespace) -> Trace:
    if options.trace is not None:
        return trace_file(options.trace, options.requests)
    lines = list(workload_lines(options.workload, options.requests or _WORKLOAD_REQUESTS, options.seed))
    if options.write_trace is not None:
        write_text(options.write_trace, "".join(line.to_json() + "\n" for line in lines))
    return trace_of(lines)


def _latency_model(trace: Trace, profile: Path | None) -> LatencyModel:
    """Fitted to the named observations, else to the trace where it has enough times, else to an H200's."""
    if profile is None and len(trace.observations) >= MIN_OF_A_TRACE:
        return LatencyModel.fitted(trace.observations, "the trace itself")
    if profile is None:
        return LatencyModel.fitted(recorded_observations(H200_PROFILE), "an H200")
    return LatencyModel.fitted(recorded_observations(profile), str(profile))


def _rules(trace: Trace, options: argparse.Namespace) -> tuple[ReuseRule, ...]:
    """What the trace's format tells of reuse."""
    if trace.form is TraceFormat.AZURE:
        return ()
    prefix = ReuseRule(EXACT_PREFIX, as_prefixes=True)
    if trace.form is not TraceFormat.ROUTER:
        return (prefix,)
    span = ReuseRule(SPAN, False, min_tokens=options.min_match_length, recompute_tokens=options.recompute_tokens)
    return prefix, span


def _capacities(trace: Trace) -> list[int]:
    distinct = sum(trace.spans.tokens)
    return sorted({max(1, round(distinct * share)) for share in _DEFAULT_SHARES})


def _outcomes(
    trace: Trace, rules: Sequence[ReuseRule], policies: Sequence[str], capacities: Sequence[int]
) -> tuple[list[Outcome], dict[str, float]]:
    """All outcomes, and the share of tokens that each rule reuses in an unlimited cache."""
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


def _routed(
    trace: Trace, rules: Sequence[ReuseRule], replicas: int, capacities: Sequence[int], model: LatencyModel
) -> list[RoutedLine]:
    """What the router's policies make of the trace, by the last rule; none for one replica."""
    rule = rules[-1] if rules else ReuseRule(EXACT_PREFIX, as_prefixes=True)
    sizes = dict.fromkeys(max(1, each // replicas) for each in capacities) if rules else {1: None}
    runs = [(size, policy) for size in sizes for policy in POLICIES] if replicas > 1 else []
    lines = []
    with progress("Routing", len(runs)) as on_step:
        for size, policy in runs:
            lines.append(RoutedLine.of(trace, simulate_fleet(trace, rule, policy, replicas, size, model)))
            on_step(policy)
    return lines


def _facts(trace: Trace) -> list[str]:
    if trace.form is TraceFormat.AZURE:
        facts = [f"{len(trace):,} requests of {sum(trace.prompt_tokens()):,} tokens."]
    else:
        held = trace.held_prefix_blocks
        facts = [
            f"{len(trace):,} requests of {trace.block_uses:,} blocks and {sum(trace.prompt_tokens()):,} tokens, "
            f"{len(trace.spans):,} blocks and {sum(trace.spans.tokens):,} tokens of them distinct.",
            f"Blocks of a prefix that an earlier request had: {held:,}, {held / trace.block_uses:.1%} of all blocks.",
            f"Times to the first token observed: {len(trace.observations):,}.",
        ]
    if trace.form.told:
        facts.append(trace.form.told)
    if trace.empty:
        facts.append(f"Requests without tokens, which are not replayed: {trace.empty:,}.")
    if trace.skipped.counts:
        facts.append(trace.skipped.sentence())
    if abs(trace.observed_over_counted - 1.0) > 0.05:
        facts.append(
            f"Engines computed or found cached {trace.observed_over_counted:.2f} tokens for each of the blocks' tokens."
        )
    return facts


def _write(report: ReplayReport, paths: Sequence[Path]) -> list[Path]:
    """The files that were written: no plot where nothing of reuse is known."""
    document, table, page, plot = paths
    write_json(document, report.to_dict())
    write_text(table, report.csv())
    if report.lines:
        write_bytes(plot, draw(report.lines, f"{report.source}, {report.measured.date}"))
    write_text(page, report.page(plot.name))
    return [document, table, page, *([plot] if report.lines else [])]


def _show(report: ReplayReport, paths: Sequence[Path]) -> None:
    show(report.tables(), _TABLE_WIDTH)
    for sentence in (*report.facts, report.model.sentence(), *paths):
        say(sentence)


CONFIDENCE = 0.95
RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its bounds at CONFIDENCE."""

    estimate: float
    low: float
    high: float

    @property
    def is_a_difference(self) -> bool:
        """True when 0 lies outside."""
        return self.low > 0.0 or self.high < 0.0


def ratio_interval(numerators: npt.ArrayLike, denominators: npt.ArrayLike, seed: int = 0) -> Interval | None:
    """Sum of `numerators` over sum of `denominators`, numbers [requests] in order; None with fewer than 4 requests.

    A block bootstrap (Carlstein 1986): whole runs of about sqrt(requests) successive requests are resampled, since
    requests reuse the blocks of earlier ones. Percentiles of RESAMPLES draws; equal seeds give equal bounds.
    """
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if len(above) < 4:
        return None
    starts = np.arange(0, len(above), math.isqrt(len(above)))
    above, below = np.add.reduceat(above, starts), np.add.reduceat(below, starts)
    drawn = np.random.default_rng(seed).integers(0, len(starts), (RESAMPLES, len(starts)))
    ratios = above[drawn].sum(axis=1) / np.maximum(below[drawn].sum(axis=1), 1e-300)
    low, high = np.quantile(ratios, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Interval(float(above.sum() / below.sum()), float(low), float(high))


BASELINE = ReplayPolicy.LRU.value


@dataclass(frozen=True, slots=True)
class Line:
    """`hit_share` and `saved_tokens` are of all prompts' tokens; TTFT in ms is predicted by the model.

    `extrapolated_share` of the requests lie outside of the model's observations. `*_over_lru`: the policy's figure
    minus that of lru with the same rule and capacity.
    """

    rule: str
    policy: str
    capacity_tokens: int
    hit_share: float
    saved_tokens: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    extrapolated_share: float
    evictions: int
    regrets: int
    hit_share_over_lru: Interval | None
    ttft_over_lru_ms: Interval | None


def lines_of(trace: Trace, outcomes: Sequence[Outcome], model: LatencyModel, seed: int) -> list[Line]:
    """One line for each outcome, in their order; those of lru are among them."""
    prompts = np.array(trace.prompt_tokens(), dtype=np.int64)
    predicted = [model.predict(prompts - each.reused, each.reused) for each in outcomes]
    baseline = {
        (each.rule, each.capacity_tokens): (each.reused, ttft)
        for each, ttft in zip(outcomes, predicted, strict=True)
        if each.policy == BASELINE
    }
    lines = []
    for outcome, ttft in zip(outcomes, predicted, strict=True):
        reused = outcome.reused
        lru_reused, lru_ttft = baseline[outcome.rule, outcome.capacity_tokens]
        compared = outcome.policy != BASELINE
        p50, p95, p99 = (float(value) for value in np.quantile(ttft, (0.5, 0.95, 0.99)))
        lines.append(
            Line(
                rule=outcome.rule,
                policy=outcome.policy,
                capacity_tokens=outcome.capacity_tokens,
                hit_share=float(reused.sum() / prompts.sum()),
                saved_tokens=int(reused.sum()),
                ttft_mean_ms=float(ttft.mean()),
                ttft_p50_ms=p50,
                ttft_p95_ms=p95,
                ttft_p99_ms=p99,
                extrapolated_share=float(model.outside(prompts - reused, reused).mean()),
                evictions=outcome.evictions,
                regrets=outcome.regrets,
                hit_share_over_lru=ratio_interval(reused - lru_reused, prompts, seed) if compared else None,
                ttft_over_lru_ms=ratio_interval(ttft - lru_ttft, np.ones_like(ttft), seed) if compared else None,
            )
        )
    return lines


@dataclass(frozen=True, slots=True)
class RoutedLine:
    """A policy of the router over a trace. `capacity_tokens` are each replica's, `hit_share` is of all prompts' tokens.

    `imbalance`: the busiest replica's time over the mean; `busy_share`: the mean over the trace's duration. TTFT in ms
    is predicted by the model, and includes the time in a queue.
    """

    policy: str
    capacity_tokens: int
    hit_share: float
    imbalance: float
    busy_share: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float

    @classmethod
    def of(cls, trace: Trace, outcome: FleetOutcome) -> RoutedLine:
        began, ended = trace.seconds_from_to
        p50, p95, p99 = (float(value) for value in np.quantile(outcome.ttft_ms, (0.5, 0.95, 0.99)))
        return cls(
            policy=outcome.policy,
            capacity_tokens=outcome.capacity_tokens,
            hit_share=float(outcome.reused.sum() / sum(trace.prompt_tokens())),
            imbalance=outcome.imbalance,
            busy_share=float(outcome.busy_ms.mean() / 1e3 / max(ended - began, 1e-9)),
            ttft_p50_ms=p50,
            ttft_p95_ms=p95,
            ttft_p99_ms=p99,
        )

    def cells(self, *, is_known: bool) -> tuple[str, ...]:
        """For a table; without the figures of reuse where it is not known."""
        return (
            self.policy,
            f"{self.capacity_tokens:,}" if is_known else "-",
            f"{self.hit_share:.1%}" if is_known else "not known",
            f"{self.imbalance:.2f}",
            f"{self.busy_share:.0%}",
            *(f"{value:,.0f}" for value in (self.ttft_p50_ms, self.ttft_p95_ms, self.ttft_p99_ms)),
        )


_PANEL_WIDTH, _PANEL_HEIGHT, _DPI = 6.0, 4.0, 130
_MARKERS = "osD^vPX"


def draw(lines: Sequence[Line], title: str) -> bytes:
    """A PNG: a column for each rule of reuse, hit share above and the 95th percentile of the predicted TTFT below."""
    rules = list(dict.fromkeys(line.rule for line in lines))
    figure = Figure(figsize=(_PANEL_WIDTH * len(rules), 2 * _PANEL_HEIGHT), dpi=_DPI, layout="constrained")
    shares, times = figure.subplots(2, len(rules), squeeze=False, sharex="col", sharey="row")
    for column, rule in enumerate(rules):
        chosen = [line for line in lines if line.rule == rule]
        _draw_panel(shares[column], chosen, lambda line: 100 * line.hit_share)
        _draw_panel(times[column], chosen, lambda line: line.ttft_p95_ms)
        shares[column].set_title(rule, fontsize=9)
        times[column].set_xlabel("capacity, tokens")
    shares[0].set_ylabel("reused, % of the prompts' tokens")
    times[0].set_ylabel("TTFT predicted by the model, p95 in ms")
    shares[0].legend(fontsize=7, loc="best")
    return png(figure, title)


def _draw_panel(axes: Any, lines: Sequence[Line], value: Any) -> None:
    for index, policy in enumerate(dict.fromkeys(line.policy for line in lines)):
        points = sorted((line.capacity_tokens, value(line)) for line in lines if line.policy == policy)
        style = "k--" if policy == OPTIMUM else "-"
        axes.plot(*zip(*points, strict=True), style, marker=_MARKERS[index % len(_MARKERS)], alpha=0.8, label=policy)
    axes.set_xscale("log")
    capacities = sorted({line.capacity_tokens for line in lines})
    axes.set_xticks(capacities, [f"{each:,}" for each in capacities])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


SCHEMA = 2
_INTERVALS = ("hit_share_over_lru", "ttft_over_lru_ms")
_HEADINGS = (
    "policy | capacity | reused | saved tokens | TTFT p50 | p95 | p99 | extrapolated | evicted | regrets | "
    "reused - lru, points | mean TTFT - lru"
)
_ROUTED_HEADINGS = "policy | capacity of each | reused | busiest over mean | busy | TTFT p50 | p95 | p99"
_ROUTED_NOTE = """
Requests come at their times, and each replica prefills one after the other, in predicted time; decoding takes none. The
router is told at once what each replica holds, and caches evict by lru. Busy: the replicas' mean time over the trace's
duration; above 100% queues grow. TTFT includes the time in a queue.
"""
_NOTES = f"""
All times are **predicted by the model**, in ms; none is measured. One cache serves the whole trace, as if there were
one replica: one request after the other in the order of their times, each whole before the next, without the time in a
queue. A block is shared as a whole or not at all, never with another tenant or model, and each held block is one donor
to the policy; a connector keeps whole prompts as donors. No block of a request goes while it is served. Every reused
token costs the same, whether exact or moved.

Reused: share of the prompts' tokens that were not computed. Extrapolated: share of the requests that lie outside of
what the model was fitted to. Regrets: blocks that were asked for again after they had been evicted. `{OPTIMUM}` knows
every future request (Belady 1966): the bound of held blocks where all have one size; where sizes differ, or spans lose
their first tokens, a good order but no bound. Differences are the policy's minus those of lru with their
{CONFIDENCE:.0%} interval, from {RESAMPLES:,} bootstrap resamples of runs of successive requests; `*` marks those that
exclude 0.
"""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A replay's findings. `facts`: sentences about the trace; `unlimited_share`: share of tokens that each rule reuses
    in an unlimited cache."""

    source: str
    facts: Sequence[str]
    model: LatencyModel
    rules: Sequence[ReuseRule]
    lines: Sequence[Line]
    routed: Sequence[RoutedLine]
    replicas: int
    unlimited_share: dict[str, float]
    settings: dict[str, Any]
    measured: Measured

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        told = asdict(self)
        return {"schema": SCHEMA, "times": "predicted by the model, ms", **told, **told.pop("measured")}

    def csv(self) -> str:
        """A CSV table with a row for each line; an interval takes three columns."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        plain = [each.name for each in fields(Line) if each.name not in _INTERVALS]
        names = ["predicted_" * name.startswith("ttft") + name for name in plain]
        writer.writerow(names + [f"{name}{end}" for name in _INTERVALS for end in ("", "_low", "_high")])
        for line in self.lines:
            found = [getattr(line, name) for name in _INTERVALS]
            bounds = [("", "", "") if each is None else (each.estimate, each.low, each.high) for each in found]
            writer.writerow([getattr(line, name) for name in plain] + [value for three in bounds for value in three])
        return text.getvalue()

    def page(self, plot_name: str) -> str:
        """The Markdown page, with the plot of that file name beside it."""
        parts = [
            f"# Replay of {self.source}",
            f"{self.measured.sentence()}.",
            " ".join(self.facts),
            self.model.sentence(),
            _NOTES.strip(),
        ]
        if self.lines:
            parts.append(f"![reused share and predicted TTFT against capacity]({plot_name})")
        for rule in self.rules:
            table = markdown_table(_HEADINGS, map(_cells, self._of(rule)))
            parts += [f"## {rule.name}", self._rule_sentence(rule), table]
        if self.routed:
            table = markdown_table(_ROUTED_HEADINGS, self._routed_cells())
            parts += [f"## {self._routed_title()}", _ROUTED_NOTE.strip(), table]
        return "\n\n".join(parts) + "\n"

    def tables(self) -> list[Table]:
        """One table for each rule, for a terminal of about 160 columns."""
        tables = []
        for rule in self.rules:
            headings = _HEADINGS.split(" | ")
            title = f"{rule.name}: TTFT in ms predicted by the model"
            table = table_of(title, headings, headings[1:], ("policy",))
            table.caption, table.caption_justify = self._rule_sentence(rule), "left"
            for line in self._of(rule):
                table.add_row(*_cells(line), end_section=line.policy == OPTIMUM)
            tables.append(table)
        if self.routed:
            headings = _ROUTED_HEADINGS.split(" | ")
            table = table_of(
                f"{self._routed_title()}: TTFT in ms predicted by the model", headings, headings[1:], ("policy",)
            )
            for cells in self._routed_cells():
                table.add_row(*cells)
            tables.append(table)
        return tables

    def _routed_title(self) -> str:
        return f"router over {self.replicas} replicas"

    def _routed_cells(self) -> list[tuple[str, ...]]:
        return [line.cells(is_known=bool(self.rules)) for line in self.routed]

    def _of(self, rule: ReuseRule) -> list[Line]:
        return [line for line in self.lines if line.rule == rule.name]

    def _rule_sentence(self, rule: ReuseRule) -> str:
        return f"{rule.sentence()} Without a limit {self.unlimited_share[rule.name]:.1%} of the tokens are reused."


def _cells(line: Line) -> tuple[str, ...]:
    return (
        line.policy,
        f"{line.capacity_tokens:,}",
        f"{line.hit_share:.1%}",
        f"{line.saved_tokens:,}",
        *(f"{value:,.1f}" for value in (line.ttft_p50_ms, line.ttft_p95_ms, line.ttft_p99_ms)),
        f"{line.extrapolated_share:.0%}",
        f"{line.evictions:,}",
        f"{line.regrets:,}",
        _difference(line.hit_share_over_lru, 100.0),
        _difference(line.ttft_over_lru_ms),
    )


def _difference(interval: Interval | None, factor: float = 1.0) -> str:
    if interval is None:
        return "-"
    estimate, low, high = (value * factor for value in (interval.estimate, interval.low, interval.high))
    return f"{estimate:+.1f} [{low:+.1f}, {high:+.1f}]{'*' * interval.is_a_difference}"
