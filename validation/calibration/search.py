"""The search of a calibration: candidates, and the cheapest one that is non-inferior to cold on every family.

Families are served under a candidate, and cold, until one family is inferior. Of the family `planted` a candidate is
served the plants that its check misses most. The planter has the model and its reuse profile, and computes what the
check would see. It wants tokens that are kept and yet deviate: KV close to the victim's own changes no answer.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.errors import SemBlendError
from semblend_trt.plan import SpanCheck
from semblend_trt.reuse_profile import MAX_THRESHOLD, ProfileCheck, ReuseProfile
from validation.arms import COLD, VERIFIED, ArmChoices, arms_of
from validation.families.catalog import Kind, shortest_prompts, write_cases
from validation.measurement import BatchServer
from validation.metrics import MARGIN
from validation.models import full_layers_of
from validation.samples import MIN_COLD_SCORE, line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from validation.calibration.deviations import DeviationCollector, PromptDeviations
    from validation.cases import Case, TokenisedCase
    from validation.engines import Engines, ServedModel
    from validation.families.catalog import FamilyRequest
    from validation.measurement import ServingSettings
    from validation.samples import Line, Sample

# The planter's family, and how many plants one is chosen from.
PLANTED = "planted"
TRIES = 16


def write_plants(model: ServedModel, asked: FamilyRequest, names: Iterable[str], plants: int) -> list[Case]:
    """`plants` prompts of each of the families, as short as possible, so that all that is reused is planted."""
    short = shortest_prompts(model, asked.form)
    return write_cases(model, replace(asked, names=tuple(names), groups=plants, questions=1, tokens=short))


class Planter:
    """Ranks plants by what a policy misses; their ids must differ."""

    def __init__(self, collector: DeviationCollector, tokens_of: Callable[[Case], TokenisedCase]) -> None:
        self._collector, self._tokens_of = collector, tokens_of
        self._deviations: dict[str, list[PromptDeviations]] = {}

    def hardest(self, plants: Sequence[Case], profile: ReuseProfile, count: int) -> list[Case]:
        """The `count` plants that the profile's policy misses most."""
        return sorted(plants, key=lambda plant: -self.missed(plant, profile))[:count]

    def missed(self, plant: Case, profile: ReuseProfile) -> float:
        """Sum of the deviations of all tokens that the policy keeps, over the layers that it does not compute."""
        terms, found = profile.terms, self.deviations_of(plant)
        if terms is None or not found:
            return 0.0
        [prompt] = found
        kept = prompt.kept(terms.check, terms.head_tokens)
        return float(np.nansum(prompt.values[full_layers_of(profile) :, kept], dtype=np.float64))

    def deviations_of(self, plant: Case) -> list[PromptDeviations]:
        """Its deviations; empty where there is nothing to check."""
        if plant.id not in self._deviations:
            self._deviations[plant.id] = self._collector.collect([plant], self._tokens_of)
        return self._deviations[plant.id]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`lines`: the families that were served; where `holds` is False, the last one is inferior."""

    holds: bool
    lines: tuple[Line, ...]

    @property
    def inferior(self) -> str | None:
        """The family that ended the trial."""
        return None if self.holds else self.lines[-1].family

    def difference(self) -> str:
        """The lowest bound in words: of the family that ended the trial, otherwise of all."""
        lines = self.lines if self.holds else self.lines[-1:]
        lowest = min((bound for line in lines for bound in line.bounds), key=lambda bound: bound.lower, default=None)
        return "nothing was compared" if lowest is None else lowest.sentence()


class Trials:
    """One set of prompts by family, and cold's answers to them, which are served once.

    An engine that starts slowly serves all families before the first is judged.
    """

    def __init__(
        self,
        engines: Engines,
        cases: Sequence[Case],
        settings: ServingSettings,
        seed: int,
        collector: DeviationCollector,
    ) -> None:
        self._engines, self._seed = engines, seed
        self._cases: dict[str, list[Case]] = {}
        for case in cases:
            self._cases.setdefault(case.workload, []).append(case)
        self._server = BatchServer(engines, list(itertools.chain(*self._cases.values())), settings)
        self._planter = Planter(collector, self._server.tokens_of)
        self._collector = collector

    def deviations(self, family: str) -> list[PromptDeviations]:
        """Deviations of the first prompt of each group."""
        if family == PLANTED:
            return [found for plant in self._cases[family] for found in self._planter.deviations_of(plant)]
        return self._collector.collect(self._cases[family], self._server.tokens_of)

    def known(self, families: Iterable[str], tell: Callable[[str], None]) -> list[str]:
        """The families that the model can answer cold, or that are scored by perplexity; the others show nothing."""
        known = []
        for family in families:
            cold = self._server.cold(self._cases[family])
            line = line_of(family, COLD, list(cold.values()), cold, self._seed)
            is_known = line.exact_match is None or line.exact_match >= MIN_COLD_SCORE
            score = "" if line.exact_match is None else f", cold exact match {line.exact_match:.3f}"
            tell(f"{family}: {line.samples} prompts{score}" + ("" if is_known else "; the family shows nothing"))
            known += [family] if is_known else []
        return known

    def judge(self, path: Path, families: Sequence[str], *, strict: bool) -> Verdict:
        """Serves the families under policy verified with the profile of `path` until one fails.

        With `strict`, and for plants, a family must be non-inferior; otherwise it may lose the margin, as few prompts
        bound little. Raises SemBlendError when the engine refuses the profile.
        """
        profile, layers = ReuseProfile.read(path), self._engines.facts.num_layers
        choices = ArmChoices(layers, boundary=1, profile=path, profile_layers=full_layers_of(profile))
        [arm] = arms_of([VERIFIED], choices)
        lines: list[Line] = []
        chosen = {family: self._chosen(family, profile) for family in families}
        for together in [list(chosen)] if self._engines.starts_slowly else [[family] for family in chosen]:
            samples = self._server.samples(arm, [case for family in together for case in chosen[family]])
            _check_profile_was_used(samples)
            for family in together:
                ours = [sample for sample in samples if sample.workload == family]
                lines.append(line_of(family, VERIFIED, ours, self._server.cold(chosen[family]), self._seed))
                has_lost_little = all(bound.difference >= -MARGIN for bound in lines[-1].bounds)
                if not (lines[-1].holds if strict or family == PLANTED else has_lost_little):
                    return Verdict(False, tuple(lines))
        return Verdict(True, tuple(lines))

    def _chosen(self, family: str, profile: ReuseProfile) -> list[Case]:
        cases = self._cases[family]
        return cases if family != PLANTED else self._planter.hardest(cases, profile, -(-len(cases) // TRIES))


def _check_profile_was_used(samples: Sequence[Sample]) -> None:
    for sample in samples:
        if sample.reason in ("no_profile", "profile_mismatch", "profile_unreadable"):
            raise SemBlendError(
                f"Case {sample.case_id}: the engine does not take the profile that is tried ({sample.reason}); what "
                "differs is in its log."
            )


# Where half of a span deviates, its meaning has changed, and none of it is kept.
MAX_SPAN_SHARE = 0.5
# A plan that saves less costs more than it saves.
MIN_SAVED_SHARE = 0.1
# Quantiles of harmless tokens' deviations, and of harmless windows' means, that thresholds are tried at.
_QUANTILES = (0.9, 0.95, 0.99, 0.999)
_WINDOW_QUANTILES = (0.75, 0.85, 0.95)
# Thresholds closer to each other than this factor decide alike.
_SAME = 1.1
# Low layers hardly show that a token depends on the one before it, as the second digit of a number does. So a check is
# tried with none, and with 8, of the first tokens of every span computed.
_HEADS = (0, 8)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy that a profile can hold. `computed_share`: predicted share of tokens times layers that it computes, of
    those that plans offer for harmless prompts."""

    policy: str
    computed_share: float
    boundary: int = 0
    check: ProfileCheck | None = None
    head_tokens: int = 0

    @property
    def full_layers(self) -> int:
        """Lowest layers that are computed for every token."""
        return max(self.boundary, 0 if self.check is None else self.check.layer)

    @property
    def name(self) -> str:
        if self.check is not None:
            head = f" head {self.head_tokens}" if self.head_tokens else ""
            window = "" if self.check.window_threshold is None else f" windows {self.check.window_threshold:.4g}"
            return f"{self.policy} layer {self.check.layer} threshold {self.check.threshold:.4g}{window}{head}"
        return f"{self.policy} {self.boundary}" if self.boundary else self.policy


