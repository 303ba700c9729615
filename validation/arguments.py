"""The command line of `python -m validation`."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from semblend_trt.command_line import named
from semblend_trt.errors import ConfigurationError
from semblend_trt.printable import printable
from validation import judge
from validation.arms import ALL_NAMES, BOUNDARY, POSITION_FIX, VERIFIED
from validation.engines import EMBEDDED, VLLM
from validation.gates import GateBounds

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "python -m validation"
# Every generator of random numbers takes it for a seed, with room above it for the seeds that follow.
HIGHEST = 2**32 - 1
_DESCRIPTION = """
Serves the same prompts cold, cold again (the noise floor), with an exact prefix cache, and with reuse under several
policies; compares times and answers. As the first word, `quality` compares answers at scale and without times,
`calibrate` finds what a model may safely reuse, `confirm` whether that holds in another engine, `replay` predicts what
eviction policies do with request telemetry, `scoreboard` prints the recorded results; each has a --help of its own.
Exit status: 0 all gates hold, 1 a gate failed (named on stderr), 2 bad usage or an error, 130 interrupted.
"""
_GATES = """
gates:
  speedup, rouge1, token_f1 read the arm named by --policy on all workloads in which reuse is expected: the median of
  cold's TTFT over its own; mean ROUGE-1 and mean token F1 of its answers against cold's.
  exact_match_drop: cold's exact match minus the arm's, on the same workloads, where the answer is known; at most the
  noise floor's drop and 0.01 more. perplexity_ratio: geometric mean of the arm's perplexity over cold's, there; at
  most 1.01 times the noise floor's.
  unrelated_fires (= 0) and exact_prefix_untouched (= 1) read every reusing arm.
  donor_registrations to rope_corrections count events in the audit log of the arm named by --policy.
  wrapper_exactness (<= 1e-4): logits of the wrapper against the plain forward; float32 only. With --engine vllm they
  are compared with vLLM's own, whatever the type, and may differ as much as those do among themselves.
  A gate without a sample to read (with --prompts) is shown as such and does not fail.
"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence; argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"validation: {message[:1].upper()}{message[1:]}. See {self.prog} --help.") + "\n")


def parse_run(arguments: Sequence[str]) -> argparse.Namespace:
    """Arguments of a validation run; exits with status 2 for any that argparse refuses."""
    parser = Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=textwrap.dedent(_GATES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--model", type=named, metavar="PATH_OR_ID", help="model folder or hub id (default: the shipped model)"
    )
    what.add_argument(
        "--engine",
        choices=(EMBEDDED, VLLM),
        default=EMBEDDED,
        help="where the prompts are served: embedded; or vllm, through its LLM class in this process, one arm after "
        "the other, on a device that it chooses itself",
    )
    what.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help=_PROMPTS)
    what.add_argument(
        "--arms",
        type=named,
        metavar="NAMES",
        help=f"arms, with commas between them: {', '.join(ALL_NAMES)}, boundary_N, epic_N, cacheblend_N, or all "
        "(default: those without a number)",
    )
    what.add_argument(
        "--policy",
        type=named,
        metavar="ARM",
        help=f"arm that the gates read (default: {VERIFIED} with a reuse profile, else {POSITION_FIX})",
    )
    what.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help=f"reuse profile for the arm {VERIFIED} (default: reuse-profile.json in the model's folder, if there)",
    )
    what.add_argument(
        "--boundary",
        type=int,
        metavar="LAYERS",
        help=f"lowest layers that the arm {BOUNDARY} computes for all tokens (default: a third of the model's)",
    )
    what.add_argument("--max-tokens", type=int, default=64, help="longest answer, in tokens")
    what.add_argument("--min-match-length", type=int, default=64, help="shortest run of equal tokens that is reused")
    what.add_argument("--seed", type=int, default=0, help="seed of the built-in prompts")
    what.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="measure everything N times, each with fresh engines"
    )
    what.add_argument(
        "--device",
        help="auto, cpu, cuda or cuda:N; default auto, but cpu for the shipped model, whose prefill no card notices",
    )
    what.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="weights and KV"
    )
    _add_gates(parser.add_argument_group("gates"))
    scores = parser.add_argument_group("further scores")
    scores.add_argument(
        "--ppl-model", type=named, metavar="PATH_OR_ID", help="another causal LM that scores the answers' perplexity"
    )
    scores.add_argument("--judge-command", metavar="CMD", help=_JUDGE)
    files = parser.add_argument_group("files")
    files.add_argument("--output", type=Path, default=Path("results/trtllm-semblend.json"), help="JSON report")
    files.add_argument(
        "--audit-path",
        type=Path,
        default=Path("results/trtllm-semblend-audit.jsonl"),
        help="audit log of the reusing arms",
    )
    files.add_argument(
        "--record", type=Path, metavar="FOLDER", help="write result rows to FOLDER/MACHINE/end_to_end.json"
    )
    files.add_argument("--machine", help="name of the machine in result rows (default: cpu-Ncore or the GPU's name)")
    add_defaults(parser)
    return parser.parse_args(arguments)


