"""`python -m validation calibrate` and `confirm`: find what a model may reuse, and add engines to its reuse profile."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine_wrapper.embedded.sampling import SamplingParams
from kernels.layout import KvGeometry
from kernels.results import today, versions
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable
from semblend_trt.namespace import CacheNamespace
from semblend_trt.printable import printable
from semblend_trt.reuse_profile import ReuseProfile
from validation import models
from validation.arguments import check_integers
from validation.arms import WRAPPER_WITHOUT_PLAN, ArmChoices, arms_of
from validation.audit_log import read_events
from validation.calibration.deviations import DeviationCollector
from validation.calibration.search import Search, problem_of
from validation.calibration.trials import PLANTED, Trials, write_plants
from validation.cases import WORKLOAD, halves, read_cases, scored_cases
from validation.engines import EngineSettings
from validation.families.catalog import Kind, family, write_cases
from validation.metrics import CONFIDENCE, MARGIN, RESAMPLES
from validation.quality.arguments import batch_settings, family_request

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from validation.calibration.deviations import PromptDeviations
    from validation.calibration.search import Candidate, Found, Tried
    from validation.calibration.trials import Verdict
    from validation.cases import Case
    from validation.engines import Engines
    from validation.families.catalog import FamilyRequest
    from validation.metrics import NonInferiority
    from validation.quality.batches import BatchSettings
    from validation.quality.samples import QualityLine

_PROBE_TOKENS = 128


def identity_of(engines: Engines, settings: BatchSettings) -> tuple[CacheNamespace, KvGeometry]:
    """Starts an engine, serves one prompt, and reads its audit log: the connector may live in another process.

    Raises ConfigurationError with the reason when the connector refuses the engine, and SemBlendError.
    """
    [arm] = arms_of([WRAPPER_WITHOUT_PLAN], ArmChoices(engines.facts.num_layers, boundary=1))
    asked = EngineSettings(settings.model, 2 * _PROBE_TOKENS, 1 << 20, settings.min_span)
    with tempfile.TemporaryDirectory(prefix="identity-") as folder:
        audit = Path(folder) / "audit.jsonl"
        engine = engines.open(arm, asked, audit)
        try:
            engine.generate([[0] * _PROBE_TOKENS], SamplingParams(max_tokens=1))
        finally:
            engine.shutdown()
        events = {event["event"]: event for event in read_events(audit)}
    compared = events.get("profile_compared")
    if compared is None:
        refusal = events.get("scheduler_initialized", {}).get("refusal")
        raise ConfigurationError(
            f"The connector refuses to serve {settings.model} ({refusal or 'the reason is in the engine log'}), and no "
            "profile can change it."
        )
    return CacheNamespace.from_dict(compared["namespace"]), KvGeometry(**compared["geometry"])


# Which prompts a calibration asks for, by the names of its options.
PROMPT_OPTIONS = ("groups", "questions", "tokens", "plants", "seed", "max_tokens", "min_match_length")
# A figure of an engine in which a profile from elsewhere has been confirmed.
_ENGINE = "engine_confirmed"


def figures_of(found: Found, prompts: Mapping[str, int]) -> list[Any]:
    """JSON-ready: the rule, the prompts' options, the winner's confirmed families, its layer's deviations, and
    everything that was tried."""
    figures: list[Any] = [
        {"what": "rule", "margin": MARGIN, "confidence": CONFIDENCE, "resamples": RESAMPLES},
        {"what": "prompts", **prompts},
    ]
    if found.problem is not None:
        figures.append({"what": "problem", "sentence": found.problem})
    figures += [_confirmed(line) for line in found.lines]
    if found.winner is not None and found.winner.check is not None:
        figures += _deviations(found.deviations, found.winner.check.layer)
    return figures + [_tried(each) for each in found.tried]


def prompts_of(figures: Sequence[Any]) -> tuple[dict[str, int], tuple[str, ...]]:
    """The prompts' options and the confirmed families, as a profile's figures tell them; empty where they do not."""
    told = [figure for figure in figures if isinstance(figure, dict)]
    options = next((figure for figure in told if figure.get("what") == "prompts"), {})
    numbers = {name: value for name, value in options.items() if name in PROMPT_OPTIONS and isinstance(value, int)}
    return numbers, tuple(str(figure.get("family")) for figure in told if figure.get("what") == "confirmed")


def with_engine(
    figures: Sequence[Any], engine: str, lines: Sequence[QualityLine], prompts: Mapping[str, int], command: str
) -> list[Any]:
    """The figures with a confirmation in `engine` after the others, in place of an earlier one there."""
    earlier = {"what": _ENGINE, "engine": engine}
    kept = [each for each in figures if not (isinstance(each, dict) and earlier.items() <= each.items())]
    made = {"date": today(), "command": command, "prompts": dict(prompts)}
    return [*kept, {**earlier, **made, "families": [_confirmed(line) for line in lines]}]


def _confirmed(line: QualityLine) -> dict[str, Any]:
    return {
        "what": "confirmed",
        "family": line.family,
        "prompts": line.samples,
        "groups": line.groups,
        "exact_match": line.exact_match,
        "exact_match_vs_cold": _bound(line.exact_match_bound),
        "log_likelihood_vs_cold": _bound(line.loss_bound),
        "offered_tokens": line.offered,
        "checked_tokens": line.checked,
        "reused_tokens": line.reused,
        "largest_kept": line.largest_kept,
        "computed_share": line.computed_share,
    }


def _bound(bound: NonInferiority | None) -> dict[str, Any] | None:
    if bound is None:
        return None
    return {"difference": bound.difference, "lower": bound.lower if math.isfinite(bound.lower) else None}


def _deviations(found: Sequence[PromptDeviations], layer: int) -> list[dict[str, Any]]:
    """The 5th, 50th, 95th and 99th percentile of the tokens' deviations at the layer, by family."""
    figures = []
    for name in dict.fromkeys(prompt.family for prompt in found):
        values = np.concatenate([prompt.values[layer] for prompt in found if prompt.family == name])
        values = values[np.isfinite(values)]
        if values.size:
            shares = [float(value) for value in np.quantile(values, (0.05, 0.5, 0.95, 0.99))]
            figures.append({"what": "deviation", "family": name, "layer": layer, "p5_p50_p95_p99": shares})
    return figures