def candidates(
    harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], num_layers: int
) -> list[Candidate]:
    """All candidates by computed share: position_fix, every boundary, and checks at every layer but 0, with and without
    computed heads."""
    found = [Candidate("position_fix", 0.0)]
    found += [Candidate("boundary", b / num_layers, boundary=b) for b in range(1, num_layers)]
    for layer in range(1, num_layers):
        for check, head in itertools.product(_checks(harmless, traps, layer), _HEADS):
            share = computed_share(check, head, harmless, num_layers)
            found.append(Candidate("verified", share, check=check, head_tokens=head))
    return sorted((each for each in found if each.computed_share < 1.0), key=lambda each: each.computed_share)


def thresholds(harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], layer: int) -> list[float]:
    """Thresholds of tokens at `layer`, ascending: in the largest gap between the means of harmless and trap spans, and
    at high quantiles of harmless tokens."""
    spans = [_pooled(prompt.span_means(layer) for prompt in prompts) for prompts in (harmless, traps)]
    tokens = _pooled(prompt.values[layer] for prompt in harmless)
    return _apart([*_quantiles(tokens, _QUANTILES), *_largest_gap(*spans)])


def window_thresholds(harmless: Sequence[PromptDeviations], layer: int) -> list[float]:
    """Thresholds of windows' means at `layer`, ascending: at high quantiles of harmless windows."""
    return _apart(_quantiles(_pooled(prompt.window_means(layer) for prompt in harmless), _WINDOW_QUANTILES))


