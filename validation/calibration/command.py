"""`python -m validation calibrate` and `confirm`: find what a model may reuse, and add engines to its reuse profile."""

from __future__ import annotations

import functools
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine_wrapper.deviation_check import sample_of
from engine_wrapper.embedded.request import SamplingParams
from kernels.layout import KvGeometry
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable
from semblend_trt.namespace import CacheNamespace
from semblend_trt.reuse_profile import EVIDENCE_FAMILIES, ReuseProfile
from validation import arguments, models
from validation.arms import WRAPPER_WITHOUT_PLAN, ArmChoices, arms_of
from validation.calibration.deviations import DeviationCollector
from validation.calibration.search import Candidate, Search, problem_of, unseen_share
from validation.calibration.trials import PLANTED, Rule, Trials, write_plants
from validation.cases import WORKLOAD, groups, read_cases, scored_cases
from validation.engines import TRTLLM, EngineSettings, opened
from validation.families.catalog import Kind, family, write_cases
from validation.metrics import CONFIDENCE, MARGIN
from validation.output import say
from validation.results import today, versions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence

    from validation.calibration.search import Found
    from validation.calibration.trials import Comparison
    from validation.cases import Case
    from validation.engines import Engines
    from validation.measurement import ServingSettings
    from validation.metrics import Evidence

_CALIBRATE = f"""
Finds the cheapest policy that is non-inferior to cold for one model in one dtype, on harmless families and trap
families, and writes it as the model's reuse profile. Compared is the likelihood of the right answer, with the mean of
two cold runs; a policy is non-inferior when it is shown to lose at most the margin (one-sided {CONFIDENCE:.0%} over
all policies that were confirmed). Prompts are added until that is decided, up to a budget; what is undecided then is
not accepted. What is chosen on some prompts is confirmed on others. Exit status: 0 the profile allows reuse, 1 nothing
is non-inferior and the profile allows exact spans only, 2 bad usage or an error, 130 interrupted.
"""
_CONFIRM = f"""
Adds an engine to a reuse profile that was made in another one: serves the profile's families in this engine, cold and
under policy verified with the profile's terms, on prompts that it was not made with, and adds the engine only when
every family is non-inferior to cold there, by a calibration's own rule (one-sided {CONFIDENCE:.0%}).
Everything else that the profile binds has to be the same already. Exit status: 0 the engine is in the profile, 1 it is
not shown to be as good as cold there (the profile stays as it is), 2 bad usage or an error, 130 interrupted.
"""
_PROMPTS = (
    'cases of your own beside the families: {"id": str, "donors": [str, ...], "prompt": str, "reference": str} a line; '
    "scored by the likelihood of the reference. As they are few, they can only rule a policy out"
)
# Looks at the answers of a screened candidate; each has twice the groups of the one before.
_SCREENING_LOOKS = 4
# Added to a calibration's seed, as its own confirmations take the seeds right after it.
_FRESH = 1_000
# Times the profile's budget: where 0.6 of the margin is lost, 4,000 prompts decide under half, 16,000 nearly all.
_BUDGET_FACTOR = 4
PROMPT_OPTIONS = ("groups", "budget", "questions", "tokens", "seed", "max_tokens", "min_match_length")
_PROBE_TOKENS = 128
# The run of which a profile says what share of it a sample may miss.
_RUN_TOKENS = 1_024


