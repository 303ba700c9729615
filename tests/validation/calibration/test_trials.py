"""The planter: whose plants it takes, and that a calibration serves a candidate those that it misses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from semblend_trt.reuse_profile import ReuseProfile
from validation.calibration.deviations import DeviationCollector
from validation.calibration.trials import PLANTED, TRIES, Planter, Trials, write_plants
from validation.cases import Tokeniser
from validation.embedded_engine import EmbeddedEngines
from validation.families.catalog import FamilyRequest
from validation.models import load, profile_of, shipped_model
from validation.serving import BatchSettings

if TYPE_CHECKING:
    from pathlib import Path

MIN_SPAN = 48
BLIND = {"threshold": 1.0, "max_span_share": 1.0, "window_threshold": None}


@pytest.fixture(scope="module")
def engines() -> EmbeddedEngines:
    return EmbeddedEngines(load(None, "cpu", "float32"))


@pytest.fixture(scope="module")
def collector(engines: EmbeddedEngines) -> DeviationCollector:
    return DeviationCollector(engines.runner.model, engines.facts, MIN_SPAN)


@pytest.fixture(scope="module")
def shipped() -> ReuseProfile:
    path = profile_of(None, None)
    assert path is not None
    return ReuseProfile.read(path)


def with_check(profile: ReuseProfile, **fields: object) -> ReuseProfile:
    assert profile.check is not None
    return profile.model_copy(update={"check": profile.check.model_copy(update=fields)})


def test_the_planter_takes_those_of_which_most_is_kept(
    engines: EmbeddedEngines, collector: DeviationCollector, shipped: ReuseProfile
) -> None:
    plants = write_plants(engines, FamilyRequest(seed=3), ["header_trap"], 8)
    planter = Planter(collector, Tokeniser(engines, 8).tokenise)
    half = with_check(shipped, threshold=0.8, window_threshold=None)
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
    engines: EmbeddedEngines, collector: DeviationCollector, shipped: ReuseProfile
) -> None:
    [plant] = write_plants(engines, FamilyRequest(seed=4), ["header_trap"], 1)
    planter = Planter(collector, Tokeniser(engines, 8).tokenise)
    assert planter.missed(plant, with_check(shipped, threshold=0.0)) == 0.0
    assert planter.missed(plant, with_check(shipped, **BLIND)) > 0.0
    exact = shipped.model_copy(update={"policy": "exact", "check": None, "head_tokens": 0})
    assert planter.missed(plant, exact) == 0.0


def test_a_candidate_is_served_the_plants_that_it_misses(
    engines: EmbeddedEngines, collector: DeviationCollector, shipped: ReuseProfile, tmp_path: Path
) -> None:
    plants = write_plants(engines, FamilyRequest(seed=5), [PLANTED], 2 * TRIES + 1)
    trials = Trials(engines, plants, BatchSettings(str(shipped_model()), max_tokens=8, min_span=MIN_SPAN), 5, collector)
    assert trials.known([PLANTED], lambda _: None) == [PLANTED]
    assert len(trials.deviations(PLANTED)) == len(plants)
    path = tmp_path / "profile.json"
    with_check(shipped, layer=1, **BLIND).write(path)
    verdict = trials.judge(path, [PLANTED], strict=True)
    [line] = verdict.lines
    assert (line.samples, verdict.holds) == (3, False)
    assert line.follows_donor is not None
    assert line.follows_donor > 0.5
