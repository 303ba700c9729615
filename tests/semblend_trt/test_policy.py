"""What each policy allows, and the boundary it gives."""

from __future__ import annotations

import pytest

from semblend_trt.config import Settings
from semblend_trt.errors import ConfigurationError
from semblend_trt.policy import ReusePolicy, allows_approximate, allows_reuse, boundary_for, parse_policy


@pytest.mark.parametrize(
    ("policy", "reuse", "approximate"),
    [
        (ReusePolicy.OFF, False, False),
        (ReusePolicy.EXACT, True, False),
        (ReusePolicy.POSITION_FIX, True, True),
        (ReusePolicy.BOUNDARY, True, True),
    ],
)
def test_what_a_policy_allows(policy: ReusePolicy, reuse: bool, approximate: bool) -> None:
    assert allows_reuse(policy) is reuse
    assert allows_approximate(policy) is approximate


@pytest.mark.parametrize("text", ["position_fix", " Position_Fix\n", ReusePolicy.POSITION_FIX])
def test_parse_reads_names_and_members(text: str) -> None:
    assert parse_policy(text) is ReusePolicy.POSITION_FIX


def test_verified_is_refused_until_a_version_has_it() -> None:
    assert "verified" not in {policy.value for policy in ReusePolicy}
    with pytest.raises(ConfigurationError, match="policy verified is not in this version; use one of off, exact"):
        parse_policy("verified")


@pytest.mark.parametrize("text", ["", "on", "exact,off", "x" * 1000])
def test_unknown_policies_name_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigurationError, match="off, exact, position_fix, boundary") as caught:
        parse_policy(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("boundary", [1, 12, 24])
def test_boundary_within_the_model(boundary: int) -> None:
    assert boundary_for(ReusePolicy.BOUNDARY, Settings(recompute_boundary_layer=boundary), 24) == boundary


@pytest.mark.parametrize("boundary", [0, 25])
def test_boundary_outside_the_model_is_refused(boundary: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"SEMBLEND_RECOMPUTE_BOUNDARY_LAYER is {boundary}, outside 1\.\.24"):
        boundary_for(ReusePolicy.BOUNDARY, Settings(recompute_boundary_layer=boundary), 24)


@pytest.mark.parametrize("policy", [policy for policy in ReusePolicy if policy is not ReusePolicy.BOUNDARY])
def test_other_policies_recompute_no_layer(policy: ReusePolicy) -> None:
    assert boundary_for(policy, Settings(recompute_boundary_layer=99), 24) == 0