def computed_share(
    check: ProfileCheck, head_tokens: int, prompts: Sequence[PromptDeviations], num_layers: int
) -> float:
    """Share of tokens times layers that check and heads have computed, of those that the plans offer; 1.0 where they
    offer none."""
    rule = SpanCheck(**check.model_dump())
    offered = sum(prompt.values.shape[1] for prompt in prompts)
    kept = sum(int(np.count_nonzero(prompt.kept(rule, head_tokens))) for prompt in prompts)
    return 1.0 - kept / offered * (1.0 - check.layer / num_layers) if offered else 1.0


def _checks(
    harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], layer: int
) -> Iterator[ProfileCheck]:
    """Every threshold of tokens, alone and with each lower one of windows."""
    for threshold in thresholds(harmless, traps, layer):
        for window in (None, *(each for each in window_thresholds(harmless, layer) if each < threshold)):
            yield ProfileCheck(
                layer=layer,
                threshold=threshold,
                max_span_share=MAX_SPAN_SHARE,
                min_saved_share=MIN_SAVED_SHARE,
                window_threshold=window,
            )


def _pooled(arrays: Iterable[npt.NDArray[np.floating]]) -> npt.NDArray[np.float64]:
    """All finite values."""
    values: npt.NDArray[np.float64] = np.concatenate([np.empty(0), *arrays])
    return np.extract(np.isfinite(values), values)


def _quantiles(values: npt.NDArray[np.float64], shares: Sequence[float]) -> list[float]:
    return np.quantile(values, shares).tolist() if values.size else []


def _apart(wanted: Sequence[float]) -> list[float]:
    """The values that a profile may hold, ascending, without those close to the one before."""
    kept: list[float] = []
    for value in sorted(wanted):
        if 0.0 < value <= MAX_THRESHOLD and (not kept or value > _SAME * kept[-1]):
            kept.append(value)
    return kept


def _largest_gap(harmless: npt.NDArray[np.float64], traps: npt.NDArray[np.float64]) -> list[float]:
    """The geometric mean of the two neighbouring span means with the largest ratio, above the harmless median; empty
    without a gap."""
    if not harmless.size:
        return []
    pooled = np.sort(np.concatenate([harmless, traps]))
    pooled = pooled[pooled >= max(float(np.median(harmless)), 1e-6)]
    ratios = pooled[1:] / pooled[:-1]
    if not ratios.size or ratios.max() <= 1.0:
        return []
    widest = int(ratios.argmax())
    return [math.sqrt(pooled[widest] * pooled[widest + 1])]


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate's verdict at a `stage`, `screen` or `confirm`."""

    candidate: Candidate
    stage: str
    verdict: Verdict


