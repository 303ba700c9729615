"""`python -m validation calibrate` and `confirm`: find what a model may reuse, and add engines to its reuse profile."""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable
from semblend_trt.reuse_profile import ProfileBound, ReuseProfile
from validation import arguments, models
from validation.calibration.bound import MAX_KLS, SHARES, broken_of, groups_needed, missing_groups
from validation.calibration.calibration import FIT_PARTS, FRESH, Calibration, shown
from validation.calibration.prepared import PROMPT_OPTIONS, Prepared
from validation.engines import TRTLLM
from validation.families.catalog import FAMILIES
from validation.metrics import CONFIDENCE
from validation.results import say, today

_CALIBRATE = f"""
Finds how much of a plan has to be computed, by the deviation of its sample, so that at most a share of the answers (the
risk) is further than a bound from cold's: {", ".join(map(str, MAX_KLS))} nats and twice the rounding floor, which is
measured. The distance is the mean KL over the tokens of cold's own answer, so no label is needed. One in {FIT_PARTS}
groups of every family fixes what is tried, the others show that it holds ({CONFIDENCE:.0%}), and new prompts confirm
it. For models that read stock lists, a dense check is searched first. Exit status: 0 the profile allows reuse, 1 no
bound is shown and the profile allows exact spans only, 2 bad usage or an error, 130 interrupted.
"""
_CONFIRM = f"""
Adds an engine to a reuse profile that was made in another one: serves prompts that it was not made with, cold and under
policy verified within each of its bounds, and adds the engine if none is refuted ({CONFIDENCE:.0%}). Everything else
that the profile binds has to be the same already. Exit status: 0 the engine is in the profile, 1 a bound does not hold
there (the profile stays as it is), 2 bad usage or an error, 130 interrupted.
"""
DEFAULT_RISK = 0.05


