"""Observations hold what each share does to the answers, along cold's own."""

import pytest

from semblend_trt.errors import SemBlendError
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from validation.calibration.prepared import Observer, check_profile_was_tried, identity_of
from validation.families.catalog import FamilyRequest, write_cases
from validation.measurement import ServingSettings
from validation.models import shipped_model

SETTINGS = ServingSettings(str(shipped_model()), max_tokens=8, batch=8)


@pytest.fixture(scope="module")
def cases(shipped):
    names = ("header_trap", "repeat")
    return write_cases(shipped, FamilyRequest(names, groups=3, questions=1, tokens=512, seed=5))


def test_each_share_is_observed_of_prompts_that_move_text(shipped, cases):
    check = ProfileCheck(layer=2, threshold=1.0, sample_every=16, sample_threshold=1.0)
    profile = ReuseProfile.made_for(*identity_of(shipped, SETTINGS), policy="verified", check=check)
    observed = Observer(shipped, cases, SETTINGS).observations(profile, cases, (0.0, 0.9), "t")
    # What repeats a donor is exact: no check compares it.
    assert [each.family for each in observed] == ["header_trap"] * 3
    assert len({each.group for each in observed}) == 3
    for each in observed:
        unchecked, most = each.kl
        assert unchecked > 0.1
        assert most < 0.5 * unchecked
        assert 0.0 < each.deviation < 1.0


def test_cold_runs_differ_by_rounding(shipped, cases):
    found = Observer(shipped, cases, SETTINGS).rounding(cases[:2])
    assert len(found) == 6
    # The other type rounds most.
    assert max(found[:4]) < min(found[4:]) < max(found) < 1e-5


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("profile_mismatch", "does not take the profile"),
        ("check_needs_wrapper", "executes no plans"),
        ("self_check", "executes no plans"),
        ("attention_backend", "executes no plans"),
    ],
)
def test_an_engine_that_cannot_serve_a_candidate_ends_the_trial(make_sample, reason, told):
    with pytest.raises(SemBlendError, match=told):
        check_profile_was_tried([make_sample(), make_sample(reason=reason)])
    check_profile_was_tried([make_sample(reason=each) for each in (None, "deviation", "risk_above_bound")])