@dataclass(slots=True)
class Found:
    """The `winner` and its confirmed `lines`, if any; otherwise the `problem`, unless all candidates failed. `tried` in
    order; `deviations` of the screening prompts."""

    winner: Candidate | None = None
    lines: tuple[Line, ...] = ()
    problem: str | None = None
    tried: list[Tried] = field(default_factory=list)
    deviations: list[PromptDeviations] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Search:
    """Tries candidates by the answers of an engine; deviations under Transformers only nominate them.

    `screening` prompts choose; `fresh(n)` gives new prompts for the n-th confirmation. `written` writes a candidate's
    profile where an engine reads it. At most `max_tries` candidates are screened.
    """

    num_layers: int
    kinds: Mapping[str, str]
    screening: Trials
    fresh: Callable[[int], Trials]
    written: Callable[[Candidate], Path]
    max_tries: int
    tell: Callable[[str], None]

    def run(self) -> Found:
        """Tries the candidates by computed share until one is confirmed. Raises SemBlendError."""
        found = Found()
        families = self.screening.known(self.kinds, self.tell)
        found.problem = problem_of(families, self.kinds)
        if found.problem is not None:
            return found
        found.deviations = [prompt for name in families for prompt in self.screening.deviations(name)]
        ordered = self._candidates(found.deviations)
        # At each layer the check that computes most comes first: what it lets pass, every other one does.
        strictest = {each.full_layers: each for each in ordered if each.check is not None}
        for candidate in ordered:
            first = candidate if candidate.check is None else strictest[candidate.full_layers]
            if not all(self._is_screened(found, each, families) for each in (first, candidate)):
                continue
            confirmations = sum(each.stage == "confirm" for each in found.tried)
            verdict = self.fresh(confirmations).judge(self.written(candidate), families, strict=True)
            if self._told(found, candidate, "confirm", verdict):
                found.winner, found.lines = candidate, verdict.lines
                return found
        return found

    def _is_screened(self, found: Found, candidate: Candidate, families: list[str]) -> bool:
        """Whether the candidate holds on the screening prompts; each is served once, and False beyond `max_tries`."""
        screened = [each for each in found.tried if each.stage == "screen"]
        for each in screened:
            if each.candidate is candidate:
                return each.verdict.holds
        if len(screened) == self.max_tries:
            return False
        verdict = self.screening.judge(self.written(candidate), families, strict=False)
        # The next candidate is likely to fail at the same family.
        families.sort(key=lambda name: name != verdict.inferior)
        return self._told(found, candidate, "screen", verdict)

    def _candidates(self, deviations: Sequence[PromptDeviations]) -> list[Candidate]:
        traps = [prompt for prompt in deviations if self._is_trap(prompt.family)]
        harmless = [prompt for prompt in deviations if not self._is_trap(prompt.family)]
        return candidates(harmless, traps, self.num_layers)

    def _is_trap(self, family: str) -> bool:
        return self.kinds[family] == Kind.TRAP.value

    def _told(self, found: Found, candidate: Candidate, stage: str, verdict: Verdict) -> bool:
        """Records and tells a verdict; True when it holds."""
        found.tried.append(Tried(candidate, stage, verdict))
        outcome = "holds" if verdict.holds else f"fails at {verdict.inferior}"
        share = f"computes {candidate.computed_share:.1%} of what harmless plans offer"
        self.tell(f"{stage} {candidate.name}, {share}: {outcome}; {verdict.difference()}")
        return verdict.holds


def problem_of(families: Sequence[str], kinds: Mapping[str, str]) -> str | None:
    """Why these families, which the model answers cold, cannot show anything; None when they can."""
    are_traps = [kinds[name] == Kind.TRAP.value for name in families]
    if not any(are_traps):
        return (
            "no trap family is among those whose answers the model knows cold, so that nothing shows whether reuse "
            "goes wrong where a text means something else"
        )
    return "no harmless family is among those whose answers the model knows cold" if all(are_traps) else None
