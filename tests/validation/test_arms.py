"""An arm is a name and its engine's settings."""

from pathlib import Path

import pytest

from semblend_trt.errors import ConfigurationError
from validation.arms import ALL_NAMES, ArmChoices, arms_of, names_of, names_of_run

CHOICES = ArmChoices(num_layers=8, boundary=2, profile=Path("profile.json"), profile_layers=3)


@pytest.mark.parametrize(
    ("name", "policy", "others", "full_layers"),
    [
        ("cold", None, {}, 0),
        ("exact_prefix", None, {}, 0),
        ("wrapper_without_plan", "exact", {}, 0),
        ("position_fix", "position_fix", {}, 0),
        ("boundary", "boundary", {"SEMBLEND_RECOMPUTE_BOUNDARY_LAYER": "2"}, 2),
        ("boundary_5", "boundary", {"SEMBLEND_RECOMPUTE_BOUNDARY_LAYER": "5"}, 5),
        ("epic_32", "epic", {"SEMBLEND_EPIC_TOKENS": "32"}, 0),
        ("cacheblend_5", "cacheblend", {"SEMBLEND_CACHEBLEND_SHARE": "0.05"}, 1),
        ("verified", "verified", {"SEMBLEND_PROFILE": "profile.json"}, 3),
    ],
)
def test_each_arm_sets_its_own_variables_only(name, policy, others, full_layers):
    [arm] = arms_of([name], CHOICES)
    assert arm.variables == (None if policy is None else {"SEMBLEND_POLICY": policy, **others})
    assert arm.full_layers == full_layers


def test_verified_alone_keeps_the_bound_that_is_set(monkeypatch):
    monkeypatch.setenv("SEMBLEND_MAX_KL", "0.05")
    monkeypatch.setenv("SEMBLEND_HOST_BYTES", "1")
    kept = {arm.name: arm.variables for arm in arms_of(["verified", "boundary"], CHOICES)}
    own = {"SEMBLEND_POLICY": "verified", "SEMBLEND_PROFILE": "profile.json"}
    assert kept["verified"] == own | {"SEMBLEND_MAX_KL": "0.05"}
    assert "SEMBLEND_MAX_KL" not in kept["boundary"]


def test_without_a_profile_verified_is_left_out_or_refused():
    without = ArmChoices(num_layers=8, boundary=2)
    assert "verified" in names_of_run(None, "position_fix", CHOICES, full=False)
    assert "verified" not in names_of_run(None, "position_fix", without, full=True)
    assert [full for full in (False, True) if "boundary" in names_of_run(None, "epic_8", CHOICES, full)] == [True]
    with pytest.raises(ConfigurationError, match="needs a reuse profile"):
        arms_of(["verified"], without)


def test_a_list_of_names_always_holds_both_cold_arms():
    assert names_of("epic_4, position_fix cold") == ("cold", "cold_again", "epic_4", "position_fix")
    assert names_of("all") == names_of("epic_8,all") == ALL_NAMES


@pytest.mark.parametrize("name", ["epic", "epic_0", "boundary_", "cacheblend_x", "cold_2", "Verified"])
def test_unknown_names_are_refused(name):
    with pytest.raises(ConfigurationError, match=f"--arms names '{name}'"):
        names_of(name)
