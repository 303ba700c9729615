"""`python -m validation replay`: replays a trace under every policy and capacity, and reports what was found.

The report has figures with intervals: as JSON, and as a Markdown page, which is printed as well.
"""

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable
from validation import arguments
from validation.output import progress, write_json, write_text
from validation.replay.simulation import (
    EXACT_PREFIX,
    OPTIMUM,
    SPAN,
    Fleet,
    ReplayPolicy,
    ReuseRule,
    serve_fleet,
    simulate,
)
from validation.replay.trace import MAX_REQUESTS, Trace, TraceFormat, trace_file
from validation.results import Measured, Results, say, table_of

FILE_NAMES = ("replay_results.json", "replay_summary.md")
SCHEMA = 3
BASELINE = ReplayPolicy.LRU.value
_DEFAULT_SHARES = (0.1, 0.25, 0.5)
PULL, PULL_ROWS = "pull", "replay_pull"
# Of a fleet's worker by default: 64 GiB of an 8B model's KV.
FLEET_CAPACITY, MAX_WORKERS = 524_288, 64
_DESCRIPTION = """
Replays requests through the eviction policies, for an exact prefix cache and for reuse of spans. Reads traces in the
SemanticKV system's format and as Mooncake publishes them; lines that cannot be read are passed over and counted. Writes
replay_results.json and replay_summary.md. With --policy pull a growing fleet serves the trace, and
replay_pull_TRACE.json says what fetches from other workers add to placement by held text. Exit status: 0 the replay is
complete, 2 bad usage, an error, or nothing could be read, 130 interrupted.
"""


def parse_replay(given: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a replay; exit with status 2 if argparse refuses any."""
    parser = arguments.Parser("replay", _DESCRIPTION)
    text = "request telemetry or a published trace, as JSON lines"
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help=text)
    parser.add_argument("--requests", type=int, metavar="N", help="the first N requests of the file (default: all)")
    arguments.add(parser, "--seed", help="seed of the bootstrap")
    names = [each.value for each in ReplayPolicy]
    text = f"eviction policies: {', '.join(names)}; lru is always among them"
    parser.add_argument("--policies", nargs="+", default=names, metavar="NAME", help=text)
    text = "tokens that a cache holds (default: a tenth, a quarter and half of the trace's distinct tokens)"
    parser.add_argument("--capacity-tokens", nargs="+", type=int, metavar="N", help=text)
    arguments.add(parser, "--min-match-length", help="shortest span that is reused, in tokens")
    text = "first tokens of each reused span that are computed again"
    parser.add_argument("--recompute-tokens", type=int, default=16, help=text)
    arguments.add(parser, "--output", default=Path("results/replay"), metavar="DIR", help="folder of the files")
    text = "serve the trace by several workers, which fetch from each other what that makes faster; writes rows"
    fleet = parser.add_argument_group("a fleet")
    fleet.add_argument("--policy", choices=(PULL,), help=text)
    text = "workers of the first third of the requests, and of the others"
    fleet.add_argument("--workers", nargs=2, type=int, default=(2, 8), metavar="N", help=text)
    fleet.add_argument("--gbits", nargs="+", type=int, default=(10, 25, 100, 400), metavar="N", help="Gb/s of a link")
    text = "tokens that a worker prefills in a second (default: %(default)s)"
    fleet.add_argument("--prefill-rate", type=int, default=27_000, metavar="N", help=text)
    text = "bytes of KV a token (default: %(default)s, of an 8B model in bf16)"
    fleet.add_argument("--token-bytes", type=int, default=131_072, metavar="N", help=text)
    return parser.parse_args(given)


def run_replay(options: argparse.Namespace, command: str) -> bool:
    """Run and write everything; always True. Raises SemBlendError and OSError."""
    _check(options)
    if options.policy == PULL:
        return run_pull(options, command)
    document, page = paths = [options.output / name for name in FILE_NAMES]
    for path in paths:
        check_writable(path)
    trace = trace_file(options.trace, options.requests)
    rules, facts = _rules(trace, options), _facts(trace)
    lines, unlimited = _replayed(trace, rules, options)
    measured = Measured.now(command, "cpu")
    found = {
        "source": str(options.trace),
        "facts": facts,
        "rules": list(map(asdict, rules)),
        "lines": lines,
        "unlimited_share": unlimited,
        "settings": arguments.settings_in_text(options),
        "measured": asdict(measured),
    }
    write_json(document, {"schema": SCHEMA, **found, **asdict(measured)})
    parts = [f"# Replay of {options.trace}", f"{measured.sentence()}.", " ".join(facts), _NOTES.strip()]
    for rule in rules:
        what = f"{rule.sentence()} Without a limit {unlimited[rule.name]:.1%} of the tokens are reused."
        own = [line for line in lines if line["rule"] == rule.name]
        parts += [f"## {rule.name}", what, table_of(_HEADINGS, map(_cells, own))]
    text = "\n\n".join(parts) + "\n"
    write_text(page, text)
    for line in (*text.splitlines(), *paths):
        say(line)
    return True


def run_pull(options: argparse.Namespace, command: str) -> bool:
    """Serve the trace by a fleet without and with fetches, and write rows; always True. Raises as `run_replay`."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", options.trace.stem)
    check_writable(options.output / f"{PULL_ROWS}_{stem}.json")
    trace = trace_file(options.trace, options.requests)
    rule, capacity = _rules(trace, options)[-1], (options.capacity_tokens or [FLEET_CAPACITY])[0]
    first, last = options.workers
    fleet = Fleet(first, last, capacity, options.prefill_rate, options.token_bytes)
    rows = Results(measured=Measured.now(command, "cpu"), is_shown=False)
    with progress("Serving", 1 + len(options.gbits)) as on_step:
        alone = serve_fleet(trace, rule, fleet)
        on_step("placement alone")
        for gbits in options.gbits:
            found, tokens, name = serve_fleet(trace, rule, fleet, gbits), int(alone.tokens.sum()), f"{gbits}g_{stem}"
            before, share, fetched = (each.sum() / tokens for each in (alone.reused, found.reused, found.fetched))
            text = f"simulated; {share:.1%} of {tokens:,} tokens reused, {before:.1%} by placement alone; "
            points = 100.0 * (share - before)
            rows.add(
                f"{PULL_ROWS}_gain_points_{name}", points, "points", f"{text}{fetched:.1%} fetched", better="higher"
            )
            then, now = (float(np.quantile(each.ttft, 0.95)) for each in (alone, found))
            text = f"simulated; p95 of TTFT {1e3 * now:,.0f} ms, {1e3 * then:,.0f} ms by placement alone"
            rows.add(f"{PULL_ROWS}_ttft_p95_ratio_{name}", now / then, "ratio", text)
            on_step(f"{gbits} Gb/s")
    say(f"{' '.join(_facts(trace))} Served by {fleet.first}, then {fleet.last} workers of {capacity:,} tokens each.")
    rows.write(options.output, f"{PULL_ROWS}_{stem}")
    return True


