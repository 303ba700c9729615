"""The command line of `python -m validation calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from validation.arguments import PROGRAM, Parser, add_defaults
from validation.noninferiority import CONFIDENCE, MARGIN
from validation.quality.arguments import add_families, add_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_DESCRIPTION = f"""
Finds the cheapest policy that is non-inferior to cold for one model in one dtype (margin {MARGIN:g} of the score,
one-sided {CONFIDENCE:.0%}, paired bootstrap over groups) on harmless families, trap families and text perplexity, and
writes it as the model's reuse profile. What is chosen on some prompts is confirmed on others. Exit status: 0 the
profile allows reuse, 1 nothing is non-inferior and the profile allows exact spans only, 2 bad usage.
"""
_PROMPTS = (
    'cases of your own beside the families: {"id": str, "donors": [str, ...], "prompt": str, "reference": str} a line; '
    "scored by the perplexity of the reference"
)


def parse_calibrate(arguments: Sequence[str]) -> argparse.Namespace:
    """Arguments of a calibration; exits with status 2 for any that argparse refuses."""
    parser = Parser(prog=f"{PROGRAM} calibrate", description=_DESCRIPTION.replace("%", "%%"), allow_abbrev=False)
    add_model(parser)
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help=_PROMPTS)
    add_families(parser, groups=50)
    parser.add_argument("--screening-groups", type=int, default=8, help="groups of each family that choose candidates")
    parser.add_argument("--max-tries", type=int, default=40, help="most candidates that are screened")
    parser.add_argument("--output", type=Path, default=Path("reuse-profile.json"), help="the profile")
    add_defaults(parser)
    return parser.parse_args(arguments)
