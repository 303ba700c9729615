"""`python -m validation replay`: replays a trace under every policy and capacity, and reports what was found.

The report has figures with intervals: as JSON, CSV, a Markdown page and tables for the terminal.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable
from validation import arguments
from validation.output import markdown_table, progress, say, show, table_of, write_json, write_text
from validation.replay.policies import ReplayPolicy
from validation.replay.simulation import EXACT_PREFIX, OPTIMUM, SPAN, Outcome, ReuseRule, simulate
from validation.replay.trace import MAX_REQUESTS, Trace, TraceFormat, trace_file
from validation.results import Measured

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    import numpy.typing as npt
    from rich.table import Table

FILE_NAMES = ("replay_results.json", "replay_metrics.csv", "replay_summary.md")
BASELINE = ReplayPolicy.LRU.value
_DEFAULT_SHARES = (0.1, 0.25, 0.5)
_TABLE_WIDTH = 120
_DESCRIPTION = """
Replays requests through the eviction policies, for an exact prefix cache and for reuse of spans. Reads the router's
telemetry and traces as Mooncake publishes them; lines that cannot be read are passed over and counted. Writes
replay_results.json, replay_metrics.csv and replay_summary.md. Exit status: 0 the replay is complete, 2 bad usage, an
error, or nothing could be read, 130 interrupted.
"""


def parse_replay(given: Sequence[str]) -> argparse.Namespace:
    """Arguments of a replay; exits with status 2 for any that argparse refuses."""
    parser = arguments.Parser("replay", _DESCRIPTION)
    told = "request telemetry or a published trace, as JSON lines"
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help=told)
    parser.add_argument("--requests", type=int, metavar="N", help="the first N requests of the file (default: all)")
    arguments.add(parser, "--seed", help="seed of the bootstrap")
    names = [each.value for each in ReplayPolicy]
    told = f"eviction policies: {', '.join(names)}; lru is always among them"
    parser.add_argument("--policies", nargs="+", default=names, metavar="NAME", help=told)
    told = "tokens that a cache holds (default: a tenth, a quarter and half of the trace's distinct tokens)"
    parser.add_argument("--capacity-tokens", nargs="+", type=int, metavar="N", help=told)
    arguments.add(parser, "--min-match-length", help="shortest span that is reused, in tokens")
    told = "first tokens of each reused span that are computed again"
    parser.add_argument("--recompute-tokens", type=int, default=16, help=told)
    arguments.add(parser, "--output", default=Path("results/replay"), metavar="DIR", help="folder of the files")
    return parser.parse_args(given)


def run_replay(options: argparse.Namespace, command: str) -> bool:
    """Runs and writes everything; always True. Raises SemBlendError and OSError."""
    policies = _policies(options.policies)
    _check_options(options)
    paths = [options.output / name for name in FILE_NAMES]
    for path in paths:
        check_writable(path)
    trace = trace_file(options.trace, options.requests)
    rules, capacities = _rules(trace, options), options.capacity_tokens or _capacities(trace)
    outcomes, unlimited = _outcomes(trace, rules, policies, capacities)
    report = ReplayReport(
        source=str(options.trace),
        facts=_facts(trace),
        rules=rules,
        lines=lines_of(trace, outcomes, options.seed),
        unlimited_share=unlimited,
        settings=arguments.settings_in_text(options),
        measured=Measured.now(command, "cpu"),
    )
    document, table, page = paths
    write_json(document, report.to_dict())
    write_text(table, report.csv())
    write_text(page, report.page())
    show(report.tables(), _TABLE_WIDTH)
    for sentence in (*report.facts, *paths):
        say(sentence)
    return True


def _policies(names: Sequence[str]) -> tuple[str, ...]:
    """The baseline, the policies that were asked for, and the optimum."""
    known = [each.value for each in ReplayPolicy]
    for name in names:
        if name not in known:
            raise ConfigurationError(f"--policies names {name!r}; there are {', '.join(known)}.")
    return tuple(dict.fromkeys((BASELINE, *names, OPTIMUM)))


def _check_options(options: argparse.Namespace) -> None:
    arguments.check_integers(options, seed=0, min_match_length=1, recompute_tokens=0)
    if options.requests is not None:
        arguments.check_integers(options, requests=1)
        if options.requests > MAX_REQUESTS:
            raise ConfigurationError(f"--requests is {options.requests}; it must be at most {MAX_REQUESTS}.")
    for capacity in options.capacity_tokens or ():
        if not 1 <= capacity <= arguments.HIGHEST:
            raise ConfigurationError(f"--capacity-tokens holds {capacity}; a cache holds 1 to {arguments.HIGHEST}.")


def _rules(trace: Trace, options: argparse.Namespace) -> tuple[ReuseRule, ...]:
    """What the trace's format says of reuse: an id of Mooncake's depends on all text before its block."""
    prefix = ReuseRule(EXACT_PREFIX, as_prefixes=True)
    if trace.form is TraceFormat.MOONCAKE:
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


def _facts(trace: Trace) -> list[str]:
    held = trace.held_prefix_blocks
    facts = [
        f"{len(trace):,} requests of {trace.block_uses:,} blocks and {sum(trace.prompt_tokens()):,} tokens, "
        f"{len(trace.spans):,} blocks and {sum(trace.spans.tokens):,} tokens of them distinct.",
        f"Blocks of a prefix that an earlier request had: {held:,}, {held / trace.block_uses:.1%} of all blocks.",
    ]
    if trace.form is TraceFormat.MOONCAKE:
        facts.append("What an exact prefix cache reuses is known; what reuse of moved text would add is not.")
    if trace.empty:
        facts.append(f"Requests without tokens, which are not replayed: {trace.empty:,}.")
    if trace.skipped.counts:
        facts.append(trace.skipped.sentence())
    return facts


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


@dataclass(frozen=True, slots=True)
class Line:
    """`hit_share` and `saved_tokens` are of all prompts' tokens. `hit_share_over_lru`: minus that of lru with the same
    rule and capacity."""

    rule: str
    policy: str
    capacity_tokens: int
    hit_share: float
    saved_tokens: int
    evictions: int
    regrets: int
    hit_share_over_lru: Interval | None


def lines_of(trace: Trace, outcomes: Sequence[Outcome], seed: int) -> list[Line]:
    """One line for each outcome, in their order; those of lru are among them."""
    prompts = np.array(trace.prompt_tokens(), dtype=np.int64)
    of_lru = {(each.rule, each.capacity_tokens): each.reused for each in outcomes if each.policy == BASELINE}
    return [
        Line(
            rule=each.rule,
            policy=each.policy,
            capacity_tokens=each.capacity_tokens,
            hit_share=float(each.reused.sum() / prompts.sum()),
            saved_tokens=int(each.reused.sum()),
            evictions=each.evictions,
            regrets=each.regrets,
            hit_share_over_lru=None
            if each.policy == BASELINE
            else ratio_interval(each.reused - of_lru[each.rule, each.capacity_tokens], prompts, seed),
        )
        for each in outcomes
    ]


SCHEMA = 3
_HEADINGS = "policy | capacity | reused | saved tokens | evicted | regrets | reused - lru, points"
_NOTES = f"""
One cache serves the whole trace, as if there were one replica: one request after the other in the order of their
times, each whole before the next. A cache shares a block as a whole or not at all, never with another tenant or model.
To the policy each held block is one donor; a connector keeps whole prompts as donors. No block of a request goes while
it is served. Every reused token costs the same, whether exact or moved.

