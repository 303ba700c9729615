"""The command line of `python -m validation replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from semblend_trt.donors.eviction import Eviction
from validation.arguments import PROGRAM, Parser, add_defaults
from validation.replay.latency import MIN_OF_A_TRACE
from validation.replay.workloads import WORKLOADS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_DESCRIPTION = """
Replays request telemetry through the eviction policies, for an exact prefix cache and for reuse of spans, and predicts
the time to the first token by a fitted model; nothing is measured. Writes replay_results.json, replay_metrics.csv,
replay_summary.md and replay_plot.png. Exit status: 0 the replay is complete, 2 bad usage or an
error, 130 interrupted.
"""
LATENCY_PROFILE = Path("benchmarks/results/h200/ttft.json")


def parse_replay(arguments: Sequence[str]) -> argparse.Namespace:
    """Arguments of a replay; exits with status 2 for any that argparse refuses."""
    parser = Parser(prog=f"{PROGRAM} replay", description=_DESCRIPTION, allow_abbrev=False)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE.jsonl", help="request telemetry as a router writes it")
    source.add_argument("--workload", metavar="NAME", help=f"a built-in trace: {', '.join(WORKLOADS)}")
    parser.add_argument("--skip-bad", action="store_true", help="count lines that cannot be read and pass over them")
    parser.add_argument("--requests", type=int, default=600, help="requests of a built-in trace")
    parser.add_argument("--seed", type=int, default=0, help="seed of a built-in trace and of the bootstrap")
    parser.add_argument("--write-trace", type=Path, metavar="FILE.jsonl", help="save the built-in trace")
    names = [each.value for each in Eviction]
    parser.add_argument(
        "--policies",
        nargs="+",
        default=names,
        metavar="NAME",
        help=f"eviction policies: {', '.join(names)}; lru is always among them",
    )
    parser.add_argument(
        "--capacity-tokens",
        nargs="+",
        type=int,
        metavar="N",
        help="tokens that a cache holds (default: a tenth, a quarter and half of the trace's distinct tokens)",
    )
    parser.add_argument("--min-match-length", type=int, default=64, help="shortest span that is reused, in tokens")
    parser.add_argument(
        "--recompute-tokens", type=int, default=16, help="first tokens of each reused span that are computed again"
    )
    parser.add_argument(
        "--latency-profile",
        type=Path,
        metavar="FILE.json",
        help="result rows to fit the latency model to (default: the trace's own observations where it has "
        f"{MIN_OF_A_TRACE} or more, else {LATENCY_PROFILE})",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("results/replay"), metavar="DIR", help="folder of the files"
    )
    add_defaults(parser)
    return parser.parse_args(arguments)
