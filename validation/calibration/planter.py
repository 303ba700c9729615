"""Planter: the plants that a policy misses most, as another inside a tenant could serve them (arXiv 2607.19957).

It has the model and its reuse profile, and computes what the check would see. It wants tokens that are kept and yet
deviate: KV close to the victim's own changes no answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from semblend_trt.reuse_profile import ReuseProfile
from validation.calibration.deviations import DeviationCollector, PromptDeviations
from validation.cases import Case, TokenisedCase
from validation.engines import ServedModel
from validation.families.catalog import FamilyRequest, shortest_prompts, write_cases
from validation.models import full_layers_of

# The planter's family, and the plants that one is chosen from.
PLANTED = "planted"
TRIES = 8


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
            sums.append(0.0)
            if found is not None:
                kept, _ = found.kept_and_compared(terms.check, terms.head_tokens)
                sums[-1] = float(np.nansum(found.values[above, kept], dtype=np.float64))
        return sums

    def deviations_of(self, plants: Sequence[Case]) -> list[PromptDeviations | None]:
        """Return the deviations of each, None where there is nothing to check."""
        unknown = [plant for plant in plants if plant.id not in self._deviations]
        found = self._collector.collect(unknown, self._tokens_of)
        self._deviations |= {plant.id: each for plant, each in zip(unknown, found, strict=True)}
        return [self._deviations[plant.id] for plant in plants]
