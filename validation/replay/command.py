"""`python -m validation replay`: replays a trace under every policy and capacity, and reports what was found.

The report is JSON, and a Markdown page, which is printed as well."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable, write_bytes
from validation import arguments
from validation.replay.simulation import EXACT_PREFIX, OPTIMUM, POLICIES, ReuseRule, simulate
from validation.replay.trace import MOONCAKE, NONE, Trace, trace_file
from validation.results import Measured, say, table_of, write_json

FILE_NAMES = ("replay_results.json", "replay_summary.md")
SCHEMA = 4
BASELINE = "lru"
_DEFAULT_SHARES = (0.1, 0.25, 0.5)
_DESCRIPTION = """
Replays requests through the eviction policies, for an exact prefix cache and for reuse of spans. Reads traces in the
SemanticKV system's format and as Mooncake publishes them; lines that cannot be read are passed over and counted. Writes
replay_results.json and replay_summary.md. Exit status: 0 the replay is complete, 2 bad usage, an error, or nothing
could be read, 130 interrupted.
"""


def parse_replay(given: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a replay; exit with status 2 if argparse refuses any."""
    parser = arguments.Parser("replay", _DESCRIPTION)
    text = "request telemetry or a published trace, as JSON lines"
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help=text)
    parser.add_argument("--requests", type=int, metavar="N", help="the first N requests of the file (default: all)")
    text = f"eviction policies: {', '.join(POLICIES)}; lru is always among them"
    parser.add_argument("--policies", nargs="+", default=[*POLICIES], metavar="NAME", help=text)
    text = "tokens that a cache holds (default: a tenth, a quarter and half of the trace's distinct tokens)"
    parser.add_argument("--capacity-tokens", nargs="+", type=int, metavar="N", help=text)
    arguments.add(parser, "--min-match-length", help="shortest span that is reused, in tokens")
    text = "first tokens of each reused span that are computed again"
    parser.add_argument("--recompute-tokens", type=int, default=16, help=text)
    arguments.add(parser, "--output", default=Path("results/replay"), metavar="DIR", help="folder of the files")
    return parser.parse_args(given)


def run_replay(options: argparse.Namespace, command: str) -> bool:
    """Run and write everything; always True. Raises SemBlendError and OSError."""
    for name in options.policies:
        if name not in POLICIES:
            raise ConfigurationError(f"--policies names {name!r}; there are {', '.join(POLICIES)}.")
    arguments.check_integers(options, min_match_length=1, recompute_tokens=0)
    if options.requests is not None:
        arguments.check_integers(options, requests=1)
    for capacity in options.capacity_tokens or ():
        if not 1 <= capacity <= arguments.HIGHEST:
            raise ConfigurationError(f"--capacity-tokens holds {capacity}; a cache holds 1 to {arguments.HIGHEST}.")
    document, page = paths = [options.output / name for name in FILE_NAMES]
    for path in paths:
        check_writable(path)
    trace = trace_file(options.trace, options.requests)
    prefixes = trace.prefixes()
    rules = {EXACT_PREFIX: prefixes}
    # An id of Mooncake's depends on all text before its block, so it says nothing of spans.
    if trace.form != MOONCAKE:
        rules[ReuseRule("span", options.min_match_length, options.recompute_tokens)] = trace
    facts, (lines, unlimited) = _facts(trace, prefixes), _replayed(rules, options)
    measured = Measured.now(command, "cpu")
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "source": str(options.trace),
        "facts": facts,
        "rules": list(map(asdict, rules)),
        "lines": lines,
        "unlimited_share": unlimited,
        "settings": arguments.settings_in_text(options),
        **asdict(measured),
    }
    write_json(document, found)
    parts = [f"# Replay of {options.trace}", f"{measured.sentence()}.", " ".join(facts), _NOTES.strip()]
    for rule in rules:
        what = f"{rule.sentence()} Without a limit {unlimited[rule.name]:.1%} of the tokens are reused."
        own = [line for line in lines if line["rule"] == rule.name]
        parts += [f"## {rule.name}", what, table_of(_HEADINGS, map(_cells, own))]
    text = "\n\n".join(parts) + "\n"
    write_bytes(page, text.encode())
    for line in (*text.splitlines(), *paths):
        say(line)
    return True


def _replayed(
    rules: dict[ReuseRule, Trace], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return a line for each rule, capacity and policy, and the share that each rule reuses in an unlimited cache."""
    [*_, trace] = rules.values()
    distinct, total = sum(trace.tokens), trace.prompt_tokens
    defaults = sorted({max(1, round(distinct * share)) for share in _DEFAULT_SHARES})
    capacities = list(dict.fromkeys(options.capacity_tokens or defaults))
    policies = list(dict.fromkeys((BASELINE, *options.policies, OPTIMUM)))
    lines, unlimited = list[dict[str, Any]](), dict[str, float]()
    with arguments.progress("Replaying", len(rules) * (len(capacities) * len(policies) + 1)) as on_step:
        for rule, blocks in rules.items():
            for capacity in capacities:
                of_lru = 0
                for policy in policies:
                    reused, cache = simulate(blocks, rule, policy, capacity)
                    saved = sum(reused)
                    of_lru = saved if policy == BASELINE else of_lru
                    more = None if policy == BASELINE else (saved - of_lru) / total
                    line = {"rule": rule.name, "policy": policy, "capacity_tokens": capacity}
                    line |= {"hit_share": saved / total, "saved_tokens": saved, "hit_share_over_lru": more}
                    lines.append({**line, "evictions": cache.evictions})
                    on_step(policy)
            everything, _ = simulate(blocks, rule, BASELINE, max(1, sum(blocks.tokens)))
            unlimited[rule.name] = sum(everything) / total
            on_step("unlimited")
    return lines, unlimited


def _facts(trace: Trace, prefixes: Trace) -> list[str]:
    seen, held, uses = {NONE}, 0, sum(len(blocks) for _, blocks in trace.requests)
    for _, request in prefixes.requests:
        held += sum(block in seen and block != NONE for block in request)
        seen.update(request)
    facts = [
        f"{len(trace.requests):,} requests of {uses:,} blocks and {trace.prompt_tokens:,} tokens, "
        f"{len(trace.tokens):,} blocks and {sum(trace.tokens):,} tokens of them distinct.",
        f"Blocks of a prefix that an earlier request had: {held:,}, {held / uses:.1%} of all blocks.",
    ]
    if trace.form == MOONCAKE:
        facts.append("What an exact prefix cache reuses is known; what reuse of moved text would add is not.")
    return [*facts, *filter(None, [trace.skipped.sentence()])]


_HEADINGS = "policy | capacity | reused | saved tokens | evicted | reused - lru, points"
_NOTES = f"""
One cache serves the whole trace, as if there were one replica: one request after the other in the order of their
times, each whole before the next. A cache shares a block as a whole or not at all, never with another tenant or model.
To the policy each held block is one donor; a connector keeps whole prompts as donors. No block of a request goes while
it is served. Every reused token costs the same, whether exact or moved.

Reused: share of the prompts' tokens that were not computed. `{OPTIMUM}` knows every future request (Belady 1966): the
bound of held blocks if all have one size and the cache holds each request; else a good order but no bound.
"""


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    more = line["hit_share_over_lru"]
    counts = (f"{line[name]:,}" for name in ("saved_tokens", "evictions"))
    difference = "-" if more is None else f"{100 * more:+.1f}"
    return line["policy"], f"{line['capacity_tokens']:,}", f"{line['hit_share']:.1%}", *counts, difference
