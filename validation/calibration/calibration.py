"""Calibration: chooses a model's check, finds the bounds that hold after it, and confirms them on new prompts.

Of models that read stock lists, a dense check is searched first: candidates by what they compute, tried by answers.
Deviations under Transformers only nominate them. What such a check may leave uncompared is for the bound to say.
`python -m validation calibrate` finds what a model may reuse, and `confirm` adds engines to its reuse profile."""

import argparse
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import numpy.typing as npt

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable
from semblend_trt.plan import SpanCheck
from semblend_trt.reuse_profile import MAX_THRESHOLD, ProfileBound, ProfileCheck, ReuseProfile, terms_name
from validation import arguments, models
from validation.calibration.bound import (
    LEAST,
    MAX_KLS,
    SHARES,
    Broken,
    Observation,
    bounds_of,
    broken_of,
    correlation,
    groups_needed,
    missing_groups,
    what_if,
)
from validation.calibration.deviations import PromptDeviations
from validation.calibration.prepared import PROMPT_OPTIONS, Observer, Prepared
from validation.cases import Case
from validation.engines import TRTLLM
from validation.families.catalog import FAMILIES, Kind, family
from validation.metrics import CONFIDENCE
from validation.results import say, today, versions

# Where half of a span deviates, its meaning has changed, and all of it is computed. A plan that saves less than a tenth
# costs more than it saves.
_SHARES: dict[str, Any] = {"max_span_share": 0.5, "min_saved_share": 0.1}
# One token of this number is sampled. The first window of a run, which is compared whole, is most of a short run.
SAMPLE_EVERY = 16
# Thresholds are powers of it: closer ones decide alike, and other prompts of the same families nominate the same ones.
_STEP = 1.2
# Low layers hardly show that a token depends on the one before it: a check is tried with and without computed heads.
_HEADS = (0, 8)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A dense check that a profile can hold, and how many first tokens of a run are always computed.
    `computed_share`: of the tokens times layers that harmless plans offer, the part that it should compute."""

    check: ProfileCheck
    head_tokens: int
    computed_share: float

    @property
    def name(self) -> str:
        """Return the terms in words, for figures and reports."""
        window, head = self.check.window_threshold, self.head_tokens
        named = terms_name("verified", self.check) + ("" if window is None else f" windows {window:.4g}")
        return f"{named} head {head}" if head else named

    def sampled(self, harmless: Sequence[PromptDeviations]) -> ProfileCheck:
        """Return the check after a sample, which suspects windows that deviate more than most of the harmless ones."""
        bound = max(window_thresholds(harmless, self.check.layer), default=self.check.threshold)
        changes = {"sample_every": SAMPLE_EVERY, "sample_threshold": min(bound, self.check.threshold)}
        return self.check.model_copy(update=changes)


def candidates(
    harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], num_layers: int, lowest_check: int = 1
) -> list[Candidate]:
    """Return all candidates by computed share: checks at every layer from `lowest_check` on."""
    found = []
    for layer in range(lowest_check, num_layers):
        windows = window_thresholds(harmless, layer)
        for threshold in thresholds(harmless, traps, layer):
            below = (None, *(each for each in windows if each < threshold))
            for window, head in itertools.product(below, _HEADS):
                check = ProfileCheck(layer=layer, threshold=threshold, window_threshold=window, **_SHARES)
                found.append(Candidate(check, head, computed_share(check, head, harmless, num_layers)))
    return sorted((each for each in found if each.computed_share < 1.0), key=lambda each: each.computed_share)


def thresholds(harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], layer: int) -> list[float]:
    """Return thresholds of tokens at `layer`, ascending: high quantiles of harmless tokens, and one between spans.

    That is the geometric mean of two neighbouring means of harmless and trap spans, above the harmless median: of those
    with the largest ratio."""
    wanted = _quantiles((prompt.values[layer] for prompt in harmless), (0.9, 0.95, 0.99, 0.999))
    own, others = (_pooled(prompt.span_means(layer) for prompt in prompts) for prompts in (harmless, traps))
    if own.size:
        pooled = np.sort(np.concatenate([own, others]))
        pooled = pooled[pooled >= max(float(np.median(own)), 1e-6)]
        ratios = pooled[1:] / pooled[:-1]
        if ratios.size and ratios.max() > 1.0:
            widest = int(ratios.argmax())
            wanted.append(math.sqrt(pooled[widest] * pooled[widest + 1]))
    return _rounded(wanted)


def window_thresholds(harmless: Sequence[PromptDeviations], layer: int) -> list[float]:
    """Return thresholds of windows' means at `layer`, ascending: at high quantiles of harmless windows."""
    return _rounded(_quantiles((prompt.window_means(layer) for prompt in harmless), (0.75, 0.85, 0.95)))


