"""Trials: families of prompts that are served under a candidate, and cold, until each family is decided.

Of the family `planted` a candidate is served the plants that its check misses most. The planter has the model and its
reuse profile, and computes what the check would see. It wants tokens that are kept and yet deviate: KV close to the
victim's own changes no answer.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.errors import SemBlendError
from semblend_trt.reuse_profile import ReuseProfile
from validation.arms import COLD, COLD_OTHERWISE_ARM, VERIFIED, ArmChoices, arms_of
from validation.cases import groups
from validation.families.catalog import shortest_prompts, write_cases
from validation.measurement import BatchServer
from validation.metrics import evidence
from validation.models import full_layers_of
from validation.output import progress
from validation.samples import is_known, line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from validation.arms import Arm
    from validation.calibration.deviations import DeviationCollector, PromptDeviations
    from validation.cases import Case, TokenisedCase
    from validation.engines import Engines, ServedModel
    from validation.families.catalog import FamilyRequest
    from validation.measurement import OnStep, ServingSettings
    from validation.metrics import Evidence
    from validation.output import Advance
    from validation.samples import Line, Sample

# The planter's family, and the plants that one is chosen from.
PLANTED = "planted"
TRIES = 8
# Why one prompt is not served wholly from donors. Any other reason is the engine's, which then serves all as stock.
_OF_ONE_PROMPT = {
    *("lookup_timeout", "internal_error", "invalid_tokens", "short_prompt", "prefix_covers_prompt", "no_donor_match"),
    *("donor_unavailable", "donor_on_disk", "chunk_edge", "low_reuse", "not_exact", "not_honoured", "forward_failed"),
    *("target_blocks", "load_failed", "deviation", "resumed_with_output", "lookup_bound"),
}


def write_plants(model: ServedModel, asked: FamilyRequest, names: Iterable[str], plants: int) -> list[Case]:
    """Return `plants` prompts of each of the families, as short as possible, so that all that is reused is planted."""
    short = shortest_prompts(model, asked.form)
    return write_cases(model, replace(asked, names=tuple(names), groups=plants, questions=1, tokens=short))


class Planter:
    """Ranks plants by what a policy misses; their ids must differ."""

    def __init__(self, collector: DeviationCollector, tokens_of: Callable[[Case], TokenisedCase]) -> None:
        self._collector, self._tokens_of = collector, tokens_of
        self._deviations: dict[str, PromptDeviations | None] = {}

    def hardest(self, plants: Sequence[Case], profile: ReuseProfile, count: int) -> list[Case]:
        """Return the `count` plants that the profile's policy misses most."""
        missed = self.missed(plants, profile)
        order = sorted(range(len(plants)), key=lambda index: -missed[index])
        return [plants[index] for index in order[:count]]

    def missed(self, plants: Sequence[Case], profile: ReuseProfile) -> list[float]:
        """Return for each plant the deviations of all kept tokens, summed over layers that the policy leaves out."""
        terms = profile.terms
        if terms is None:
            return [0.0] * len(plants)
        above, sums = slice(full_layers_of(profile), None), list[float]()
        for found in self.deviations_of(plants):
            kept = () if found is None else found.values[above, found.kept(terms.check, terms.head_tokens)]
            sums.append(float(np.nansum(kept, dtype=np.float64)))
        return sums

    def deviations_of(self, plants: Sequence[Case]) -> list[PromptDeviations | None]:
        """Return the deviations of each, None where there is nothing to check."""
        unknown = [plant for plant in plants if plant.id not in self._deviations]
        found = self._collector.collect(unknown, self._tokens_of)
        self._deviations |= {plant.id: each for plant, each in zip(unknown, found, strict=True)}
        return [self._deviations[plant.id] for plant in plants]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One family against the mean of two cold runs, which differ by `noise`. Exact match: None where many are right."""

    line: Line
    likelihood: Evidence
    exact_match: Evidence | None
    noise: Evidence

    @property
    def holds(self) -> bool:
        """True if the likelihood shows that at most the margin is lost. Near ties, also cold's, hardly move it."""
        return self.likelihood.holds and not self.fails

    @property
    def fails(self) -> bool:
        """True if it is shown that more than the margin is lost."""
        return self.likelihood.fails or (self.exact_match is not None and self.exact_match.fails)

    def sentence(self) -> str:
        """Return the likelihood's bounds, and what cold's own runs differ by, for a report."""
        return f"likelihood {self.likelihood.sentence()}; two cold runs {self.noise.difference:+.4f}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`inferior`: the family at which the candidate failed. `undecided`: the families that the budget left open."""

    comparisons: tuple[Comparison, ...]
    inferior: str | None = None
    undecided: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.inferior is None and not self.undecided

    def outcome(self) -> str:
        """Return in words whether the candidate holds, and the comparison that says least for it."""
        if not self.comparisons:
            return "nothing was compared"
        of_interest = [each for each in self.comparisons if each.line.family in (self.inferior, *self.undecided)]
        lowest = min(of_interest or self.comparisons, key=lambda each: each.likelihood.lower)
        undecided = f"undecided at {', '.join(self.undecided)}" if self.undecided else "holds"
        told = undecided if self.inferior is None else f"fails at {self.inferior}"
        return f"{told}; {lowest.line.family}: {lowest.sentence()}"


