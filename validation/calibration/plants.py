"""Plants: prompts that give a victim's text another meaning, and those of them that a policy reuses most of.

The planter is a white box: it has the model and its reuse profile, and reads of every plant what the check would. What
is nearer to the victim's own KV changes no answer, so it wants what is kept and yet deviates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from validation.models import full_layers_of
from validation.quality.family_cases import shortest_prompts, write_cases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from semblend_trt.reuse_profile import ReuseProfile
    from validation.calibration.deviations import DeviationCollector, PromptDeviations
    from validation.cases import Case
    from validation.engines import ServedModel
    from validation.quality.family_cases import FamilyRequest
    from validation.tokenised import TokenisedCase

# The family that is written by a planter: of so many plants one is served, the one that a policy misses most of.
PLANTED = "planted"
TRIES = 16


def write_plants(model: ServedModel, asked: FamilyRequest, names: Iterable[str], plants: int) -> list[Case]:
    """So many plants of each of the families, as short as can be, so that all that is reused is planted."""
    short = shortest_prompts(model, asked.form)
    return write_cases(model, replace(asked, names=tuple(names), groups=plants, questions=1, tokens=short))


class Planter:
    """Searches one set of plants, whose ids differ. `collector` reads what a check would see of them."""

    def __init__(self, collector: DeviationCollector, tokens_of: Callable[[Case], TokenisedCase]) -> None:
        self._collector, self._tokens_of = collector, tokens_of
        self._deviations: dict[str, list[PromptDeviations]] = {}

    def hardest(self, plants: Sequence[Case], profile: ReuseProfile, count: int) -> list[Case]:
        """The `count` plants of which the profile's policy misses most."""
        return sorted(plants, key=lambda plant: -self.missed(plant, profile))[:count]

    def missed(self, plant: Case, profile: ReuseProfile) -> float:
        """The deviations of all tokens that the policy keeps, summed up over the layers that it does not compute."""
        terms, found = profile.terms, self.deviations_of(plant)
        if terms is None or not found:
            return 0.0
        [prompt] = found
        kept = prompt.kept(terms.check, terms.head_tokens)
        return float(np.nansum(prompt.values[full_layers_of(profile) :, kept], dtype=np.float64))

    def deviations_of(self, plant: Case) -> list[PromptDeviations]:
        """Its deviations; empty where nothing is found to check."""
        if plant.id not in self._deviations:
            self._deviations[plant.id] = self._collector.collect([plant], self._tokens_of)
        return self._deviations[plant.id]