Reused: share of the prompts' tokens that were not computed. Regrets: blocks that were asked for again after they had
been evicted. `{OPTIMUM}` knows every future request (Belady 1966): the bound of held blocks if all have one size; if
sizes differ, or spans lose their first tokens, a good order but no bound. Differences are the policy's minus those of
lru with their {CONFIDENCE:.0%} interval, from {RESAMPLES:,} bootstrap resamples of runs of successive requests; `*`
marks those that exclude 0.
"""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A replay's findings. `facts`: sentences about the trace; `unlimited_share`: share of tokens that each rule reuses
    in an unlimited cache."""

    source: str
    facts: Sequence[str]
    rules: Sequence[ReuseRule]
    lines: Sequence[Line]
    unlimited_share: dict[str, float]
    settings: dict[str, Any]
    measured: Measured

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        found = asdict(self)
        return {"schema": SCHEMA, **found, **found.pop("measured")}

    def csv(self) -> str:
        """A CSV table with a row for each line; the interval takes three columns."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        *plain, over_lru = (each.name for each in fields(Line))
        writer.writerow([*plain, *(over_lru + end for end in ("", "_low", "_high"))])
        for line in self.lines:
            found = line.hit_share_over_lru
            bounds = ("", "", "") if found is None else (found.estimate, found.low, found.high)
            writer.writerow([*(getattr(line, name) for name in plain), *bounds])
        return text.getvalue()

    def page(self) -> str:
        """The Markdown page."""
        parts = [f"# Replay of {self.source}", f"{self.measured.sentence()}.", " ".join(self.facts), _NOTES.strip()]
        for rule in self.rules:
            table = markdown_table(_HEADINGS, map(_cells, self._of(rule)))
            parts += [f"## {rule.name}", self._rule_sentence(rule), table]
        return "\n\n".join(parts) + "\n"

    def tables(self) -> list[Table]:
        """One table for each rule, for a terminal."""
        tables = []
        for rule in self.rules:
            headings = _HEADINGS.split(" | ")
            table = table_of(rule.name, headings, headings[1:], ("policy",))
            table.caption, table.caption_justify = self._rule_sentence(rule), "left"
            for line in self._of(rule):
                table.add_row(*_cells(line), end_section=line.policy == OPTIMUM)
            tables.append(table)
        return tables

    def _of(self, rule: ReuseRule) -> list[Line]:
        return [line for line in self.lines if line.rule == rule.name]

    def _rule_sentence(self, rule: ReuseRule) -> str:
        return f"{rule.sentence()} Without a limit {self.unlimited_share[rule.name]:.1%} of the tokens are reused."


def _cells(line: Line) -> tuple[str, ...]:
    found, difference = line.hit_share_over_lru, "-"
    if found is not None:
        estimate, low, high = (100 * value for value in (found.estimate, found.low, found.high))
        difference = f"{estimate:+.1f} [{low:+.1f}, {high:+.1f}]{'*' * found.is_a_difference}"
    numbers = (line.saved_tokens, line.evictions, line.regrets)
    saved, evicted, regrets = (f"{value:,}" for value in numbers)
    return line.policy, f"{line.capacity_tokens:,}", f"{line.hit_share:.1%}", saved, evicted, regrets, difference
