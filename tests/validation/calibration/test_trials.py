"""The planter: whose plants it takes, and that a calibration serves a candidate those that it misses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from semblend_trt.reuse_profile import ReuseProfile
from validation.calibration.deviations import DeviationCollector
from validation.calibration.trials import PLANTED, TRIES, Planter, Trials, write_plants
from validation.cases import Tokeniser
from validation.families.catalog import FamilyRequest
from validation.measurement import ServingSettings
from validation.models import PROFILE_NAME, shipped_model

if TYPE_CHECKING:
    from pathlib import Path

    from validation.embedded_engine import EmbeddedEngines

MIN_SPAN = 48
BLIND = {"threshold": 1.0, "max_span_share": 1.0, "window_threshold": None}


@pytest.fixture(scope="module")
def collector(shipped: EmbeddedEngines) -> DeviationCollector:
    return DeviationCollector(shipped.runner.model, shipped.facts, MIN_SPAN)


@pytest.fixture(scope="module")
def profile() -> ReuseProfile:
    return ReuseProfile.read(shipped_model() / PROFILE_NAME)


def with_check(profile: ReuseProfile, **fields: object) -> ReuseProfile:
    assert profile.check is not None
    return profile.model_copy(update={"check": profile.check.model_copy(update=fields)})


def test_the_planter_takes_those_of_which_most_is_kept(
    shipped: EmbeddedEngines, collector: DeviationCollector, profile: ReuseProfile
) -> None:
    plants = write_plants(shipped, FamilyRequest(seed=3), ["header_trap"], 8)
    planter = Planter(collector, Tokeniser(shipped, 8).tokenise)
    half = with_check(profile, threshold=0.8, window_threshold=None)
    chosen = planter.hardest(plants, half, 8)
    missed = [planter.missed(plant, half) for plant in chosen]
    assert missed == sorted(missed, reverse=True)
    assert missed[0] > 0
    assert chosen[:3] == planter.hardest(plants, half, 3)
    [prompt] = planter.deviations_of(chosen[0])
    assert half.terms is not None
    assert half.check is not None
    kept = prompt.kept(half.terms.check, half.head_tokens)
    assert missed[0] == pytest.approx(prompt.values[half.check.layer :, kept].astype(np.float64).sum())


def test_what_a_policy_computes_whole_is_not_missed(
    shipped: EmbeddedEngines, collector: DeviationCollector, profile: ReuseProfile
) -> None:
    [plant] = write_plants(shipped, FamilyRequest(seed=4), ["header_trap"], 1)
    planter = Planter(collector, Tokeniser(shipped, 8).tokenise)
    assert planter.missed(plant, with_check(profile, threshold=0.0)) == 0.0
    assert planter.missed(plant, with_check(profile, **BLIND)) > 0.0
    exact = profile.model_copy(update={"policy": "exact", "check": None, "head_tokens": 0})
    assert planter.missed(plant, exact) == 0.0


def test_a_candidate_is_served_the_plants_that_it_misses(
    shipped: EmbeddedEngines, collector: DeviationCollector, profile: ReuseProfile, tmp_path: Path
) -> None:
    plants = write_plants(shipped, FamilyRequest(seed=5), [PLANTED], 2 * TRIES + 1)
    trials = Trials(
        shipped, plants, ServingSettings(str(shipped_model()), max_tokens=8, min_span=MIN_SPAN), 5, collector
    )
    assert trials.known([PLANTED], lambda _: None) == [PLANTED]
    assert len(trials.deviations(PLANTED)) == len(plants)
    path = tmp_path / "profile.json"
    with_check(profile, layer=1, **BLIND).write(path)
    verdict = trials.judge(path, [PLANTED], strict=True)
    [line] = verdict.lines
    assert (line.samples, verdict.holds) == (3, False)
    assert line.follows_donor is not None
    assert line.follows_donor > 0.5
