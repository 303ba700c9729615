"""The search of a calibration: candidates, and the cheapest one that is non-inferior to cold on every family."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.plan import WINDOW_TOKENS, SpanCheck
from semblend_trt.reuse_profile import EVIDENCE_MARGIN, MAX_THRESHOLD, ProfileCheck, leaves_unchecked, terms_name
from validation.families.catalog import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from validation.calibration.deviations import PromptDeviations
    from validation.calibration.trials import Comparison, Rule, Trials, Verdict

# Where half of a span deviates, its meaning has changed, and none of it is kept.
MAX_SPAN_SHARE = 0.5
# A plan that saves less costs more than it saves.
MIN_SAVED_SHARE = 0.1
# Quantiles of harmless tokens' deviations, and of harmless windows' means, that thresholds are tried at.
_QUANTILES = (0.9, 0.95, 0.99, 0.999)
_WINDOW_QUANTILES = (0.75, 0.85, 0.95)
# One token of so many is sampled, and quantiles of the means of harmless windows' samples that their bound is tried at.
SAMPLE_EVERY = 16
_SAMPLE_RATES = (SAMPLE_EVERY, SAMPLE_EVERY // 2)
# Tokens of its windows. The first one of a run, which is compared whole, is most of a short run.
_SAMPLE_WINDOWS = (WINDOW_TOKENS, WINDOW_TOKENS // 2)
_SAMPLE_QUANTILES = (0.8, 0.9, 0.97)
# A deeper layer's check that computes at most so much more is preferred: deeper layers see more.
_ABOUT_THE_SAME = 1.1
# Thresholds are powers of it: closer ones decide alike, and other prompts of the same families nominate the same ones.
_STEP = 1.2
# Low layers hardly show that a token depends on the one before it, as the second digit of a number does. So a check is
# tried with none, and with 8, of the first tokens of every span computed.
_HEADS = (0, 8)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy that a profile can hold. `computed_share`: predicted share of tokens times layers that it computes, of
    those that plans offer for harmless prompts; `generations` do not enter it."""

    policy: str
    computed_share: float
    boundary: int = 0
    check: ProfileCheck | None = None
    head_tokens: int = 0
    generations: int = 0

    @property
    def full_layers(self) -> int:
        """Lowest layers that are computed for every token."""
        return max(self.boundary, 0 if self.check is None else self.check.layer)

    @property
    def name(self) -> str:
        if self.check is not None:
            head = f" head {self.head_tokens}" if self.head_tokens else ""
            window = "" if self.check.window_threshold is None else f" windows {self.check.window_threshold:.4g}"
            every, bound = self.check.sample_every, self.check.sample_threshold
            where = f"in windows of {self.check.window_tokens}"
            sample = f" sample of one in {every} {where} under {bound:.4g}" if every else ""
            built = f" generations {self.generations}" if self.generations else ""
            return f"{terms_name(self.policy, self.boundary, self.check)}{window}{head}{sample}{built}"
        return terms_name(self.policy, self.boundary, self.check)


def candidates(
    harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], num_layers: int, lowest_check: int = 1
) -> list[Candidate]:
    """All candidates by computed share: position_fix, every boundary, and checks at every layer from `lowest_check` on,
    with and without computed heads."""
    found = [Candidate("position_fix", 0.0)]
    found += [Candidate("boundary", b / num_layers, boundary=b) for b in range(1, num_layers)]
    for layer in range(lowest_check, num_layers):
        for check, head in itertools.product(_checks(harmless, traps, layer), _HEADS):
            share = computed_share(check, head, harmless, num_layers)
            found.append(Candidate("verified", share, check=check, head_tokens=head))
    return sorted((each for each in found if each.computed_share < 1.0), key=lambda each: each.computed_share)


def thresholds(harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], layer: int) -> list[float]:
    """Thresholds of tokens at `layer`, ascending: in the largest gap between the means of harmless and trap spans, and
    at high quantiles of harmless tokens."""
    spans = [_pooled(prompt.span_means(layer) for prompt in prompts) for prompts in (harmless, traps)]
    tokens = _pooled(prompt.values[layer] for prompt in harmless)
    return _rounded([*_quantiles(tokens, _QUANTILES), *_largest_gap(*spans)])


def window_thresholds(harmless: Sequence[PromptDeviations], layer: int) -> list[float]:
    """Thresholds of windows' means at `layer`, ascending: at high quantiles of harmless windows."""
    return _rounded(_quantiles(_pooled(prompt.window_means(layer) for prompt in harmless), _WINDOW_QUANTILES))