def _rules(trace: Trace, options: argparse.Namespace) -> list[ReuseRule]:
    rules = [ReuseRule(EXACT_PREFIX, as_prefixes=True)]
    # An id of Mooncake's depends on all text before its block, so it says nothing of spans.
    if trace.form is not TraceFormat.MOONCAKE:
        rules.append(ReuseRule(SPAN, False, options.min_match_length, options.recompute_tokens))
    return rules


def _check(options: argparse.Namespace) -> None:
    known = [each.value for each in ReplayPolicy]
    for name in options.policies:
        if name not in known:
            raise ConfigurationError(f"--policies names {name!r}; there are {', '.join(known)}.")
    arguments.check_integers(options, seed=0, min_match_length=1, recompute_tokens=0, prefill_rate=1, token_bytes=1)
    first, last = options.workers
    if not 1 <= first <= last <= MAX_WORKERS:
        raise ConfigurationError(f"--workers is {first} {last}; it must ascend, from 1 to {MAX_WORKERS}.")
    if wrong := [each for each in options.gbits if each < 1]:
        raise ConfigurationError(f"--gbits holds {wrong[0]}; a link has at least 1 Gb/s.")
    if options.requests is not None:
        arguments.check_integers(options, requests=1)
        if options.requests > MAX_REQUESTS:
            raise ConfigurationError(f"--requests is {options.requests}; it must be at most {MAX_REQUESTS}.")
    for capacity in options.capacity_tokens or ():
        if not 1 <= capacity <= arguments.HIGHEST:
            raise ConfigurationError(f"--capacity-tokens holds {capacity}; a cache holds 1 to {arguments.HIGHEST}.")