def add_defaults(parser: argparse.ArgumentParser) -> None:
    """Says in the help of every option what its default is."""
    for action in parser._actions:
        if action.default not in (None, argparse.SUPPRESS) and action.help:
            action.help += " (default: %(default)s)"


def check_integers(options: argparse.Namespace, **lowest: int) -> None:
    """Raises ConfigurationError for an option below its lowest value or above HIGHEST."""
    for name, least in lowest.items():
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if value < least:
            raise ConfigurationError(f"{option} is {value}; it must be at least {least}.")
        if value > HIGHEST:
            raise ConfigurationError(f"{option} is {value}; it must be at most {HIGHEST}.")


def settings_in_text(options: argparse.Namespace, **others: object) -> dict[str, Any]:
    """The options for a report, paths as text; `others` add to them or take their place."""
    settings = {**vars(options), **others}
    return {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}


def parse_scoreboard(arguments: Sequence[str]) -> argparse.Namespace:
    """Arguments of `scoreboard`; exits with status 2 for any that argparse refuses."""
    parser = Parser(
        prog=f"{PROGRAM} scoreboard",
        description="Prints all result rows; compares or rewrites the tables that a README makes from them.",
        allow_abbrev=False,
    )
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder of result rows")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="document that holds the tables")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check", action="store_true", help="exit with 1 when the document's tables differ from the rows"
    )
    action.add_argument("--write", action="store_true", help="rewrite the document's tables")
    return parser.parse_args(arguments)


_PROMPTS = (
    'cases instead of the built-in ones, one a line: {"id": str, "donors": [str, ...], "prompt": str, "reference": str '
    "or null}"
)
_JUDGE = (
    'command that reads {"id", "arm", "prompt", "reference", "cold", "answer"} as JSON on stdin and prints a score of '
    f"0 to 1, within {judge.TIMEOUT_SECONDS:g} s and {judge.MAX_OUTPUT_BYTES} bytes each time; failures are reported, "
    f"not fatal, and after {judge.MAX_TIMEOUTS} in a row that took too long it is not asked again"
)


def _add_gates(group: argparse._ArgumentGroup) -> None:
    defaults = GateBounds()
    group.add_argument("--min-speedup", type=float, default=defaults.min_speedup, help="TTFT against cold")
    group.add_argument(
        "--min-rouge1", type=float, default=defaults.min_rouge1, help="ROUGE-1 F1 against cold's answers"
    )
    group.add_argument(
        "--min-token-f1", type=float, default=defaults.min_token_f1, help="token F1 against cold's answers"
    )
    for name, what in (
        ("donor-registrations", "requests that became donors"),
        ("semantic-hits", "look-ups that found a donor"),
        ("materializations", "requests whose donors' KV was placed"),
        ("incremental-matched-tokens", "tokens promised beyond the engine's own prefix"),
        ("rope-corrections", "requests whose donors' keys were rotated"),
    ):
        group.add_argument(
            f"--min-{name}", type=int, default=getattr(defaults, f"min_{name.replace('-', '_')}"), help=what
        )