def computed_share(
    check: ProfileCheck, head_tokens: int, prompts: Sequence[PromptDeviations], num_layers: int
) -> float:
    """Share of tokens times layers that check and heads have computed, of those that the plans offer; 1.0 where they
    offer none."""
    rule, below = SpanCheck(**check.model_dump()), check.layer / num_layers
    offered, saved = sum(prompt.values.shape[1] for prompt in prompts), 0.0
    for prompt in prompts:
        kept, compared = prompt.kept_and_compared(rule, head_tokens)
        saved += np.count_nonzero(kept) - below * np.count_nonzero(kept & compared)
    return 1.0 - saved / offered if offered else 1.0


def unseen_share(check: ProfileCheck, head_tokens: int, prompts: Sequence[PromptDeviations]) -> float:
    """Share of the kept tokens that deviate by more than the check's threshold and that its sample did not compare."""
    rule, kept_tokens, unseen = SpanCheck(**check.model_dump()), 0, 0
    for prompt in prompts:
        kept, compared = prompt.kept_and_compared(rule, head_tokens)
        kept_tokens += int(np.count_nonzero(kept))
        unseen += int(np.count_nonzero(kept & ~compared & (prompt.values[check.layer] > check.threshold)))
    return unseen / kept_tokens if kept_tokens else 0.0


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


def sampled_checks(check: ProfileCheck, harmless: Sequence[PromptDeviations]) -> list[ProfileCheck]:
    """The check behind samples of each rate in windows of each length, with bounds at high quantiles of what they find
    in harmless windows. Windows that the check itself judges keep their length."""
    lengths = _SAMPLE_WINDOWS if check.window_threshold is None else (check.window_tokens,)
    found = []
    for every, window in itertools.product(_SAMPLE_RATES, lengths):
        means = _pooled(prompt.sample_means(check.layer, every, window) for prompt in harmless)
        for bound in _rounded(_quantiles(means, _SAMPLE_QUANTILES)):
            sample = {"window_tokens": window, "sample_every": every, "sample_threshold": bound}
            found.append(check.model_copy(update=sample))
    return found


def _pooled(arrays: Iterable[npt.NDArray[np.floating]]) -> npt.NDArray[np.float64]:
    """All finite values."""
    values: npt.NDArray[np.float64] = np.concatenate([np.empty(0), *arrays])
    return np.extract(np.isfinite(values), values)


def _quantiles(values: npt.NDArray[np.float64], shares: Sequence[float]) -> list[float]:
    return np.quantile(values, shares).tolist() if values.size else []


def _rounded(wanted: Iterable[float]) -> list[float]:
    """The values rounded to powers of _STEP, ascending, as far as a profile may hold them."""
    powers = {round(math.log(value, _STEP)) for value in wanted if value > 0.0}
    return [value for power in sorted(powers) if (value := _STEP**power) <= MAX_THRESHOLD]


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
    """A candidate's verdict at a `stage`: `screen`, `screen again` on what refuted another one, or `confirm`."""

    candidate: Candidate
    stage: str
    verdict: Verdict

    @property
    def generation(self) -> int:
        """The highest generation of a donor that a prompt was served with."""
        return max((each.line.generation for each in self.verdict.comparisons), default=0)


