"""Plants are ranked by what a check misses, and donors grow through generations."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.evidence.seen_documents import executed_plans
from engine_wrapper.embedded.request import SamplingParams
from semblend_trt.reuse_profile import ReuseProfile
from validation.calibration.deviations import DeviationCollector
from validation.calibration.planter import Planter, write_plants
from validation.cases import Tokeniser
from validation.embedded_engine import open_llm
from validation.families.catalog import FamilyRequest, write_cases
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


@pytest.mark.parametrize(
    ("family", "reached"), [("reordered", [0, 1, 2, 3]), ("header_trap", [0, 1, 2, 3]), ("prose", [0, 1])]
)
def test_donors_grow_through_as_many_generations_as_there_are_documents_for(
    shipped, profile, tmp_path, family, reached
):
    asked = FamilyRequest((family,), groups=1, questions=1, tokens=1_536, generations=3)
    [case], path = write_cases(shipped, asked), tmp_path / PROFILE_NAME
    [ungrown] = write_cases(shipped, replace(asked, generations=0))
    assert (case.prompt, case.donors[-1:]) == (ungrown.prompt, ungrown.donors)
    profile.model_copy(update={"generations": 3}).write(path)
    with open_llm(shipped_model(), shipped.runner.share(), {"PROFILE": str(path)}, pool_tokens=8_192) as llm:
        plans, used = executed_plans(llm), []
        for text in (*case.donors, case.prompt):
            tokens = [*shipped.tokenizer.encode(text)]
            [output] = llm.generate([tokens], SamplingParams(max_tokens=1))
            llm.settle()
            plan = plans.pop(output.request_id, None)
            used.append(None if plan is None else max(span.generation for span in plan.spans))
    assert used == [None, *reached]