def _replayed(
    trace: Trace, rules: Sequence[ReuseRule], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return a line for each rule, capacity and policy, and the share that each rule reuses in an unlimited cache.

    Shares and tokens are of all prompts' tokens. `hit_share_over_lru`: less lru's with this rule and capacity."""
    prompts = np.array([tokens for *_, tokens in trace.requests(as_prefixes=False)], dtype=np.int64)
    distinct, total = sum(trace.spans.tokens), trace.tokens
    defaults = sorted({max(1, round(distinct * share)) for share in _DEFAULT_SHARES})
    capacities = list(dict.fromkeys(options.capacity_tokens or defaults))
    policies = list(dict.fromkeys((BASELINE, *options.policies, OPTIMUM)))
    lines, unlimited = list[dict[str, Any]](), dict[str, float]()
    with progress("Replaying", len(rules) * (len(capacities) * len(policies) + 1)) as on_step:
        for rule in rules:
            for capacity in capacities:
                of_lru = prompts
                for policy in policies:
                    reused, cache = simulate(trace, rule, policy, capacity)
                    of_lru = reused if policy == BASELINE else of_lru
                    interval = None if policy == BASELINE else ratio_interval(reused - of_lru, prompts, options.seed)
                    saved = int(reused.sum())
                    line = {"rule": rule.name, "policy": policy, "capacity_tokens": capacity}
                    line |= {"hit_share": saved / total, "saved_tokens": saved}
                    line |= {"evictions": cache.evictions, "regrets": cache.regrets, "hit_share_over_lru": interval}
                    lines.append(line)
                    on_step(policy)
            everything, _ = simulate(trace, rule, BASELINE, max(1, sum(rule.blocks(trace).tokens)))
            unlimited[rule.name] = float(everything.sum() / total)
            on_step("unlimited")
    return lines, unlimited


def _facts(trace: Trace) -> list[str]:
    held = trace.held_prefix_blocks
    facts = [
        f"{len(trace):,} requests of {trace.block_uses:,} blocks and {trace.tokens:,} tokens, "
        f"{len(trace.spans.tokens):,} blocks and {sum(trace.spans.tokens):,} tokens of them distinct.",
        f"Blocks of a prefix that an earlier request had: {held:,}, {held / trace.block_uses:.1%} of all blocks.",
    ]
    if trace.form is TraceFormat.MOONCAKE:
        facts.append("What an exact prefix cache reuses is known; what reuse of moved text would add is not.")
    if trace.empty:
        facts.append(f"Requests without tokens, which are not replayed: {trace.empty:,}.")
    return [*facts, *filter(None, [trace.skipped.sentence()])]


CONFIDENCE = 0.95
RESAMPLES = 2_000


def ratio_interval(numerators: npt.ArrayLike, denominators: npt.ArrayLike, seed: int = 0) -> dict[str, float] | None:
    """Return the sum of `numerators` over that of `denominators`, [requests] in order, as `estimate`, with its bounds
    `low` and `high` at CONFIDENCE; None below 4 requests.

    A block bootstrap (Carlstein 1986): whole runs of about sqrt(requests) successive requests are resampled, since
    requests reuse the blocks of earlier ones. Equal seeds give equal bounds."""
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if len(above) < 4:
        return None
    starts = np.arange(0, len(above), math.isqrt(len(above)))
    above, below = np.add.reduceat(above, starts), np.add.reduceat(below, starts)
    drawn = np.random.default_rng(seed).integers(0, len(starts), (RESAMPLES, len(starts)))
    ratios = above[drawn].sum(axis=1) / np.maximum(below[drawn].sum(axis=1), 1e-300)
    low, high = np.quantile(ratios, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return {"estimate": float(above.sum() / below.sum()), "low": float(low), "high": float(high)}


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


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    found, difference = line["hit_share_over_lru"], "-"
    if found is not None:
        estimate, low, high = (100 * value for value in found.values())
        difference = f"{estimate:+.1f} [{low:+.1f}, {high:+.1f}]{'*' * (low > 0.0 or high < 0.0)}"
    saved, evicted, regrets = (f"{line[name]:,}" for name in ("saved_tokens", "evictions", "regrets"))
    return (
        line["policy"],
        f"{line['capacity_tokens']:,}",
        f"{line['hit_share']:.1%}",
        saved,
        evicted,
        regrets,
        difference,
    )