def _tried(tried: Tried) -> dict[str, Any]:
    return {
        "what": "tried",
        "stage": tried.stage,
        "candidate": tried.candidate.name,
        "computed_share": tried.candidate.computed_share,
        "holds": tried.verdict.holds,
        "inferior_family": tried.verdict.inferior,
        "comparison": tried.verdict.difference(),
    }


def run_calibrate(options: argparse.Namespace, command: str) -> bool:
    """Runs the search and writes the profile; True when it allows reuse beyond exact spans.

    Raises SemBlendError and OSError.
    """
    check_writable(options.output)
    check_integers(options, screening_groups=1, max_tries=1, plants=1)
    settings, asked = batch_settings(options), bound_families(family_request(options))
    own = [] if options.prompts is None else scored_cases(read_cases(options.prompts), options.prompts)
    torch.manual_seed(options.seed)
    engines = models.engines_of(options.engine, options.model, options.device, options.dtype)
    model = models.transformers_model(engines, options.model, options.device, options.dtype)
    collector = DeviationCollector(model, engines.facts, settings.min_span)
    tell = teller()
    namespace, geometry = identity_of(engines, settings)
    prompts = {name: getattr(options, name) for name in PROMPT_OPTIONS}

    def profile_of(candidate: Candidate | None, found: Found | None = None) -> ReuseProfile:
        return ReuseProfile.made_for(
            namespace,
            geometry,
            policy="exact" if candidate is None else candidate.policy,
            check=None if candidate is None else candidate.check,
            boundary=0 if candidate is None else candidate.boundary,
            head_tokens=0 if candidate is None else candidate.head_tokens,
            figures=[] if found is None else figures_of(found, prompts),
            versions=versions(),
            command=command,
        )

    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        path = Path(folder) / models.PROFILE_NAME

        def written(candidate: Candidate) -> Path:
            profile_of(candidate).write(path)
            return path

        found = _search(collector, engines, settings, asked, options, own, written, tell).run()
    profile_of(found.winner, found).write(options.output)
    _show(found, options.output, tell)
    return found.winner is not None


