"""A plan runs once; its publication limit lives until the blocks are released."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from semblend_trt.active_plans import ActivePlans
from semblend_trt.plan import (
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    SemanticKvPlan,
)


def plan(request_id: int, mode: EngineMode = EngineMode.WRAPPER, exact: bool = False, start: int = 4) -> SemanticKvPlan:
    fields: dict[str, Any] = {
        "kind": PlanKind.EXACT_PREFIX if exact else PlanKind.REQUEST_LOCAL,
    }
    return SemanticKvPlan(
        request_id=request_id,
        spans=(PlanSpan("d", start, start, 8, exact=exact),),
        prompt_token_ids=tuple(range(20)),
        num_computed_tokens=start,
        matched_tokens=8,
        block_size=4,
        execution=EngineExecution(mode, 2),
        **fields,
    )


def test_plan_is_taken_once() -> None:
    plans = ActivePlans()
    plans.put(plan(1))
    assert len(plans) == 1
    assert plans.take(1) == plan(1)
    assert plans.take(1) is None
    assert plans.take(2) is None
    assert len(plans) == 0


def test_plans_of_some_requests_are_taken_together_and_the_others_stay() -> None:
    plans = ActivePlans()
    assert plans.take_all([1, 2]) == {}
    for number in (1, 2, 3):
        plans.put(plan(number))
    assert plans.take_all([3, 7, 1]) == {3: plan(3), 1: plan(1)}
    assert plans.take_all([3, 1]) == {}
    assert plans.take(2) == plan(2)


def test_limit_outlives_the_plan_until_the_blocks_are_released() -> None:
    plans = ActivePlans()
    plans.put(plan(1, start=6))
    plans.take(1)
    plans.discard(1)
    assert plans.publishable_tokens(1) == 6
    plans.released(1)
    assert plans.publishable_tokens(1) is None


def test_a_plan_of_which_nothing_was_kept_limits_nothing() -> None:
    plans = ActivePlans()
    plans.put(plan(1))
    plans.put(plan(2))
    plans.computed_whole(1)
    assert plans.publishable_tokens(1) is None
    assert plans.publishable_tokens(2) == 4


def test_exact_plan_has_no_limit_and_lifts_none() -> None:
    plans = ActivePlans()
    plans.put(plan(1, exact=True))
    assert plans.publishable_tokens(1) is None
    plans.put(plan(2))
    plans.put(plan(2, exact=True))
    assert plans.publishable_tokens(2) == 4


def test_stock_plan_leaves_its_limit_but_waits_for_no_forward() -> None:
    plans = ActivePlans()
    plans.put(plan(1, mode=EngineMode.STOCK))
    assert plans.take(1) is None
    assert plans.publishable_tokens(1) == 4


def test_second_put_replaces_the_first() -> None:
    plans = ActivePlans()
    plans.put(plan(1))
    replacement = plan(1).without_spans("gone")
    plans.put(replacement)
    assert len(plans) == 1
    assert plans.publishable_tokens(1) == replacement.prompt_length
    assert plans.take(1) == replacement


def test_discard_drops_only_its_own_request() -> None:
    plans = ActivePlans()
    plans.put(plan(1))
    plans.put(plan(2))
    plans.discard(1)
    assert plans.take(1) is None
    assert plans.take(2) == plan(2)


def test_each_plan_goes_to_one_of_many_threads() -> None:
    plans = ActivePlans()
    for request_id in range(200):
        plans.put(plan(request_id))
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(plans.take, [request_id for request_id in range(200) for _ in range(4)]))
    assert sorted(item.request_id for item in taken if item is not None) == list(range(200))
    assert len(plans) == 0