def computed_share(
    check: ProfileCheck, head_tokens: int, prompts: Sequence[PromptDeviations], num_layers: int
) -> float:
    """Return the share of offered tokens times layers that check and heads have computed; 1.0 if plans offer none."""
    rule, below = SpanCheck(**check.model_dump()), check.layer / num_layers
    offered, saved = sum(prompt.values.shape[1] for prompt in prompts), 0.0
    for prompt in prompts:
        kept, compared = prompt.kept_and_compared(rule, head_tokens)
        saved += np.count_nonzero(kept) - below * np.count_nonzero(kept & compared)
    return 1.0 - saved / offered if offered else 1.0


def _pooled(arrays: Iterable[npt.NDArray[np.floating]]) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = np.concatenate([np.empty(0), *arrays])
    return np.extract(np.isfinite(values), values)


def _quantiles(arrays: Iterable[npt.NDArray[np.floating]], shares: Sequence[float]) -> list[float]:
    values = _pooled(arrays)
    return np.quantile(values, shares).tolist() if values.size else []


def _rounded(wanted: Iterable[float]) -> list[float]:
    """Return the values rounded to powers of _STEP, ascending, as far as a profile may hold them."""
    powers = {round(math.log(value, _STEP)) for value in wanted if value > 0.0}
    return [value for power in sorted(powers) if (value := _STEP**power) <= MAX_THRESHOLD]


# Added to a calibration's seed for the prompts that confirm.
FRESH = 1_000
# Deeper layers see more, and all below a check runs on what it compares.
# A run's first tokens deviate most and cost little: on SmolLM2 eight take most of the KL that changed headings make.
_DEEPEST_CHECK, _HEAD_TOKENS = 3, 8
# One group in this number fixes what the others test: more tests allow more misses, and few groups fix a line.
FIT_PARTS = 4
# The computed share at which checks with and without a comparison of all tokens are tried.
_COMPARED = 0.2


