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
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from validation.calibration.deviations import PromptDeviations
    from validation.calibration.trials import Comparison, Rule, Trials, Verdict

# Where half of a span deviates, its meaning has changed, and none of it is kept.
MAX_SPAN_SHARE = 0.5
# A plan that saves less costs more than it saves.
MIN_SAVED_SHARE = 0.1
# One token of SAMPLE_EVERY is sampled, or of half of it, in windows of both lengths. The first window of a run,
# which is compared whole, is most of a short run.
SAMPLE_EVERY = 16
_SAMPLE_WINDOWS = (WINDOW_TOKENS, WINDOW_TOKENS // 2)
# A deeper layer's check that computes at most this much more is preferred: deeper layers see more.
_ABOUT_THE_SAME = 1.1
# Thresholds are powers of it: closer ones decide alike, and other prompts of the same families nominate the same ones.
_STEP = 1.2
# Low layers hardly show that a token depends on the one before it: a check is tried with and without computed heads.
_HEADS = (0, 8)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy that a profile can hold.
    `computed_share`: of the tokens times layers that harmless plans offer, the part that it should compute."""

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
        """Return the terms in words, for figures and reports."""
        parts, check = [terms_name(self.policy, self.boundary, self.check)], self.check
        if check is not None:
            if check.window_threshold is not None:
                parts.append(f"windows {check.window_threshold:.4g}")
            if self.head_tokens:
                parts.append(f"head {self.head_tokens}")
            if check.sample_every:
                where = f"in windows of {check.window_tokens} under {check.sample_threshold:.4g}"
                parts.append(f"sample of one in {check.sample_every} {where}")
            if self.generations:
                parts.append(f"generations {self.generations}")
        return " ".join(parts)


def candidates(
    harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], num_layers: int, lowest_check: int = 1
) -> list[Candidate]:
    """Return all candidates by computed share: position_fix, every boundary, and checks at every layer from
    `lowest_check` on: every threshold of tokens, alone and with each lower one of windows, with and without heads."""
    found = [Candidate("position_fix", 0.0)]
    found += [Candidate("boundary", b / num_layers, boundary=b) for b in range(1, num_layers)]
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
                share = computed_share(check, head, harmless, num_layers)
                found.append(Candidate("verified", share, check=check, head_tokens=head))
    return sorted((each for each in found if each.computed_share < 1.0), key=lambda each: each.computed_share)


def thresholds(harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], layer: int) -> list[float]:
    """Return thresholds of tokens at `layer`, ascending: at high quantiles of harmless tokens, and the geometric mean
    of the two neighbouring means of harmless and trap spans with the largest ratio, above the harmless median."""
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


def unseen_share(check: ProfileCheck, head_tokens: int, prompts: Sequence[PromptDeviations]) -> float:
    """Return the share of kept tokens that exceed the check's threshold and that its sample did not compare."""
    rule, kept_tokens, unseen = SpanCheck(**check.model_dump()), 0, 0
    for prompt in prompts:
        kept, compared = prompt.kept_and_compared(rule, head_tokens)
        kept_tokens += int(np.count_nonzero(kept))
        unseen += int(np.count_nonzero(kept & ~compared & (prompt.values[check.layer] > check.threshold)))
    return unseen / kept_tokens if kept_tokens else 0.0


def sampled_checks(check: ProfileCheck, harmless: Sequence[PromptDeviations]) -> list[ProfileCheck]:
    """Return the check with samples of each rate and window, and bounds at high quantiles of what they find in harmless
    windows. A check that judges windows itself keeps their length."""
    lengths = _SAMPLE_WINDOWS if check.window_threshold is None else (check.window_tokens,)
    found = []
    for every, window in itertools.product((SAMPLE_EVERY, SAMPLE_EVERY // 2), lengths):
        means = (prompt.sample_means(check.layer, every, window) for prompt in harmless)
        for bound in _rounded(_quantiles(means, (0.8, 0.9, 0.97))):
            sample = {"window_tokens": window, "sample_every": every, "sample_threshold": bound}
            found.append(check.model_copy(update=sample))
    return found


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
    """Without a `winner` and a `problem` all candidates failed. `refuted`: where candidates were not confirmed."""

    winner: Candidate | None = None
    comparisons: tuple[Comparison, ...] = ()
    problem: str | None = None
    tried: list[Tried] = field(default_factory=list)
    deviations: list[PromptDeviations] = field(default_factory=list)
    refuted: list[Refuted] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Refuted:
    """Prompts and `families` where a candidate was not confirmed; they help to choose the next. `known`: verdicts."""

    trials: Trials
    rule: Rule
    families: tuple[str, ...]
    known: dict[Candidate, bool] = field(default_factory=dict)


@dataclass(slots=True)
class Search:
    """Tries candidates by the answers of an engine, once; deviations under Transformers only nominate them.

    `screening` prompts choose by the rule `screen`, and so do prompts on which an earlier candidate was not confirmed.
    `fresh(n, generations)` gives confirmation n its rule and new prompts, with donors of at most these generations.
    `written` writes a candidate's profile where an engine reads it. When a check is confirmed, up to `sample_tries` of
    its samples that hold on the screening prompts are tried, then `generations`, ascending. Terms that leave text
    unchecked are tried only if the model knows all families of `evidence`."""

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
    found: Found = field(default_factory=Found, init=False)
    # Those that the model knows cold, the most doubtful first.
    families: list[str] = field(default_factory=list, init=False)

    def run(self) -> Found:
        """Tries the candidates by computed share until one is confirmed. Raises SemBlendError."""
        found, first = self.found, self.screen.looks[0]
        self.families = self.screening.known(self.kinds, first, self.tell)
        found.problem = problem_of(self.families, self.kinds)
        if found.problem is not None:
            return found
        found.deviations = [prompt for name in self.families for prompt in self.screening.deviations(name, first)]
        traps = [prompt for prompt in found.deviations if self.kinds[prompt.family] == Kind.TRAP.value]
        ordered = candidates(self._harmless(), traps, self.num_layers, self.lowest_check)
        if not self._justifies():
            self.tell("only dense checks are tried: these families and this margin justify no unchecked text")
            ordered = [each for each in ordered if not leaves_unchecked(each.policy, each.check)]
        # At each layer the check that computes most comes first: what it lets pass, every other one does.
        strictest = {each.full_layers: each for each in ordered if each.check is not None}

        def holds(candidate: Candidate) -> bool:
            before = candidate if candidate.check is None else strictest[candidate.full_layers]
            return all(self._is_screened(each) and self._withstands(each) for each in (before, candidate))

        for index, candidate in enumerate(ordered):
            if not holds(candidate):
                continue
            # Before it the first check that holds at each deeper layer, among those that compute about as much.
            deeper: dict[int, list[Candidate]] = {}
            for each in ordered[index + 1 :]:
                is_near = each.computed_share <= _ABOUT_THE_SAME * candidate.computed_share
                if is_near and each.check is not None and each.full_layers > candidate.full_layers:
                    deeper.setdefault(each.full_layers, []).append(each)
            rivals = [next(filter(holds, deeper[layer]), None) for layer in sorted(deeper, reverse=True)]
            for rival in (*rivals, candidate):
                if rival is not None and holds(rival) and self._is_confirmed(rival):
                    self._extend()
                    return found
        return found

    def _extend(self) -> None:
        """Confirms the winner after a sample, and building on its own KV as often as is shown to hold."""
        winner = self.found.winner
        if winner is None or winner.check is None:
            return
        if self._justifies():
            # A sample lets pass what the check after it would not see, so the check alone comes first.
            sampled = list[Candidate]()
            for check in sampled_checks(winner.check, self._harmless()):
                share = computed_share(check, winner.head_tokens, self._harmless(), self.num_layers)
                if share < winner.computed_share:
                    sampled.append(replace(winner, check=check, computed_share=share))
            screened = filter(self._is_screened, sorted(sampled, key=lambda each: each.computed_share))
            for candidate in itertools.islice(screened, self.sample_tries):
                if self._is_confirmed(candidate):
                    break
        winner = self.found.winner or winner
        for generations in self.generations:
            if not self._is_confirmed(replace(winner, generations=generations)):
                break

    def _is_confirmed(self, candidate: Candidate) -> bool:
        """Whether the candidate holds on new prompts; it is the winner then. None is tried twice."""
        found = self.found
        confirmed = [each.candidate for each in found.tried if each.stage == "confirm"]
        if candidate in confirmed:
            return False
        trials, rule = self.fresh(len(confirmed), candidate.generations)
        ordered = _most_doubtful_first(found, candidate, self.families)
        verdict = trials.judge(self.written(candidate), ordered, rule, f"confirm {candidate.name}")
        if not self._told(candidate, "confirm", verdict):
            lost = tuple(name for name in (verdict.inferior, *verdict.undecided) if name is not None)
            found.refuted.append(Refuted(trials, replace(rule, confidence=self.screen.confidence), lost))
            return False
        if found.tried[-1].generation < candidate.generations:
            self.tell(f"no prompt was served from a donor of generation {candidate.generations}, so it is not allowed")
            return False
        found.winner = candidate
        # The report lists those with donors of a later generation under what was tried.
        if not candidate.generations:
            found.comparisons = verdict.comparisons
        return True

    def _is_screened(self, candidate: Candidate) -> bool:
        """Whether the candidate holds on the screening prompts; each is served once, and False beyond `max_tries`."""
        screened = {each.candidate: each.verdict for each in self.found.tried if each.stage == "screen"}
        if candidate in screened:
            return screened[candidate].holds
        if len(screened) == self.max_tries:
            return False
        title = f"screen {candidate.name}"
        verdict = self.screening.judge(self.written(candidate), self.families, self.screen, title)
        return self._told(candidate, "screen", verdict)

    def _withstands(self, candidate: Candidate) -> bool:
        """Whether the candidate is shown to hold at the families and on the prompts where others were not confirmed."""
        for refuted in self.found.refuted:
            if candidate not in refuted.known:
                title = f"screen again {candidate.name}"
                verdict = refuted.trials.judge(self.written(candidate), refuted.families, refuted.rule, title)
                refuted.known[candidate] = self._told(candidate, "screen again", verdict)
            if not refuted.known[candidate]:
                return False
        return True

    def _justifies(self) -> bool:
        """Whether a confirmation on these families is evidence for terms that leave text unchecked."""
        is_shown = self.screen.margin <= EVIDENCE_MARGIN and set(self.evidence) <= set(self.families)
        return is_shown or not self.evidence

    def _harmless(self) -> list[PromptDeviations]:
        return [prompt for prompt in self.found.deviations if self.kinds[prompt.family] != Kind.TRAP.value]

    def _told(self, candidate: Candidate, stage: str, verdict: Verdict) -> bool:
        """Record and report a verdict; True if it holds. Else failed families come first: the next may fail there."""
        self.families.sort(key=lambda name: name not in (verdict.inferior, *verdict.undecided))
        self.found.tried.append(Tried(candidate, stage, verdict))
        share = f"computes {candidate.computed_share:.1%} of what harmless plans offer"
        self.tell(f"{stage} {candidate.name}, {share}: {verdict.outcome()}")
        return verdict.holds


def _most_doubtful_first(found: Found, candidate: Candidate, families: Sequence[str]) -> list[str]:
    """Return the families by how many layers computed in full were not enough for another candidate there, and then by
    what this one lost when it was screened: where one stays undecided, the others need not be served."""
    stopped, differences = dict[str, int](), dict[str, float]()
    for each in found.tried:
        for name in (each.verdict.inferior, *each.verdict.undecided):
            if name is not None:
                stopped[name] = max(stopped.get(name, 0), each.candidate.full_layers)
        if each.candidate == candidate:
            differences |= {own.line.family: own.likelihood.difference for own in each.verdict.comparisons}
    return sorted(families, key=lambda name: (-stopped.get(name, 0), differences.get(name, 0.0)))


def problem_of(families: Sequence[str], kinds: Mapping[str, str]) -> str | None:
    """Return why these families, which the model answers cold, cannot show anything; None when they can."""
    are_traps = [kinds[name] == Kind.TRAP.value for name in families]
    if not any(are_traps):
        return (
            "no trap family is among those whose answers the model knows cold, so that nothing shows whether reuse "
            "goes wrong where a text means something else"
        )
    return "no harmless family is among those whose answers the model knows cold" if all(are_traps) else None
