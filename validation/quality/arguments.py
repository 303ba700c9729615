"""The command line of `python -m validation quality`, and what its options ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from semblend_trt.command_line import named
from validation.arguments import PROGRAM, Parser, add_defaults, check_integers
from validation.arms import ALL_NAMES, VERIFIED
from validation.engines import EMBEDDED, TRTLLM, VLLM
from validation.families.catalog import FAMILIES, FamilyRequest
from validation.models import shipped_model
from validation.prompts import FORMS
from validation.quality.batches import BatchSettings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_DESCRIPTION = """
Serves many prompts of every family in batches, cold, cold again (the noise floor) and under other arms, and compares
their answers with cold's by a paired bootstrap. Measures no times. Exit status: 0 the run is complete, 1 the arm
verified is inferior to cold somewhere, 2 bad usage or an error, 130 interrupted.
"""

_ENGINES = (
    "where the prompts are served: embedded; vllm, through its LLM class in this process; or trtllm, which is "
    "TensorRT-LLM with the wrapper through its LLM API (untested on a real one)"
)


def parse_quality(arguments: Sequence[str]) -> argparse.Namespace:
    """Arguments of a quality run; exits with status 2 for any that argparse refuses."""
    parser = Parser(prog=f"{PROGRAM} quality", description=_DESCRIPTION, allow_abbrev=False)
    add_model(parser)
    add_engine(parser)
    parser.add_argument("--profile", type=Path, metavar="FILE", help=f"reuse profile for the arm {VERIFIED}")
    parser.add_argument(
        "--arms",
        type=named,
        metavar="NAMES",
        help=f"arms, with commas between them: {', '.join(ALL_NAMES)}, boundary_N, epic_N, cacheblend_N, or all "
        f"(default: cold, cold_again, position_fix, and {VERIFIED} where there is a reuse profile)",
    )
    parser.add_argument(
        "--boundary", type=int, metavar="LAYERS", help="layers of the arm boundary (default: a third of the model's)"
    )
    add_families(parser, groups=50)
    parser.add_argument("--output", type=Path, default=Path("results/quality.json"), help="JSON with every sample")
    parser.add_argument("--page", type=Path, help="Markdown page (default: beside the JSON)")
    parser.add_argument("--plot", type=Path, help="PNG plot (default: beside the page)")
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER", help="write result rows to FOLDER/MACHINE/quality.json"
    )
    parser.add_argument("--machine", help="name of the machine in result rows (default: cpu-Ncore or the GPU's name)")
    add_defaults(parser)
    return parser.parse_args(arguments)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The option that says which engine serves the prompts."""
    parser.add_argument("--engine", choices=(EMBEDDED, TRTLLM, VLLM), default=EMBEDDED, help=_ENGINES)


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options that say which model runs where."""
    parser.add_argument(
        "--model", type=named, metavar="PATH_OR_ID", help="model folder or hub id (default: the shipped model)"
    )
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto, but cpu for the shipped model)")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="weights and KV"
    )
    parser.add_argument("--max-tokens", type=int, default=16, help="longest answer, in tokens")
    parser.add_argument("--min-match-length", type=int, default=64, help="shortest run of equal tokens that is reused")


def add_families(parser: argparse.ArgumentParser, groups: int) -> None:
    """The options that say which prompts are written."""
    names = ", ".join(each.name for each in FAMILIES)
    parser.add_argument(
        "--families",
        type=named,
        metavar="NAMES",
        help=f"with commas between them: {names} (default: all whose data is there)",
    )
    parser.add_argument("--groups", type=int, default=groups, help="groups of questions on the same documents")
    parser.add_argument("--questions", type=int, default=4, help="questions in each group")
    parser.add_argument("--tokens", type=int, default=1_536, help="longest prompt, in tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and bootstrap")
    parser.add_argument("--eval-data", type=Path, metavar="DIR", help="folder of evaluation sets")
    parser.add_argument("--form", choices=tuple(FORMS), help="prompt form (default: what the tokenizer knows)")
    parser.add_argument("--batch", type=int, default=32, help="groups that are served together")


def batch_settings(options: argparse.Namespace) -> BatchSettings:
    """Raises ConfigurationError for a number that is out of its range."""
    counts = ("max_tokens", "min_match_length", "batch", "groups", "questions", "tokens")
    check_integers(options, seed=0, **dict.fromkeys(counts, 1))
    return BatchSettings(
        model=str(options.model or shipped_model()),
        max_tokens=options.max_tokens,
        min_span=options.min_match_length,
        groups=options.batch,
        batch_size=options.batch,
    )


def family_request(options: argparse.Namespace) -> FamilyRequest:
    """The prompts that the options ask for."""
    return FamilyRequest(
        names=tuple((options.families or "").replace(",", " ").split()),
        groups=options.groups,
        questions=options.questions,
        tokens=options.tokens,
        seed=options.seed,
        eval_data=options.eval_data,
        form=options.form,
    )
