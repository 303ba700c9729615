"""The command lines of `python -m validation calibrate` and of `confirm`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from semblend_trt.reuse_profile import ReuseProfile
from validation.arguments import PROGRAM, Parser, add_defaults
from validation.calibration.command import prompts_of
from validation.calibration.trials import PLANTED, TRIES
from validation.metrics import CONFIDENCE, MARGIN
from validation.quality.arguments import add_engine, add_families, add_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_DESCRIPTION = f"""
Finds the cheapest policy that is non-inferior to cold for one model in one dtype (margin {MARGIN:g} of the score,
one-sided {CONFIDENCE:.0%}, paired bootstrap over groups) on harmless families, trap families and text perplexity, and
writes it as the model's reuse profile. What is chosen on some prompts is confirmed on others. Exit status: 0 the
profile allows reuse, 1 nothing is non-inferior and the profile allows exact spans only, 2 bad usage or an error, 130
interrupted.
"""
_PROMPTS = (
    'cases of your own beside the families: {"id": str, "donors": [str, ...], "prompt": str, "reference": str} a line; '
    "scored by the perplexity of the reference"
)


_CONFIRM = f"""
Adds an engine to a reuse profile that was made in another one: serves the profile's families in this engine, cold and
under policy verified with the profile's terms, on prompts that it was not made with, and adds the engine only when
every family is non-inferior to cold there, by a calibration's own rule (margin {MARGIN:g}, one-sided {CONFIDENCE:.0%}).
Everything else that the profile binds has to be the same already. Exit status: 0 the engine is in the profile, 1 it is
not shown to be as good as cold there (the profile stays as it is), 2 bad usage or an error, 130 interrupted.
"""
# Plants that a check misses are few: one of some forty.
PLANTS = 1_024
# Far from the seeds with which a calibration confirms, which follow its own.
_FRESH = 1_000


def parse_calibrate(arguments: Sequence[str]) -> argparse.Namespace:
    """Arguments of a calibration; exits with status 2 for any that argparse refuses."""
    parser = Parser(prog=f"{PROGRAM} calibrate", description=_DESCRIPTION.replace("%", "%%"), allow_abbrev=False)
    add_model(parser)
    add_engine(parser)
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help=_PROMPTS)
    add_families(parser, groups=50)
    _add_plants(parser)
    parser.add_argument("--screening-groups", type=int, default=8, help="groups of each family that choose candidates")
    parser.add_argument("--max-tries", type=int, default=100, help="most candidates that are screened")
    parser.add_argument("--output", type=Path, default=Path("reuse-profile.json"), help="the profile")
    add_defaults(parser)
    return parser.parse_args(arguments)


def parse_confirm(arguments: Sequence[str]) -> argparse.Namespace:
    """Arguments of a confirmation; exits with status 2 for any that argparse refuses.

    Raises ConfigurationError when the profile, which tells the defaults, cannot be read.
    """
    parser = Parser(
        prog=f"{PROGRAM} confirm",
        description=_CONFIRM.replace("%", "%%"),
        epilog="Which families and prompts are served is, where it is not given, as the profile's figures tell of its "
        f"own making, with a seed {_FRESH:,} further on.",
        allow_abbrev=False,
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", required=True, help="the profile")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the profile with the engine (default: --profile)")
    add_model(parser)
    add_engine(parser)
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help=_PROMPTS)
    add_families(parser, groups=50)
    _add_plants(parser)
    add_defaults(parser)
    options = parser.parse_args(arguments)
    made_with, families = prompts_of(ReuseProfile.read(options.profile).figures)
    parser.set_defaults(**{**made_with, "seed": made_with.get("seed", 0) + _FRESH}, families=",".join(families) or None)
    return parser.parse_args(arguments)


def _add_plants(parser: argparse.ArgumentParser) -> None:
    told = f"prompts of the family {PLANTED}; of {TRIES} the one that a candidate misses most of is served"
    parser.add_argument("--plants", type=int, default=PLANTS, help=told)