@dataclass(slots=True)
class Found:
    """The `winner` and its confirmed `comparisons`, if any; otherwise the `problem`, unless all candidates failed.
    `tried` in order; `deviations` of the screening prompts; `refuted`: where candidates were not confirmed."""

    winner: Candidate | None = None
    comparisons: tuple[Comparison, ...] = ()
    problem: str | None = None
    tried: list[Tried] = field(default_factory=list)
    deviations: list[PromptDeviations] = field(default_factory=list)
    refuted: list[Refuted] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Refuted:
    """The prompts on which a candidate was not confirmed, and the `families` at which it was not. New prompts confirm
    the next one, so these can choose it; `known` holds what they have said."""

    trials: Trials
    rule: Rule
    families: tuple[str, ...]
    known: dict[Candidate, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Search:
    """Tries candidates by the answers of an engine; deviations under Transformers only nominate them.

    `screening` prompts choose, by the rule `screen`, and so do those on which an earlier candidate was not confirmed;
    `fresh(n, generations)` gives new prompts for the n-th confirmation, with donors of so many generations, and its
    rule. `written` writes a candidate's profile where an
    engine reads it. At most `max_tries` candidates are screened. With the check that is confirmed up to `sample_tries`
    samples are tried, of those that hold on the screening prompts, and then `generations`, ascending. No check lies
    below `lowest_check`. What leaves text unchecked is tried where the model knows all families of `evidence`.
    """

    num_layers: int
    kinds: Mapping[str, str]
    screening: Trials
    screen: Rule
    fresh: Callable[[int, int], tuple[Trials, Rule]]
    written: Callable[[Candidate], Path]
    max_tries: int
    sample_tries: int
    generations: Sequence[int]
    tell: Callable[[str], None]
    lowest_check: int = 1
    evidence: Sequence[str] = ()

    def run(self) -> Found:
        """Tries the candidates by computed share until one is confirmed. Raises SemBlendError."""
        found = Found()
        first = self.screen.looks[0]
        families = self.screening.known(self.kinds, first, self.tell)
        found.problem = problem_of(families, self.kinds)
        if found.problem is not None:
            return found
        found.deviations = [prompt for name in families for prompt in self.screening.deviations(name, first)]
        ordered = self._candidates(found.deviations)
        if not self._justifies(families):
            self.tell("only dense checks are tried: these families and this margin justify no unchecked text")
            ordered = [each for each in ordered if not leaves_unchecked(each.policy, each.check)]
        # At each layer the check that computes most comes first: what it lets pass, every other one does.
        strictest = {each.full_layers: each for each in ordered if each.check is not None}

        def holds(candidate: Candidate) -> bool:
            before = candidate if candidate.check is None else strictest[candidate.full_layers]
            return all(
                self._is_screened(found, each, families) and self._withstands(found, each, families)
                for each in (before, candidate)
            )

        for index, candidate in enumerate(ordered):
            if not holds(candidate):
                continue
            for rival in (*self._deeper(candidate, ordered[index + 1 :], holds), candidate):
                if holds(rival) and self._is_confirmed(found, rival, families):
                    return self._extended(found, families)
        return found

    def _extended(self, found: Found, families: list[str]) -> Found:
        """The winner behind a sample, and building on its own KV as often, as is shown to hold."""
        assert found.winner is not None
        samples = itertools.islice(self._sampled(found, found.winner, families), self.sample_tries)
        any(self._is_confirmed(found, each, families) for each in samples)
        winner = found.winner
        if winner.check is not None:
            grown = (replace(winner, generations=each) for each in self.generations)
            all(self._is_confirmed(found, each, families) for each in grown)
        return found

    def _deeper(
        self, candidate: Candidate, others: Sequence[Candidate], holds: Callable[[Candidate], bool]
    ) -> list[Candidate]:
        """The first check that holds at each deeper layer, among those that compute about the same; deepest first."""
        near = [each for each in others if each.computed_share <= _ABOUT_THE_SAME * candidate.computed_share]
        by_layer: dict[int, list[Candidate]] = {}
        for each in near:
            if each.check is not None and each.full_layers > candidate.full_layers:
                by_layer.setdefault(each.full_layers, []).append(each)
        firsts = (next(filter(holds, by_layer[layer]), None) for layer in sorted(by_layer, reverse=True))
        return [each for each in firsts if each is not None]

    def _is_confirmed(self, found: Found, candidate: Candidate, families: list[str]) -> bool:
        """Whether the candidate holds on new prompts; it is the winner then. None is tried twice."""
        if any(each.stage == "confirm" and each.candidate == candidate for each in found.tried):
            return False
        number = sum(each.stage == "confirm" for each in found.tried)
        trials, rule = self.fresh(number, candidate.generations)
        ordered = _most_doubtful_first(found, candidate, families)
        verdict = trials.judge(self.written(candidate), ordered, rule, f"confirm {candidate.name}")
        if not self._told(found, candidate, "confirm", verdict, families):
            lost = tuple(name for name in (verdict.inferior, *verdict.undecided) if name is not None)
            found.refuted.append(Refuted(trials, replace(rule, confidence=self.screen.confidence), lost))
            return False
        if found.tried[-1].generation < candidate.generations:
            self.tell(f"no prompt was served from a donor of generation {candidate.generations}, so it is not allowed")
            return False
        found.winner = candidate
        # Those with donors of a later generation are told among what was tried.
        if not candidate.generations:
            found.comparisons = verdict.comparisons
        return True

    def _sampled(self, found: Found, candidate: Candidate, families: list[str]) -> Iterator[Candidate]:
        """The candidate behind each sample with which it holds on the screening prompts, the cheapest first. A sample
        lets pass what the check behind it would not see, so it is tried where the check alone is confirmed."""
        if candidate.check is None or not self._justifies(families):
            return
        harmless = [prompt for prompt in found.deviations if not self._is_trap(prompt.family)]
        sampled = [
            replace(candidate, check=check, computed_share=share)
            for check in sampled_checks(candidate.check, harmless)
            if (share := computed_share(check, candidate.head_tokens, harmless, self.num_layers))
            < candidate.computed_share
        ]
        sampled.sort(key=lambda each: each.computed_share)
        yield from (each for each in sampled if self._is_screened(found, each, families))

    def _is_screened(self, found: Found, candidate: Candidate, families: list[str]) -> bool:
        """Whether the candidate holds on the screening prompts; each is served once, and False beyond `max_tries`."""
        screened = [each for each in found.tried if each.stage == "screen"]
        for each in screened:
            if each.candidate == candidate:
                return each.verdict.holds
        if len(screened) == self.max_tries:
            return False
        verdict = self.screening.judge(self.written(candidate), families, self.screen, f"screen {candidate.name}")
        return self._told(found, candidate, "screen", verdict, families)

    def _withstands(self, found: Found, candidate: Candidate, families: list[str]) -> bool:
        """Whether the candidate is shown to hold at the families and on the prompts where others were not confirmed."""
        for refuted in found.refuted:
            if candidate not in refuted.known:
                title = f"screen again {candidate.name}"
                verdict = refuted.trials.judge(self.written(candidate), refuted.families, refuted.rule, title)
                refuted.known[candidate] = self._told(found, candidate, "screen again", verdict, families)
            if not refuted.known[candidate]:
                return False
        return True

    def _justifies(self, families: Collection[str]) -> bool:
        """Whether a confirmation on these families is evidence for terms that leave text unchecked."""
        return not self.evidence or (self.screen.margin <= EVIDENCE_MARGIN and set(self.evidence) <= set(families))

    def _candidates(self, deviations: Sequence[PromptDeviations]) -> list[Candidate]:
        traps = [prompt for prompt in deviations if self._is_trap(prompt.family)]
        harmless = [prompt for prompt in deviations if not self._is_trap(prompt.family)]
        return candidates(harmless, traps, self.num_layers, self.lowest_check)

    def _is_trap(self, family: str) -> bool:
        return self.kinds[family] == Kind.TRAP.value

    def _told(self, found: Found, candidate: Candidate, stage: str, verdict: Verdict, families: list[str]) -> bool:
        """Records and tells a verdict; True when it holds. Otherwise the next candidate is likely to fail at the same
        families, which come first from then on."""
        families.sort(key=lambda name: name not in (verdict.inferior, *verdict.undecided))
        found.tried.append(Tried(candidate, stage, verdict))
        share = f"computes {candidate.computed_share:.1%} of what harmless plans offer"
        self.tell(f"{stage} {candidate.name}, {share}: {verdict.outcome()}")
        return verdict.holds


def _most_doubtful_first(found: Found, candidate: Candidate, families: Sequence[str]) -> list[str]:
    """The families by how many layers computed in full were not enough for another candidate there, and then by what
    this one has lost when it was screened: where one stays undecided, the others need not be served."""
    stopped, differences = dict[str, int](), dict[str, float]()
    for each in found.tried:
        for name in (each.verdict.inferior, *each.verdict.undecided):
            if name is not None:
                stopped[name] = max(stopped.get(name, 0), each.candidate.full_layers)
        if each.candidate == candidate:
            compared = each.verdict.comparisons
            differences |= {own.line.family: own.likelihood.difference for own in compared}
    return sorted(families, key=lambda name: (-stopped.get(name, 0), differences.get(name, 0.0)))


def problem_of(families: Sequence[str], kinds: Mapping[str, str]) -> str | None:
    """Why these families, which the model answers cold, cannot show anything; None when they can."""
    are_traps = [kinds[name] == Kind.TRAP.value for name in families]
    if not any(are_traps):
        return (
            "no trap family is among those whose answers the model knows cold, so that nothing shows whether reuse "
            "goes wrong where a text means something else"
        )
    return "no harmless family is among those whose answers the model knows cold" if all(are_traps) else None
