"""`python -m validation confirm`: adds an engine to a reuse profile where it is as good as cold there as well."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from semblend_trt.errors import ConfigurationError
from semblend_trt.reuse_profile import ReuseProfile
from validation import jsonl, models
from validation.arguments import check_integers
from validation.calibration.command import bound_cases, bound_families, kinds_of_families, tell_lines, teller
from validation.calibration.deviations import DeviationCollector
from validation.calibration.engine_identity import identity_of
from validation.calibration.figures import PROMPT_OPTIONS, with_engine
from validation.calibration.own_prompts import scored_cases
from validation.calibration.search import problem_of
from validation.calibration.trials import Trials
from validation.files import check_writable
from validation.jsonl import read_cases
from validation.quality.arguments import batch_settings, family_request

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from validation.calibration.trials import Verdict
    from validation.cases import Case
    from validation.quality.family_cases import FamilyRequest


def run_confirm(options: argparse.Namespace, command: str) -> bool:
    """Serves the families in the engine and writes the profile; True when the engine is among its engines now.

    The profile is written as a whole or stays as it is. Raises SemBlendError and OSError.
    """
    output: Path = options.output or options.profile
    check_writable(output)
    profile = _confirmable(options.profile)
    check_integers(options, plants=1)
    settings, asked, own = batch_settings(options), _families(options), _own_cases(options)
    # The engine has to run as the one in which the profile was made, whatever it makes of "auto".
    dtype = str(profile.namespace["compute_dtype"]) if options.dtype == "auto" else options.dtype
    torch.manual_seed(options.seed)
    engines = models.engines_of(options.engine, options.model, options.device, dtype)
    namespace, geometry = identity_of(engines, settings)
    engine = namespace.backend_cache_layout
    candidate = profile.confirmed_in(engine)
    if differences := candidate.differences(namespace, geometry):
        raise ConfigurationError(f"{options.profile} cannot be confirmed here: {' '.join(differences)}")
    tell = teller()
    model = models.transformers_model(engines, options.model, options.device, dtype)
    collector = DeviationCollector(model, engines.facts, settings.min_span)
    cases = [*bound_cases(engines, asked, options.plants), *own]
    trials = Trials(engines, cases, settings, options.seed, collector)
    with tempfile.TemporaryDirectory(prefix="confirmation-") as folder:
        path = Path(folder) / models.PROFILE_NAME
        candidate.write(path)  # until it is shown to hold, no other file lists the engine
        verdict = _judge(
            trials,
            path,
            kinds_of_families(asked, own),
            tell,
            are_named=bool(options.families),
        )
    if verdict is None:
        return False
    prompts = {name: getattr(options, name) for name in PROMPT_OPTIONS}
    figures = with_engine(profile.figures, engine, verdict.lines, prompts, command)
    profile.confirmed_in(engine, figures).write(output)
    tell(f"the profile holds in {engine}")
    tell(str(output))
    return True


def _confirmable(path: Path) -> ReuseProfile:
    profile = ReuseProfile.read(path)
    if profile.terms is None:
        raise ConfigurationError(
            f"{path} allows exact spans only, which need no confirmation; calibrate in this engine instead."
        )
    return profile


def _families(options: argparse.Namespace) -> FamilyRequest:
    """The families by the options, without the user's own cases, which come from a file."""
    names = (options.families or "").replace(",", " ").split()
    if jsonl.WORKLOAD in names and options.prompts is None:
        raise ConfigurationError(
            f"{options.profile} was confirmed on prompts of its maker's own; name their file with --prompts, or the "
            "families to serve instead with --families."
        )
    options.families = ",".join(name for name in names if name != jsonl.WORKLOAD)
    return bound_families(family_request(options))


def _own_cases(options: argparse.Namespace) -> list[Case]:
    return [] if options.prompts is None else scored_cases(read_cases(options.prompts), options.prompts)


def _judge(
    trials: Trials,
    path: Path,
    kinds: Mapping[str, str],
    tell: Callable[[str], None],
    *,
    are_named: bool,
) -> Verdict | None:
    """The verdict where every family is non-inferior and something was reused.

    Without `are_named` the families are all that there are, and those that the model does not know cold are left out.
    """
    families = trials.known(kinds, tell)
    problem = problem_of(families, kinds)
    if are_named and len(families) < len(kinds):
        problem = f"the model does not know {', '.join(sorted(kinds.keys() - set(families)))} cold in this engine"
    if problem is not None:
        tell(f"nothing can be shown, and the profile stays as it is: {problem}")
        return None
    verdict = trials.judge(path, families, strict=True)
    tell_lines(verdict.lines, tell)
    if not verdict.holds:
        tell(
            f"not shown to be as good as cold at {verdict.inferior}: {verdict.difference()}; the profile stays as it is"
        )
        return None
    if not any(line.reused for line in verdict.lines):
        tell("nothing was reused from other places, so nothing is shown, and the profile stays as it is")
        return None
    return verdict
