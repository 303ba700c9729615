"""Serves families under a candidate, and cold, until one family is inferior.

Of the family `planted` a candidate is served the plants that its check misses most. The planter has the model and its
reuse profile, and computes what the check would see. It wants tokens that are kept and yet deviate: KV close to the
victim's own changes no answer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.errors import SemBlendError
from semblend_trt.reuse_profile import ReuseProfile
from validation.arms import COLD, VERIFIED, ArmChoices, arms_of
from validation.families.catalog import shortest_prompts, write_cases
from validation.measurement import BatchServer
from validation.metrics import MARGIN
from validation.models import full_layers_of
from validation.samples import MIN_COLD_SCORE, line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

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