def parse_calibrate(given: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a calibration; exit with status 2 if argparse refuses any."""
    parser = _parser("calibrate", _CALIBRATE)
    told = f"groups of each family that choose candidates; up to {2 ** (_SCREENING_LOOKS - 1)} times as many where "
    told += "they show little"
    parser.add_argument("--screening-groups", type=int, default=32, help=told)
    parser.add_argument("--max-tries", type=int, default=100, help="most candidates that are screened")
    told = "samples before the check that are tried on new prompts, once the check alone is confirmed; 0: none"
    parser.add_argument("--sample-tries", type=int, choices=range(9), metavar="0..8", default=2, help=told)
    told = "generations of donors that are tried, after the first: how often KV after checked KV may be built on; "
    told += "0: none"
    parser.add_argument("--generations", type=int, choices=range(9), metavar="0..8", default=3, help=told)
    arguments.add(parser, "--output", default=Path("reuse-profile.json"), help="the profile")
    return parser.parse_args(given)


def parse_confirm(given: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a confirmation; exit with status 2 if argparse refuses any. Raises ConfigurationError if
    the profile, which sets the defaults, cannot be read."""
    epilog = (
        "Families and prompts that are not named are those with which the profile was made, with a seed "
        f"{_FRESH:,} higher and {_BUDGET_FACTOR} times the budget."
    )
    parser = _parser("confirm", _CONFIRM, epilog)
    arguments.add(parser, "--profile", required=True, help="the profile")
    arguments.add(parser, "--output", help="the profile with the engine (default: --profile)")
    figures = ReuseProfile.read(parser.parse_args(given).profile).figures
    told = [figure for figure in figures if isinstance(figure, dict)]
    prompts, rule = (next((each for each in told if each.get("what") == what), {}) for what in ("prompts", "rule"))
    made_with: dict[str, Any] = {
        name: value for name, value in prompts.items() if name in PROMPT_OPTIONS and isinstance(value, int)
    }
    if isinstance(rule.get("margin"), float):
        made_with["margin"] = rule["margin"]
    made_with["seed"] = made_with.get("seed", 0) + _FRESH
    made_with["budget"] = _BUDGET_FACTOR * made_with.get("budget", parser.get_default("budget"))
    families = ",".join(str(figure.get("family")) for figure in told if figure.get("what") == "confirmed")
    parser.set_defaults(**made_with, families=families or None)
    return parser.parse_args(given)


def _parser(command: str, description: str, epilog: str | None = None) -> arguments.Parser:
    parser = arguments.Parser(command, description, epilog)
    arguments.add(parser, *arguments.MODEL)
    arguments.add(parser, "--prompts", help=_PROMPTS)
    arguments.add(parser, *(name for name in arguments.FAMILIES if name not in ("--groups", "--questions")))
    told = "groups of a family after which its answers are compared each time"
    arguments.add(parser, "--groups", default=125, help=told)
    # Answers on the same documents count as one observation.
    arguments.add(parser, "--questions", default=1)
    told = "most groups of a family that confirm: a margin of 0.01 needs about 500 where nothing is lost, and most of "
    told += "4000 where half of it is; a family that has lost more after a quarter of them is given up"
    parser.add_argument("--budget", type=int, default=4_000, help=told)
    told = "the likelihood of right answers that reuse may cost"
    parser.add_argument("--margin", type=float, default=MARGIN, help=told)
    return parser


class _Prepared:
    """Engine, families and cases that both commands serve. Raises ConfigurationError and UnsupportedModelError."""

    def __init__(self, options: argparse.Namespace, dtype: str) -> None:
        self._options, self._dtype = options, dtype
        arguments.check_integers(options, budget=options.groups)
        if not 0.0 < options.margin < 1.0:
            raise ConfigurationError(f"--margin is {options.margin:g}; it must lie between 0 and 1.")
        self.settings = arguments.serving_settings(options)
        asked = arguments.family_request(options)
        names = [name for name in asked.family_names() if family(name).kind in (Kind.HARMLESS, Kind.TRAP)]
        if not names:
            raise ConfigurationError(
                f"--families {','.join(asked.names)} has neither a harmless family nor a trap; name both."
            )
        # A candidate is most likely to fail a trap, and nothing more is served then.
        names.sort(key=lambda name: family(name).kind is not Kind.TRAP)
        self.asked = replace(asked, names=tuple(names))
        self.own = [] if options.prompts is None else scored_cases(read_cases(options.prompts), options.prompts)
        torch.manual_seed(options.seed)
        self.engines = models.engines_of(options, dtype)
        self.namespace, self.geometry = identity_of(self.engines, self.settings)
        self.prompts = {name: getattr(options, name) for name in PROMPT_OPTIONS}
        self.kinds = {name: family(name).kind.value for name in names}
        if self.own:
            self.kinds[WORKLOAD] = Kind.HARMLESS.value

    def trials(self, seed: int, own: Sequence[Case], generations: int = 0) -> Trials:
        """Return trials with the user's `own` cases and the families' prompts, whose donors reach `generations`."""

        def write(name: str, first: int, count: int) -> list[Case]:
            asked = replace(self.asked, names=(name,), seed=seed, first=first, groups=count, generations=generations)
            if name == WORKLOAD:
                return [case for group in groups(own)[first : first + count] for case in group]
            if name == PLANTED:
                return write_plants(self.engines, asked, [name], count)
            return write_cases(self.engines, asked)

        return Trials(self.engines, write, self.settings, self._collector)

    def proof(self, number: int) -> Rule:
        """Return the rule of confirmation `number`; all together err with a probability of at most 1 - CONFIDENCE."""
        first, budget = self._options.groups, self._options.budget
        confidence = 1.0 - (1.0 - CONFIDENCE) / ((number + 1) * (number + 2))
        return Rule((*range(first, budget, first), budget), self._options.margin, confidence, proof=True)

    @functools.cached_property
    def _collector(self) -> DeviationCollector:
        options = self._options
        model = models.transformers_model(self.engines, options.model, options.device, self._dtype)
        kv_dtype = torch.float8_e4m3fn if "float8" in self.namespace.kv_dtype else None
        return DeviationCollector(model, self.engines.facts, self.settings.min_span, kv_dtype)


def identity_of(engines: Engines, settings: ServingSettings) -> tuple[CacheNamespace, KvGeometry]:
    """Return an engine's namespace and geometry from its audit log, as the connector may be in another process. Raises
    ConfigurationError with the reason if the connector refuses the engine, and SemBlendError."""
    [arm] = arms_of([WRAPPER_WITHOUT_PLAN], ArmChoices(engines.facts.num_layers, boundary=1))
    asked = EngineSettings(settings.model, 2 * _PROBE_TOKENS, 1 << 20, settings.min_span)
    with opened(engines, arm, asked) as (engine, audit):
        engine.generate([[0] * _PROBE_TOKENS], SamplingParams(max_tokens=1))
    told = {event["event"]: event for event in audit.events}
    compared = told.get("profile_compared")
    if compared is None:
        refusal = told.get("scheduler_initialized", {}).get("refusal")
        raise ConfigurationError(
            f"The connector refuses to serve {settings.model} ({refusal or 'the reason is in the engine log'}), and no "
            "profile can change it."
        )
    return CacheNamespace.from_dict(compared["namespace"]), KvGeometry(**compared["geometry"])


def run_calibrate(options: argparse.Namespace, command: str) -> bool:
    """Run the search and write the profile; True if it allows more than exact spans. Raises SemBlendError, OSError."""
    check_writable(options.output)
    arguments.check_integers(options, screening_groups=1, max_tries=1)
    prepared, tell = _Prepared(options, options.dtype), teller()
    facts, margin = prepared.engines.facts, options.margin

    def profile_of(candidate: Candidate, figures: Sequence[Any] = ()) -> ReuseProfile:
        return ReuseProfile.made_for(
            prepared.namespace,
            prepared.geometry,
            policy=candidate.policy,
            check=candidate.check,
            boundary=candidate.boundary,
            head_tokens=candidate.head_tokens,
            generations=candidate.generations,
            figures=list(figures),
            versions=versions(),
            command=command,
        )

    def written(candidate: Candidate) -> Path:
        profile_of(candidate).write(path)
        return path

    def fresh(number: int, generations: int) -> tuple[Trials, Rule]:
        trials = prepared.trials(options.seed + 1 + number, prepared.own[1::2], generations)
        return trials, prepared.proof(number)

    looks = tuple(options.screening_groups << look for look in range(_SCREENING_LOOKS))
    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        path = Path(folder) / models.PROFILE_NAME
        found = Search(
            num_layers=facts.num_layers,
            kinds=prepared.kinds,
            # Every second case of the user's own chooses, the others confirm.
            screening=prepared.trials(options.seed, prepared.own[::2]),
            screen=Rule(looks, margin, CONFIDENCE, proof=False),
            fresh=fresh,
            written=written,
            max_tries=options.max_tries,
            sample_tries=options.sample_tries,
            generations=sorted({1, options.generations}) if options.generations else [],
            tell=tell,
            lowest_check=facts.lowest_check_layer,
            evidence=EVIDENCE_FAMILIES,
        ).run()
    rule = {"what": "rule", "margin": margin, "confidence": CONFIDENCE}
    figures = [rule, {"what": "prompts", **prepared.prompts}, *figures_of(found)]
    profile_of(found.winner or Candidate("exact", 1.0), figures).write(options.output)
    if found.problem is not None:
        tell(f"nothing can be shown: {found.problem}")
    _tell_comparisons(found.comparisons, tell)
    tell(f"the profile allows {'exact spans only' if found.winner is None else found.winner.name}")
    tell(str(options.output))
    return found.winner is not None


def run_confirm(options: argparse.Namespace, command: str) -> bool:
    """Confirm the profile in the engine, and write it whole or not at all; True if it lists the engine now. Raises
    SemBlendError and OSError."""
    output: Path = options.output or options.profile
    check_writable(output)
    profile = ReuseProfile.read(options.profile)
    if profile.terms is None:
        raise ConfigurationError(
            f"{options.profile} allows exact spans only, which need no confirmation; calibrate in this engine instead."
        )
    names = (options.families or "").replace(",", " ").split()
    if WORKLOAD in names and options.prompts is None:
        raise ConfigurationError(
            f"{options.profile} was confirmed on prompts of its maker's own; name their file with --prompts, or the "
            "families to serve instead with --families."
        )
    options.families = ",".join(name for name in names if name != WORKLOAD)
    # The engine must run as the one in which the profile was made, not as "auto" would have it.
    dtype = str(profile.namespace["compute_dtype"]) if options.dtype == "auto" else options.dtype
    if options.engine != TRTLLM and "float8" in str(profile.namespace["kv_dtype"]):
        options.kv_dtype = models.FP8
    prepared, tell = _Prepared(options, dtype), teller()
    engine = prepared.namespace.backend_cache_layout
    candidate = profile.confirmed_in(engine)
    if differences := candidate.differences(prepared.namespace, prepared.geometry):
        raise ConfigurationError(f"{options.profile} cannot be confirmed here: {' '.join(differences)}")
    trials = prepared.trials(options.seed, prepared.own, profile.generations)
    with tempfile.TemporaryDirectory(prefix="confirmation-") as folder:
        path = Path(folder) / models.PROFILE_NAME
        candidate.write(path)  # until it is shown to hold, no other file lists the engine
        comparisons = _confirmed_in(trials, path, prepared, tell, are_named=bool(options.families))
    if not comparisons:
        return False
    # It replaces an earlier confirmation in this engine.
    confirmed: dict[str, Any] = {"what": "engine_confirmed", "engine": engine}
    figures = [each for each in profile.figures if not (isinstance(each, dict) and confirmed.items() <= each.items())]
    confirmed |= {"date": today(), "command": command, "prompts": prepared.prompts}
    figures.append(confirmed | {"families": list(map(_confirmed, comparisons))})
    profile.confirmed_in(engine, figures).write(output)
    tell(f"the profile holds in {engine}")
    tell(str(output))
    return True


def _confirmed_in(
    trials: Trials, path: Path, prepared: _Prepared, tell: Callable[[str], None], *, are_named: bool
) -> tuple[Comparison, ...]:
    """Return a comparison for each family if all are non-inferior and something was reused; else say why not. Families
    that the model cannot answer cold are left out, unless the user named them (`are_named`)."""
    kinds, rule = prepared.kinds, prepared.proof(0)
    families = trials.known(kinds, rule.looks[0], tell)
    problem = problem_of(families, kinds)
    if are_named and len(families) < len(kinds):
        problem = f"the model does not know {', '.join(sorted(kinds.keys() - set(families)))} cold in this engine"
    if problem is not None:
        tell(f"nothing can be shown, and the profile stays as it is: {problem}")
        return ()
    verdict = trials.judge(path, families, rule, "confirm")
    _tell_comparisons(verdict.comparisons, tell)
    if not verdict.holds:
        tell(f"not shown to be as good as cold, and the profile stays as it is: {verdict.outcome()}")
        return ()
    if not any(each.line.reused for each in verdict.comparisons):
        tell("nothing was reused from other places, so nothing is shown, and the profile stays as it is")
        return ()
    return verdict.comparisons


def teller() -> Callable[[str], None]:
    """Return a function that prints sentences after the seconds since now."""
    began = time.perf_counter()
    return lambda sentence: say(f"{time.perf_counter() - began:6.0f} s  {sentence}")


def _tell_comparisons(comparisons: Iterable[Comparison], tell: Callable[[str], None]) -> None:
    for each in comparisons:
        line = each.line
        share = "nothing offered" if line.reused_share is None else f"{line.reused_share:.1%} of the offered reused"
        tell(f"{line.family}: {each.sentence()}; {share}, largest deviation kept {line.largest_kept:.4f}")


def figures_of(found: Found) -> list[Any]:
    """Return the profile's figures: problem, confirmed families, deviations, what a sample may miss, and all tried."""
    figures: list[Any] = [] if found.problem is None else [{"what": "problem", "sentence": found.problem}]
    figures += map(_confirmed, found.comparisons)
    winner = found.winner
    if winner is not None and (check := winner.check) is not None:
        for name in dict.fromkeys(prompt.family for prompt in found.deviations):
            values = np.concatenate([each.values[check.layer] for each in found.deviations if each.family == name])
            values = values[np.isfinite(values)]
            if values.size:
                shares = np.quantile(values, (0.05, 0.5, 0.95, 0.99)).tolist()
                figures.append({"what": "deviation", "family": name, "layer": check.layer, "p5_p50_p95_p99": shares})
        if check.sample_every:
            # Of n tokens that all pass, (1 - share)^n >= 5 %. Beside it is what dense checks of screening prompts find.
            compared = len(sample_of([_RUN_TOKENS], check.sample_every, check.window_tokens, seed=0))
            bound = 1.0 - (1.0 - CONFIDENCE) ** (1.0 / compared)
            unseen = unseen_share(check, winner.head_tokens, found.deviations)
            sample = {"run_tokens": _RUN_TOKENS, "unseen_share_at_most": bound, "unseen_share": unseen}
            figures.append({"what": "sample", **sample})
    for tried in found.tried:
        figures.append(
            {
                "what": "tried",
                "stage": tried.stage,
                "candidate": tried.candidate.name,
                "computed_share": tried.candidate.computed_share,
                "holds": tried.verdict.holds,
                "inferior_family": tried.verdict.inferior,
                "undecided_families": list(tried.verdict.undecided),
                "comparison": tried.verdict.outcome(),
                "generation": tried.generation,
            }
        )
    return figures


def _confirmed(comparison: Comparison) -> dict[str, Any]:
    line = comparison.line

    def told(found: Evidence | None) -> dict[str, float] | None:
        return None if found is None else {name: getattr(found, name) for name in ("difference", "lower", "upper")}

    return {
        "what": "confirmed",
        "family": line.family,
        "prompts": line.samples,
        "groups": line.groups,
        "exact_match": line.exact_match,
        "likelihood_vs_cold": told(comparison.likelihood),
        "exact_match_vs_cold": told(comparison.exact_match),
        "second_cold_run": told(comparison.noise),
        "offered_tokens": line.offered,
        "sampled_tokens": line.sampled,
        "checked_tokens": line.checked,
        "reused_tokens": line.reused,
        "largest_kept": line.largest_kept,
        "generation": line.generation,
        "computed_share": line.computed_share,
    }