def parse_calibrate(given: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a calibration; exit with status 2 if argparse refuses any."""
    parser = _parser("calibrate", _CALIBRATE)
    parser.add_argument("--risk", type=float, default=DEFAULT_RISK, help="share of answers that may be over a bound")
    shares = "shares of a plan's tokens that are tried, from 0 on"
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help=shares)
    parser.add_argument("--max-tries", type=int, default=100, help="most dense checks that are tried")
    arguments.add(parser, "--output", default=Path("reuse-profile.json"), help="the profile")
    return parser.parse_args(given)


def parse_confirm(given: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a confirmation; exit with status 2 if argparse refuses any. Raises ConfigurationError if
    the profile, which sets the defaults, cannot be read."""
    epilog = f"What is not named is as the profile was made with, with a seed {2 * FRESH:,} higher."
    parser = _parser("confirm", _CONFIRM, epilog)
    arguments.add(parser, "--profile", required=True, help="the profile")
    arguments.add(parser, "--output", help="the profile with the engine (default: --profile)")
    figures = ReuseProfile.read(parser.parse_args(given).profile).figures
    known = [figure for figure in figures if isinstance(figure, dict)]
    prompts = next((each for each in known if each.get("what") == "prompts"), {})
    made_with: dict[str, Any] = {
        name: value for name, value in prompts.items() if name in PROMPT_OPTIONS and isinstance(value, int)
    }
    made_with["seed"] = made_with.get("seed", 0) + 2 * FRESH
    families = {each.get("family") for each in known if each.get("what") in ("observed", "confirmed")}
    # Others are of the maker's own prompts.
    names = [each.name for each in FAMILIES if each.name in families]
    parser.set_defaults(**made_with, families=",".join(names) or None)
    return parser.parse_args(given)


def _parser(command: str, description: str, epilog: str | None = None) -> arguments.Parser:
    parser = arguments.Parser(command, description, epilog)
    arguments.add(parser, *arguments.MODEL, "--prompts", "--log")
    arguments.add(parser, *(name for name in arguments.FAMILIES if name not in ("--groups", "--questions")))
    # 93 groups show a risk of 0.05 although one is over the bound.
    arguments.add(parser, "--groups", default=124, help="groups of each family; most of them show the bound")
    # Answers on the same documents count as one observation.
    arguments.add(parser, "--questions", default=1)
    return parser


def run_calibrate(options: argparse.Namespace, command: str) -> bool:
    """Measure, and write the profile; True if it allows more than exact spans. Raises SemBlendError, OSError."""
    check_writable(options.output)
    arguments.check_integers(options, max_tries=1)
    try:
        shares = sorted({float(each) for each in options.shares.replace(",", " ").split()})
    except ValueError:
        shares = []
    if not shares or shares[0] != 0.0 or not shares[-1] < 1.0:
        raise ConfigurationError(
            f"--shares is {options.shares!r}; name 0 and numbers below 1, with commas between them."
        )
    _check_groups({f"--groups {options.groups}": options.groups - options.groups // FIT_PARTS}, options.risk)
    prepared, tell = Prepared(options, options.dtype), teller()
    own = Counter(name for name, _ in {(case.workload, case.group) for case in prepared.own(1, 2)})
    _check_groups({f"The family {name!r} of your own prompts": count for name, count in own.items()}, options.risk)
    found = Calibration(prepared, tuple(shares), options.risk, options.max_tries, command, tell).run()
    found.write(options.output)
    if not found.bounds:
        tell("the profile allows exact spans only")
    tell(str(options.output))
    return bool(found.bounds)


def _check_groups(tested: Mapping[str, int], risk: float) -> None:
    """Raise ConfigurationError for a risk outside of 0 to 1, or that needs more groups. `tested`: by option."""
    if not 0.0 < risk < 1.0:
        raise ConfigurationError(f"--risk is {risk:g}; it must lie between 0 and 1.")
    for name, missing in missing_groups(tested, risk).items():
        raise ConfigurationError(
            f"{name} leaves {tested[name]} groups to show a bound; a risk of {risk:g} needs {groups_needed(risk)}, so "
            f"{missing} are missing."
        )


def run_confirm(options: argparse.Namespace, command: str) -> bool:
    """Confirm the profile in the engine, and write it whole or not at all; True if it lists the engine now. Raises
    SemBlendError and OSError."""
    output: Path = options.output or options.profile
    check_writable(output)
    profile = ReuseProfile.read(options.profile)
    if profile.check is None:
        raise ConfigurationError(f"{options.profile} has no check to confirm; calibrate in this engine instead.")
    # The engine must run as the one in which the profile was made, not as "auto" would have it.
    dtype = str(profile.namespace["compute_dtype"]) if options.dtype == "auto" else options.dtype
    if options.engine != TRTLLM and "float8" in str(profile.namespace["kv_dtype"]):
        options.kv_dtype = models.FP8
    prepared, tell = Prepared(options, dtype), teller()
    engine = prepared.namespace.backend_cache_layout
    candidate = profile.confirmed_in(engine)
    if differences := candidate.differences(prepared.namespace, prepared.geometry):
        raise ConfigurationError(f"{options.profile} cannot be confirmed here: {' '.join(differences)}")
    cases = [*prepared.cases(options.seed, 0, options.groups, candidate), *prepared.own(*range(4))]
    observer, lines = prepared.observer(cases), list[dict[str, Any]]()
    bounds = list[ProfileBound | None](profile.bounds)
    # A profile of an earlier version has no bound; it is held to the loosest.
    for bound in bounds or [None]:
        max_kl, risk = (MAX_KLS[-1], DEFAULT_RISK) if bound is None else (bound.max_kl, bound.risk)
        broken = broken_of(observer.served(candidate, cases, bound, f"confirm {max_kl:.2g} nats"), max_kl)
        tell(f"{max_kl:.2g} nats: over it were {shown(broken)}")
        refuting = [name for name, each in broken.items() if each.lower > risk]
        if refuting or not any(each.share < 1.0 for each in broken.values()):
            why = f"fails at {', '.join(refuting)}" if refuting else "nothing was reused from other places"
            tell(f"not shown to hold, and the profile stays as it is: {why}")
            return False
        for name, each in broken.items():
            figure = {"max_kl": max_kl, "risk": risk, "family": name}
            lines.append(figure | {"prompts": each.groups, "broken": each.misses})
    # It replaces an earlier confirmation in this engine.
    confirmed: dict[str, Any] = {"what": "engine_confirmed", "engine": engine}
    figures = [each for each in profile.figures if not (isinstance(each, dict) and confirmed.items() <= each.items())]
    confirmed |= {"date": today(), "command": command, "prompts": prepared.prompts, "families": lines}
    profile.confirmed_in(engine, [*figures, confirmed]).write(output)
    tell(f"the profile holds in {engine}")
    tell(str(output))
    return True


def teller() -> Callable[[str], None]:
    """Return a function that prints sentences after the seconds since now."""
    began = time.perf_counter()
    return lambda sentence: say(f"{time.perf_counter() - began:6.0f} s  {sentence}")
