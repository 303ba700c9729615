"""Names of the policies, and which of them look for donors."""

from __future__ import annotations

import pytest

from semblend_trt.errors import ConfigurationError
from semblend_trt.policy import ReusePolicy, allows_reuse, parse_policy


def test_the_policies_in_the_order_in_which_they_are_told() -> None:
    names = [policy.value for policy in ReusePolicy]
    assert names == ["off", "exact", "verified", "boundary", "position_fix", "epic", "cacheblend"]
    assert [policy for policy in ReusePolicy if not allows_reuse(policy)] == [ReusePolicy.OFF]


@pytest.mark.parametrize("text", ["position_fix", " Position_Fix\n", ReusePolicy.POSITION_FIX])
def test_parse_reads_names_and_members(text: str) -> None:
    assert parse_policy(text) is ReusePolicy.POSITION_FIX


@pytest.mark.parametrize("text", ["", "on", "exact,off", "x" * 1000])
def test_unknown_policies_name_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigurationError, match="off, exact, verified, boundary, position_fix, epic, cacheblend") as e:
        parse_policy(text)
    assert len(str(e.value)) < 200
