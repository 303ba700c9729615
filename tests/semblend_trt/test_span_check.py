"""A check says exactly what it compares and when it lets go."""

from __future__ import annotations

import math
from typing import Any

import pytest

from semblend_trt.errors import PlanError
from semblend_trt.span_check import SpanCheck


@pytest.mark.parametrize(
    ("fields", "invariant"),
    [
        ({"layer": -1, "threshold": 0.1}, "check_outside_model"),
        ({"layer": 1}, "check_incomplete"),
        ({"layer": 1, "threshold": 0.1, "largest_share": 0.1}, "check_incomplete"),
        ({"layer": 1, "threshold": -0.1}, "check_threshold_range"),
        ({"layer": 1, "threshold": math.inf}, "check_threshold_range"),
        ({"layer": 1, "threshold": math.nan}, "check_threshold_range"),
        ({"layer": 1, "threshold": 0.1, "window_threshold": -0.1}, "check_threshold_range"),
        ({"layer": 1, "threshold": 0.1, "window_threshold": math.inf}, "check_threshold_range"),
        ({"layer": 1, "largest_share": 1.01}, "check_share_range"),
        ({"layer": 1, "largest_share": math.nan}, "check_share_range"),
        ({"layer": 1, "threshold": 0.1, "max_span_share": -0.01}, "check_share_range"),
        ({"layer": 1, "threshold": 0.1, "min_saved_share": 1.5}, "check_share_range"),
    ],
)
def test_a_check_out_of_range_is_refused_by_name(fields: dict[str, Any], invariant: str) -> None:
    with pytest.raises(PlanError) as refusal:
        SpanCheck(**fields)
    assert refusal.value.invariant == invariant


@pytest.mark.parametrize("fields", [{"threshold": 0.0}, {"largest_share": 1.0}, {"largest_share": 0.0}])
def test_the_bounds_themselves_are_allowed(fields: dict[str, Any]) -> None:
    check = SpanCheck(0, **fields)
    assert (check.max_span_share, check.min_saved_share) == (1.0, 0.0)
