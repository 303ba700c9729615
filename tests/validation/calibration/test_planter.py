"""Plants are ranked by what a check misses."""

import numpy as np
import pytest

from semblend_trt.reuse_profile import ReuseProfile
from validation.calibration.deviations import DeviationCollector
from validation.calibration.planter import Planter, write_plants
from validation.cases import Tokeniser
from validation.families.catalog import FamilyRequest
from validation.models import PROFILE_NAME, shipped_model

MIN_SPAN = 48
BLIND = {"threshold": 1.0, "max_span_share": 1.0, "window_threshold": None}


@pytest.fixture(scope="module")
def collector(shipped):
    return DeviationCollector(shipped.runner.model, shipped.facts, MIN_SPAN)


@pytest.fixture(scope="module")
def profile():
    return ReuseProfile.read(shipped_model() / PROFILE_NAME)


def with_check(profile, **fields):
    return profile.model_copy(update={"check": profile.check.model_copy(update=fields)})


def test_the_planter_takes_those_of_which_most_is_kept(shipped, collector, profile):
    plants = write_plants(shipped, FamilyRequest(seed=3), ["header_trap"], 8)
    planter = Planter(collector, Tokeniser(shipped, 8).tokenise)
    half = with_check(profile, threshold=0.8, window_threshold=None)
    chosen = planter.hardest(plants, half, 8)
    missed = planter.missed(chosen, half)
    assert missed == sorted(missed, reverse=True)
    assert missed[0] > 0
    assert chosen[:3] == planter.hardest(plants, half, 3)
    [prompt] = planter.deviations_of(chosen[:1])
    kept = prompt.kept_and_compared(half.terms.check, half.head_tokens)[0]
    assert missed[0] == pytest.approx(prompt.values[half.check.layer :, kept].astype(np.float64).sum())
    # What a policy computes whole is not missed.
    exact = profile.model_copy(update={"policy": "exact", "check": None, "head_tokens": 0})
    assert planter.missed(plants[:1], with_check(profile, threshold=0.0)) == planter.missed(plants[:1], exact) == [0.0]
    assert planter.missed(plants[:1], with_check(profile, **BLIND))[0] > 0.0