@dataclass(slots=True)
class Calibration:
    """One run over `prepared`, which says by `tell` what it finds. `shares` of a plan are tried, ascending from 0."""

    prepared: Prepared
    shares: tuple[float, ...]
    risk: float
    max_tries: int
    command: str
    tell: Callable[[str], None]
    figures: list[Any] = field(default_factory=list, init=False)

    def run(self) -> ReuseProfile:
        """Return the profile; without bounds it allows exact spans only. Raises SemBlendError."""
        self.figures.append({"what": "rule", "risk": self.risk, "confidence": CONFIDENCE, "shares": list(self.shares)})
        self.figures.append({"what": "prompts", **self.prepared.prompts})
        base = self._base()
        if base is None:
            return self._profile()
        seed, groups = self.prepared.prompts["seed"], self.prepared.prompts["groups"]
        fit = [*self.prepared.cases(seed, 0, self.fitted, base), *self.prepared.own(0)]
        test = [*self.prepared.cases(seed, self.fitted, groups - self.fitted, base), *self.prepared.own(1, 2)]
        observer = self.prepared.observer([*fit, *test])
        # Few answers make most of a mean, and more than the risk's share would be over twice as much.
        distances = observer.rounding(fit)
        floor = max(LEAST / 2.0, float(np.quantile(distances, 1.0 - self.risk, method="higher")))
        self.figures.append({"what": "rounding", "prompts": len(distances), "floor": floor})
        self.tell(f"rounding floor: {floor:.2g} nats, which {1.0 - self.risk:.0%} of cold's own answers stay within")
        observed = observer.observations(base, [*fit, *test], self.shares, "calibrate")
        bounds = self._bounds(observed, test, floor)
        fresh = [*self.prepared.cases(seed + FRESH, 0, self.fitted, base), *self.prepared.own(3)]
        trial = base.model_copy(update={"bounds": bounds, "floor": floor})
        bounds = self._confirmed(self.prepared.observer(fresh), trial, fresh)
        terms = {"head_tokens": base.head_tokens, "bounds": bounds, "floor": floor} if bounds else {}
        return self._profile(base.check if bounds else None, **terms)

    def _profile(self, check: ProfileCheck | None = None, **fields: Any) -> ReuseProfile:
        return ReuseProfile.made_for(
            self.prepared.namespace,
            self.prepared.geometry,
            policy="exact" if check is None else "verified",
            check=check,
            template=self.prepared.form.template_digest,
            figures=list(self.figures),
            versions=versions(),
            command=self.command,
            **fields,
        )

    @property
    def fitted(self) -> int:
        """How many groups of each family fix what the others test."""
        return int(self.prepared.prompts["groups"]) // FIT_PARTS

    def _base(self) -> ReuseProfile | None:
        """Return the profile with the check whose levels are to be found; None where no check holds."""
        fit = [*self.prepared.cases(self.prepared.prompts["seed"], 0, self.fitted), *self.prepared.own(0)]
        observer = self.prepared.observer(fit)
        if self.prepared.form.has_marks:
            # A model that reads stock lists has traps, which a dense check rules out.
            return self._dense(observer, fit)
        # The check's layer is the one whose deviations say most of what unchecked reuse does.
        facts, by_layer = self.prepared.engines.facts, dict[int, float]()
        for layer in range(facts.lowest_check_layer, min(_DEEPEST_CHECK, facts.num_layers - 1) + 1):
            observed = observer.observations(self._sampled(layer), fit, (0.0,), f"layer {layer}")
            by_layer[layer] = correlation([each.deviation for each in observed], [each.kl[0] for each in observed])
            self.tell(f"layer {layer}: deviation and KL have a correlation of {by_layer[layer]:.3f} (logarithms)")
        if not by_layer:
            self.tell(f"no layer from {facts.lowest_check_layer} to {_DEEPEST_CHECK} can be checked")
            return None
        self.figures.append({"what": "layers", "correlation": {str(layer): each for layer, each in by_layer.items()}})
        layer, found = max(by_layer, key=by_layer.__getitem__), dict[bool, float]()
        # The check of all tokens, or of the sample with its cost computed above: the one with the lower KL.
        depth = layer / facts.num_layers
        for compares_all, share in ((True, _COMPARED), (False, depth + (1.0 - depth) * _COMPARED)):
            title = f"all tokens {'' if compares_all else 'not '}compared"
            observed = observer.observations(self._sampled(layer, compares_all), fit, (share,), title)
            found[compares_all] = geometric_mean([max(each.kl[0], LEAST) for each in observed] or [LEAST])
            self.tell(f"{title}, {share:.0%} computed above: KL of {found[compares_all]:.2g} nats (geometric mean)")
        self.figures.append({"what": "compared", "kl_with": found[True], "kl_without": found[False]})
        return self._sampled(layer, found[True] < found[False])

    def _sampled(self, layer: int, compares_all: bool = True) -> ReuseProfile:
        """Return a profile with a check whose levels alone decide."""
        check = ProfileCheck(layer=layer, threshold=MAX_THRESHOLD, sample_threshold=MAX_THRESHOLD)
        changes = {"sample_every": SAMPLE_EVERY, "compares_all": compares_all}
        return self._profile(check.model_copy(update=changes), head_tokens=_HEAD_TOKENS)

    def _dense(self, observer: Observer, fit: Sequence[Case]) -> ReuseProfile | None:
        """Return the profile with the cheapest dense check that holds, after a sample; None if none holds."""
        facts = self.prepared.engines.facts
        found = [each for each in self.prepared.collector.collect(fit) if each is not None]
        names = {name for name in self.prepared.names if family(name).kind is Kind.TRAP}
        harmless, traps = ([each for each in found if (each.family in names) is is_trap] for is_trap in (False, True))
        # A candidate is most likely to fail a trap, and nothing more is served then.
        parts = [[case for case in fit if (case.workload in names) is is_trap] for is_trap in (True, False)]
        for candidate in candidates(harmless, traps, facts.num_layers, facts.lowest_check_layer)[: self.max_tries]:
            if self._holds(candidate, observer, parts):
                return self._profile(candidate.sampled(harmless), head_tokens=candidate.head_tokens)
        return None

    def _holds(self, candidate: Candidate, observer: Observer, parts: Sequence[Sequence[Case]]) -> bool:
        """Return whether no family has more groups over the loosest bound than the risk."""
        profile = self._profile(candidate.check, head_tokens=candidate.head_tokens)
        served = (observer.served(profile, part, None, candidate.name) for part in parts)
        families = (found for each in served for found in broken_of(each, MAX_KLS[-1]).items())
        inferior = next((name for name, each in families if each.misses > self.risk * each.groups), None)
        counts = {"candidate": candidate.name, "computed_share": candidate.computed_share}
        self.figures.append({"what": "tried", **counts, "holds": inferior is None, "inferior_family": inferior})
        share = f"computes {candidate.computed_share:.1%} of what harmless plans offer"
        self.tell(f"{candidate.name}, {share}: {'holds' if inferior is None else f'fails at {inferior}'}")
        return inferior is None

    def _bounds(self, observed: Sequence[Observation], cases: Sequence[Case], floor: float) -> list[ProfileBound]:
        """Return the bounds that hold for the families of these `cases`, which fix no level."""
        groups = {case.group for case in cases}
        fit, test = ([each for each in observed if (each.group in groups) is is_test] for is_test in (False, True))
        tested = Counter(dict.fromkeys((case.workload for case in cases), 0))
        tested.update(name for name, _ in {(each.family, each.group) for each in test})
        for name, missing in missing_groups(tested, self.risk).items():
            self.tell(f"{name}: {tested[name]} groups with moved text; a risk of {self.risk:g} needs {missing} more")
        for name in filter(tested.__getitem__, tested):
            kl = [each.kl[0] for each in test if each.family == name]
            counts = {"prompts": len(kl), "groups": tested[name], "unchecked_kl": math.fsum(kl) / len(kl)}
            self.figures.append({"what": "observed", "family": name, **counts})
        kept = []
        for bound in bounds_of(fit, test, self.shares, (2.0 * floor, *MAX_KLS), self.risk):
            shares = {name: each.share for name, each in what_if(test, self.shares, bound.levels, bound.max_kl).items()}
            # Where no prompt was reused, nothing was tested.
            is_shown = min(shares.values(), default=1.0) < 1.0
            said = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
            self.tell(f"{bound.max_kl:.2g} nats, computed shares: {said if is_shown else 'nothing is shown'}")
            kept += [bound] if is_shown else []
        return kept

    def _confirmed(self, observer: Observer, profile: ReuseProfile, fresh: Sequence[Case]) -> list[ProfileBound]:
        """Return the profile's bounds that new prompts do not refute."""
        kept, served = [], dict[str, Any]()
        for bound in profile.bounds:
            title, levels = f"{bound.max_kl:.2g} nats", str(bound.levels)
            # Bounds of equal levels have the same answers.
            if levels not in served:
                served[levels] = observer.served(profile, fresh, bound, f"confirm {title}")
            broken = broken_of(served[levels], bound.max_kl)
            is_refuted = any(each.lower > bound.risk for each in broken.values())
            self.tell(f"{title}: over it were {shown(broken)}" + ("; it is left out" if is_refuted else ""))
            if is_refuted or not broken:
                continue
            kept.append(bound)
            what = {"what": "bound_confirmed", "max_kl": bound.max_kl, "risk": bound.risk}
            for name, each in broken.items():
                counts = {"prompts": each.groups, "broken": each.misses, "computed_share": each.share}
                self.figures.append(what | {"families": [name], **counts})
        return kept


def shown(broken: Mapping[str, Broken]) -> str:
    """Return in words how many groups of each family are over a bound."""
    return ", ".join(f"{name} {each.misses} of {each.groups}" for name, each in broken.items()) or "no moved text"


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
    """Do as `parse_calibrate`. Raises ConfigurationError if the profile, which sets the defaults, cannot be read."""
    epilog = f"What is not named is as the profile was made with, with a seed {2 * FRESH:,} higher."
    parser = _parser("confirm", _CONFIRM, epilog)
    arguments.add(parser, "--profile", required=True, help="the profile")
    arguments.add(parser, "--output", help="the profile with the engine (default: --profile)")
    figures = ReuseProfile.read(parser.parse_args(given).profile).figures
    known = [figure for figure in figures if isinstance(figure, dict)]
    prompts = next((each for each in known if each.get("what") == "prompts"), {})
    made_with = {name: value for name, value in prompts.items() if name in PROMPT_OPTIONS and isinstance(value, int)}
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
    """Confirm the profile in the engine and write it; True if it lists that now. Raises SemBlendError and OSError."""
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
    # A profile of an earlier version has no bound; it is held to the loosest.
    for bound in profile.bounds or (None,):
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