@dataclass(frozen=True, slots=True)
class Rule:
    """How long prompts are added: a family's answers are compared after each number of groups in `looks`, ascending.

    With `proof` a family passes if its loss is shown to be within `margin`. It is given up if it lost more in a quarter
    of its prompts. Without `proof` it passes if it has lost no more, as few prompts show little."""

    looks: tuple[int, ...]
    margin: float
    confidence: float
    proof: bool

    def passes(self, comparison: Comparison, *, is_all: bool) -> bool:
        """Return whether a family passes. With `is_all` it has no more prompts, so that no proof can be asked for."""
        return comparison.holds if self.proof and not is_all else comparison.likelihood.difference >= -self.margin

    def gives_up(self, comparison: Comparison, look: int) -> bool:
        """Return whether a family stays undecided after the `look`, without more prompts: that accepts nothing."""
        return self.proof and 4 * look >= self.looks[-1] and comparison.likelihood.difference < -self.margin


@dataclass(frozen=True, slots=True)
class _Trial:
    profile: ReuseProfile
    arm: Arm
    samples: dict[str, list[Sample]]
    found: dict[str, Comparison]


class Trials:
    """Prompts of some families, written as they are needed, and cold's answers to them, which are served once.

    `write(family, first, groups)` writes groups from `first` on. If it gives fewer, there are no more; the family then
    passes if it has lost at most the margin. If the engine starts slowly, all families are judged at once."""

    def __init__(
        self,
        engines: Engines,
        write: Callable[[str, int, int], Sequence[Case]],
        settings: ServingSettings,
        collector: DeviationCollector,
    ) -> None:
        self._engines, self._write, self._collector = engines, write, collector
        self._server = BatchServer(engines, [], settings, likelihoods=True)
        self._planter = Planter(collector, self._server.tokens_of)
        self._groups: dict[str, list[list[Case]]] = {}
        self._ended: set[str] = set()
        self._cold: dict[str, Sample] = {}
        self._otherwise: dict[str, Sample] = {}

    def deviations(self, family: str, count: int) -> list[PromptDeviations]:
        """Return the deviations of the first prompt of each of the first `count` groups, and of every plant."""
        cases = self._cases(family, 0, count)
        if family == PLANTED:
            found = self._planter.deviations_of(cases)
        else:
            found = self._collector.collect(cases, self._server.tokens_of)
        return [each for each in found if each is not None]

    def known(self, families: Iterable[str], count: int, tell: Callable[[str], None]) -> list[str]:
        """Return the families that the model knows cold; the others show nothing."""
        asked = {family: self._cases(family, 0, count) for family in families}
        known = []
        for family, cases in asked.items():
            cold = self._server.cold(cases)
            line = line_of(family, COLD, list(cold.values()), cold, is_bounded=False)
            knows = is_known(line.exact_match, line.loss, len(self._engines.tokenizer))
            score = "" if line.exact_match is None else f", cold exact match {line.exact_match:.3f}"
            tell(f"{family}: {line.samples} prompts{score}" + ("" if knows else "; the family shows nothing"))
            known += [family] if knows else []
        return known

    def judge(self, path: Path, families: Sequence[str], rule: Rule, title: str) -> Verdict:
        """Serve the families under policy verified with the profile of `path` until all pass, one fails, or the looks
        are over. Raises SemBlendError if the engine refuses the profile."""
        profile = ReuseProfile.read(path)
        layers = full_layers_of(profile)
        choices = ArmChoices(self._engines.facts.num_layers, boundary=1, profile=path, profile_layers=layers)
        [arm] = arms_of([VERIFIED], choices)
        # The trials make the evidence that the profile needs without it.
        arm = replace(arm, variables={**(arm.variables or {}), "SEMBLEND_PROFILE_TRIAL": "1"})
        trial = _Trial(profile, arm, {family: [] for family in families}, {})
        one_by_one = rule.proof and not self._engines.starts_slowly
        inferior, undecided = None, list[str]()
        with self._server.keeping(arm), progress(f"{title}: families done", len(families)) as advance:
            for names in [[name] for name in families] if one_by_one else [families]:
                inferior, undecided = self._decided(trial, names, rule, advance)
                if inferior is not None or (one_by_one and undecided):
                    break
        return Verdict(tuple(trial.found.values()), inferior, tuple(undecided))

    def _decided(
        self, trial: _Trial, families: Sequence[str], rule: Rule, advance: Advance
    ) -> tuple[str | None, list[str]]:
        """Adds prompts of the families; returns the one that fails, and those that the looks leave open."""
        waiting, undecided = list(families), list[str]()
        on_case = functools.partial(advance, steps=0)
        for look in itertools.pairwise((0, *rule.looks)):
            asked = waiting
            for name, served in self._served_in_turn(trial, asked, look, on_case):
                trial.samples[name] += served
                trial.found[name] = self._compared(name, trial.samples[name], rule)
                if trial.found[name].fails:
                    return name, []
            waiting = [name for name in waiting if not rule.passes(trial.found[name], is_all=name in self._ended)]
            left = {name for name in waiting if name in self._ended or rule.gives_up(trial.found[name], look[1])}
            undecided += [name for name in waiting if name in left]
            waiting = [name for name in waiting if name not in left]
            advance(", ".join(waiting), len(asked) - len(waiting))
            if not waiting:
                break
        return None, [*undecided, *waiting]

    def _served_in_turn(
        self, trial: _Trial, families: Sequence[str], look: tuple[int, int], on_step: OnStep
    ) -> Iterator[tuple[str, list[Sample]]]:
        """Yield the families' samples of the groups from `look[0]` up to `look[1]`. An engine that starts slowly serves
        all families at once. Another serves each when it is asked for, and cold several at once. Plants are chosen
        alone: that takes long, and is for nothing if an earlier family fails."""
        if self._engines.starts_slowly:
            rounds = [[list(families)]]
        else:
            rounds = [[[name] for name in names] for _, names in itertools.groupby(families, key=PLANTED.__eq__)]
        for together in rounds:
            chosen = {name: self._chosen(name, *look, trial.profile) for name in itertools.chain(*together)}
            # Both cold runs of the cases that have none yet.
            missing = [each for each in itertools.chain(*chosen.values()) if each.id not in self._otherwise]
            if missing:
                self._cold |= self._server.cold(missing)
                served = self._server.samples(COLD_OTHERWISE_ARM, missing)
                self._otherwise |= {sample.case_id: sample for sample in served}
            for names in together:
                # A user's own cases may have ended.
                cases = [case for name in names for case in chosen[name]]
                served = self._server.samples(trial.arm, cases, on_step) if cases else []
                _check_candidate_was_tried(served)
                yield from ((name, [sample for sample in served if sample.workload == name]) for name in names)

    def _compared(self, family: str, samples: Sequence[Sample], rule: Rule) -> Comparison:
        cold = {sample.case_id: self._cold[sample.case_id] for sample in samples}
        clusters = [sample.group for sample in samples]

        def compared(score: Callable[[Sample], float | None], *, is_noise: bool = False) -> Evidence | None:
            differences = []
            for sample in samples:
                first, again = (score(each) for each in (cold[sample.case_id], self._otherwise[sample.case_id]))
                ours = score(sample)
                if first is None or again is None or ours is None:
                    return None
                differences.append(again - first if is_noise else ours - (first + again) / 2)
            return evidence(differences, clusters, rule.margin, rule.confidence)

        likelihood = compared(lambda sample: sample.likelihood)
        noise = compared(lambda sample: sample.likelihood, is_noise=True)
        assert likelihood is not None
        assert noise is not None
        line = line_of(family, VERIFIED, samples, cold, is_bounded=False)  # the evidence bounds it
        return Comparison(line, likelihood, compared(lambda sample: sample.exact_match), noise)

    def _chosen(self, family: str, before: int, groups_now: int, profile: ReuseProfile) -> list[Case]:
        """Return the cases of the groups from `before` up to `groups_now`; of the plants there the hardest."""
        if family != PLANTED:
            return self._cases(family, before, groups_now)
        plants = self._cases(family, before * TRIES, groups_now * TRIES)
        return self._planter.hardest(plants, profile, -(-len(plants) // TRIES))

    def _cases(self, family: str, first: int, end: int) -> list[Case]:
        written = self._groups.setdefault(family, [])
        if len(written) < end and family not in self._ended:
            more = groups(self._write(family, len(written), end - len(written)))
            self._server.add([*itertools.chain(*more)])
            written += more
            if len(written) < end:
                self._ended.add(family)
        return [*itertools.chain(*written[first:end])]


def _check_candidate_was_tried(samples: Iterable[Sample]) -> None:
    for sample in samples:
        if "profile" in (sample.reason or ""):
            raise SemBlendError(
                f"Case {sample.case_id}: the engine does not take the profile that is tried ({sample.reason}); what "
                "differs is in its log."
            )
        if sample.reason is not None and sample.reason not in _OF_ONE_PROMPT:
            raise SemBlendError(
                f"Case {sample.case_id}: the engine executes no plans ({sample.reason}), so that nothing can be "
                "calibrated in it; its log says why."
            )
