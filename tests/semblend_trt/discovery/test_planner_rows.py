"""Plans whose lowest layers run on every token are no longer than the engine may run at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.config import Settings
from semblend_trt.discovery.planner import LookupRequest, Planned, Planner
from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.plan import EngineMode, PlanSpan
from semblend_trt.policy import ReusePolicy

RANDOM = np.random.default_rng(1)
SYSTEM, DOCUMENT, OTHER = (RANDOM.integers(0, 30_000, length, dtype=np.int32) for length in (100, 400, 300))
PROMPT = np.concatenate([SYSTEM, DOCUMENT, OTHER, DOCUMENT[:40]])


def planned(policy: str, max_rows: int | None, donor: np.ndarray, computed: int = 0, ratio: float = 0.1) -> Planned:
    index = SpanIndex()
    index.add("space", "donor", donor)
    values = Settings(
        policy=ReusePolicy(policy),
        lookup_deadline_ms=10_000,
        recompute_boundary_layer=2,
        min_reuse_ratio=ratio,
        fuzzy_chunks=bool(computed % 2),
    )
    request = LookupRequest(7, "space", PROMPT, computed, 32, EngineMode.WRAPPER, True, max_rows=max_rows)
    return Planner(index, values, values.policy, 6).plan(request)


BEHIND = np.concatenate([OTHER[:9], DOCUMENT, OTHER])


@pytest.mark.parametrize("policy", ["boundary", "cacheblend"])
@given(max_rows=st.integers(1, 1000), computed=st.integers(0, 300), from_start=st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows_that_run_together_fit_with_one_behind_them(
    policy: str, max_rows: int, computed: int, from_start: bool
) -> None:
    donor = PROMPT[:500] if from_start else BEHIND
    plan = planned(policy, max_rows, donor, computed).plan
    if plan is not None:
        exact = sum(span.length for span in plan.spans if span.exact)
        assert plan.is_exact or plan.matched_tokens - exact <= max_rows - 1


@pytest.mark.parametrize("policy", ["position_fix", "epic"])
def test_rows_that_may_run_apart_are_not_bounded(policy: str) -> None:
    whole, bounded = planned(policy, None, BEHIND).plan, planned(policy, 70, BEHIND).plan
    assert whole is not None
    assert bounded is not None
    assert whole.spans == bounded.spans == (PlanSpan("donor", 9, 100, 700),)


def test_what_fits_is_reused_and_what_is_too_little_is_named() -> None:
    plan = planned("boundary", 301, BEHIND).plan
    assert plan is not None
    assert plan.spans == (PlanSpan("donor", 9, 100, 200),)
    assert planned("boundary", 120, BEHIND).outcome_reason == "max_num_tokens"
    assert planned("boundary", 301, BEHIND, ratio=0.5).outcome_reason == "max_num_tokens"
    # Nothing was cut here: there is only little to be found.
    assert planned("boundary", 600, BEHIND[:300], ratio=0.5).outcome_reason == "low_reuse"


def test_exact_tokens_cost_no_rows() -> None:
    plan = planned("boundary", 2, PROMPT[:700]).plan
    assert plan is not None
    assert plan.spans == (replace(plan.spans[0], target_start=0, length=700, exact=True),)
