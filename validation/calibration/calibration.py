"""Calibration: chooses a model's check, finds the bounds that hold after it, and confirms them on new prompts."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any

import numpy as np
import numpy.typing as npt

from semblend_trt.plan import SpanCheck
from semblend_trt.reuse_profile import MAX_THRESHOLD, ProfileBound, ProfileCheck, ReuseProfile, terms_name
from validation.calibration.bound import (
    LEAST,
    MAX_KLS,
    Broken,
    Observation,
    bounds_of,
    broken_of,
    correlation,
    missing_groups,
    what_if,
)
from validation.calibration.deviations import PromptDeviations
from validation.calibration.prepared import Observer, Prepared
from validation.cases import Case
from validation.families.catalog import Kind, family
from validation.metrics import CONFIDENCE
from validation.results import versions

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
        """Return the profile with the check whose levels are to be found; None where no check holds.

        Models that read stock lists have traps, which a dense check rules out. For others the check's layer is the one
        whose deviations say most of what unchecked reuse does."""
        fit = [*self.prepared.cases(self.prepared.prompts["seed"], 0, self.fitted), *self.prepared.own(0)]
        observer = self.prepared.observer(fit)
        if self.prepared.form.has_marks:
            return self._dense(observer, fit)
        facts, by_layer = self.prepared.engines.facts, dict[int, float]()
        for layer in range(facts.lowest_check_layer, min(_DEEPEST_CHECK, facts.num_layers - 1) + 1):
            observed = observer.observations(self._sampled(layer), fit, (0.0,), f"layer {layer}")
            by_layer[layer] = correlation([each.deviation for each in observed], [each.kl[0] for each in observed])
            self.tell(f"layer {layer}: deviation and KL have a correlation of {by_layer[layer]:.3f} (logarithms)")
        if not by_layer:
            self.tell(f"no layer from {facts.lowest_check_layer} to {_DEEPEST_CHECK} can be checked")
            return None
        self.figures.append({"what": "layers", "correlation": {str(layer): each for layer, each in by_layer.items()}})
        return self._cheaper(observer, fit, max(by_layer, key=by_layer.__getitem__))

    def _cheaper(self, observer: Observer, fit: Sequence[Case], layer: int) -> ReuseProfile:
        """Return the check of all tokens, or of the sample with its cost computed above: the one with the lower KL."""
        depth, found = layer / self.prepared.engines.facts.num_layers, dict[bool, float]()
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
        collect, facts = self.prepared.collector.collect, self.prepared.engines.facts
        found = [each for each in collect(fit, self.prepared.tokeniser.tokenise) if each is not None]
        names = {name for name in self.prepared.names if family(name).kind is Kind.TRAP}
        harmless, traps = ([each for each in found if (each.family in names) is is_trap] for is_trap in (False, True))
        # A candidate is most likely to fail a trap, and nothing more is served then.
        parts = [[case for case in fit if (case.workload in names) is is_trap] for is_trap in (True, False)]
        for candidate in candidates(harmless, traps, facts.num_layers, facts.lowest_check_layer)[: self.max_tries]:
            if self._holds(candidate, observer, parts):
                return self._profile(candidate.sampled(harmless), head_tokens=candidate.head_tokens)
        return None

    def _holds(self, candidate: "Candidate", observer: Observer, parts: Sequence[Sequence[Case]]) -> bool:
        """Return whether no family has more groups over the loosest bound than the risk."""
        profile, inferior = self._profile(candidate.check, head_tokens=candidate.head_tokens), None
        for part in parts:
            broken = broken_of(observer.served(profile, part, None, candidate.name), MAX_KLS[-1])
            inferior = inferior or next(
                (name for name, each in broken.items() if each.misses > self.risk * each.groups), None
            )
            if inferior is not None:
                break
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


# Where half of a span deviates, its meaning has changed, and all of it is computed.
MAX_SPAN_SHARE = 0.5
# A plan that saves less costs more than it saves.
MIN_SAVED_SHARE = 0.1
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
        parts = [terms_name("verified", 0, self.check)]
        if self.check.window_threshold is not None:
            parts.append(f"windows {self.check.window_threshold:.4g}")
        return " ".join([*parts, f"head {self.head_tokens}"] if self.head_tokens else parts)

    def sampled(self, harmless: Sequence[PromptDeviations]) -> ProfileCheck:
        """Return the check after a sample, which suspects windows that deviate more than most of the harmless ones."""
        bound = max(window_thresholds(harmless, self.check.layer), default=self.check.threshold)
        changes = {"sample_every": SAMPLE_EVERY, "sample_threshold": min(bound, self.check.threshold)}
        return self.check.model_copy(update=changes)


def candidates(
    harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], num_layers: int, lowest_check: int = 1
) -> list[Candidate]:
    """Return all candidates by computed share: checks at every layer from `lowest_check` on.

    Each has a threshold of tokens, alone or with a lower one of windows, with or without heads."""
    found = []
    for layer in range(lowest_check, num_layers):
        windows = window_thresholds(harmless, layer)
        for threshold in thresholds(harmless, traps, layer):
            below = (None, *(each for each in windows if each < threshold))
            for window, head in itertools.product(below, _HEADS):
                check = ProfileCheck(
                    layer=layer,
                    threshold=threshold,
                    max_span_share=MAX_SPAN_SHARE,
                    min_saved_share=MIN_SAVED_SHARE,
                    window_threshold=window,
                )
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