def teller() -> Callable[[str], None]:
    """Prints sentences behind the seconds since now."""
    began = time.perf_counter()

    def tell(sentence: str) -> None:
        sys.stdout.write(printable(f"{time.perf_counter() - began:6.0f} s  {sentence}") + "\n")
        sys.stdout.flush()

    return tell


def bound_families(asked: FamilyRequest) -> FamilyRequest:
    """The same request for the families of it that bound a loss, traps first. Raises ConfigurationError without any."""
    names = [name for name in asked.family_names() if family(name).kind in (Kind.HARMLESS, Kind.TRAP)]
    if not names:
        raise ConfigurationError(
            f"--families {','.join(asked.names)} has neither a harmless family nor a trap; name both."
        )
    # What a candidate is likely to fail comes first, so that little is served under those that do.
    names.sort(key=lambda name: family(name).kind is not Kind.TRAP)
    return replace(asked, names=tuple(names))


def bound_cases(engines: Engines, asked: FamilyRequest, plants: int) -> list[Case]:
    """The cases of the families, and of the planter's family so many `plants`."""
    others = tuple(name for name in asked.names if name != PLANTED)
    planted = write_plants(engines, asked, [PLANTED], plants) if PLANTED in asked.names else []
    return [*(write_cases(engines, replace(asked, names=others)) if others else []), *planted]


def kinds_of_families(asked: FamilyRequest, own: Sequence[Case]) -> dict[str, str]:
    """The kind of each family asked for; the user's own cases are harmless."""
    kinds = {name: family(name).kind.value for name in asked.names}
    return {**kinds, WORKLOAD: Kind.HARMLESS.value} if own else kinds


def _search(
    collector: DeviationCollector,
    engines: Engines,
    settings: BatchSettings,
    asked: FamilyRequest,
    options: argparse.Namespace,
    own: list[Case],
    written: Callable[[Candidate], Path],
    tell: Callable[[str], None],
) -> Search:
    choosing, confirming = halves(own)

    def trials(seed: int, groups: int, extra: list[Case]) -> Trials:
        cases = bound_cases(engines, replace(asked, seed=seed, groups=groups), options.plants)
        return Trials(engines, [*cases, *extra], settings, seed, collector)

    return Search(
        num_layers=engines.facts.num_layers,
        kinds=kinds_of_families(asked, own),
        screening=trials(asked.seed, options.screening_groups, choosing),
        fresh=lambda number: trials(asked.seed + 1 + number, asked.groups, confirming),
        written=written,
        max_tries=options.max_tries,
        tell=tell,
    )


def tell_lines(lines: Iterable[QualityLine], tell: Callable[[str], None]) -> None:
    """Tells of each family how it compares with cold, and what was reused."""
    for line in lines:
        bounds = [bound.sentence() for bound in (line.exact_match_bound, line.loss_bound) if bound is not None]
        share = "nothing offered" if line.reused_share is None else f"{line.reused_share:.1%} of the offered reused"
        tell(f"{line.family}: {'; '.join(bounds)}; {share}, largest deviation kept {line.largest_kept:.4f}")


def _show(found: Found, output: Path, tell: Callable[[str], None]) -> None:
    if found.problem is not None:
        tell(f"nothing can be shown: {found.problem}")
    tell_lines(found.lines, tell)
    allowed = "exact spans only" if found.winner is None else found.winner.name
    tell(f"the profile allows {allowed}")
    tell(str(output))


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
    if WORKLOAD in names and options.prompts is None:
        raise ConfigurationError(
            f"{options.profile} was confirmed on prompts of its maker's own; name their file with --prompts, or the "
            "families to serve instead with --families."
        )
    options.families = ",".join(name for name in names if name != WORKLOAD)
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
