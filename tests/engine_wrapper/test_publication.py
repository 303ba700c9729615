"""No block that reaches beyond the exact part of a request is ever publishable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_wrapper.embedded.block_manager import BlockManager, RootKey
from engine_wrapper.embedded.llm_args import KvCacheConfig
from engine_wrapper.publication import PublicationGuard, note_evidence
from semblend_trt.plan import CheckEvidence, PlanKind, SemanticKvPlan
from semblend_trt.runtime import ActivePlans, Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_SIZE = 8


@pytest.fixture
def plan_of(make_plan: Any) -> Callable[..., SemanticKvPlan]:
    """A plan with one span, from `start` to the last token but one."""

    def build(request_id: int, start: int, length: int, **options: Any) -> SemanticKvPlan:
        spans, sizes = [(start, length - 1)], {"num_layers": 4, "block_size": BLOCK_SIZE}
        return make_plan(range(length), spans, request_id=request_id, shift=3, **sizes, **options)

    return build


def test_a_request_without_a_plan_is_published_whole() -> None:
    assert PublicationGuard(ActivePlans()).publishable(1, 37) == 37


def test_an_exact_plan_is_published_whole(plan_of: Callable[..., SemanticKvPlan]) -> None:
    plans = ActivePlans()
    plans.put(plan_of(1, 0, 40, exact={0}, kind=PlanKind.EXACT_PREFIX))
    assert PublicationGuard(plans).publishable(1, 50) == 50


def test_the_limit_outlives_the_plan_and_ends_with_the_blocks(plan_of: Callable[..., SemanticKvPlan]) -> None:
    plans = ActivePlans()
    guard = PublicationGuard(plans)
    plans.put(plan_of(1, 20, 40))
    assert plans.take(1) is not None
    plans.take(1)
    assert guard.publishable(1, 60) == 20
    guard.released(1)
    assert guard.publishable(1, 60) == 60


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(span_start=st.integers(0, 60), length=st.integers(62, 90))
def test_a_block_manager_offers_exact_blocks_only(
    plan_of: Callable[..., SemanticKvPlan], span_start: int, length: int
) -> None:
    plans = ActivePlans()
    manager = BlockManager(16, KvCacheConfig(tokens_per_block=BLOCK_SIZE), lambda source, target: None)
    manager.publication = PublicationGuard(plans)
    key, tokens = RootKey(), list(range(length))
    plan = plan_of(1, span_start, length)
    plans.put(plan)
    manager.add_sequence(1, key, manager.match(key, tokens), length)
    manager.allocate(1, length)
    manager.publish(1, tokens)
    manager.release(1)
    matched = manager.match(key, tokens)
    assert len(matched.nodes) * BLOCK_SIZE + matched.partial_tokens == span_start // BLOCK_SIZE * BLOCK_SIZE


def test_evidence_goes_to_the_runtime_and_a_dropped_plan_limits_nothing(plan_of: Callable[..., SemanticKvPlan]) -> None:
    runtime, tokens = Runtime(), {"offered_tokens": 16, "checked_tokens": 16}
    for request_id in (1, 2):
        runtime.active_plans.put(plan_of(request_id, 4, 40))
    found = [
        CheckEvidence(1, reused_tokens=0, recomputed_tokens=16, largest_kept=0.0, is_dropped=True, **tokens),
        CheckEvidence(2, reused_tokens=9, recomputed_tokens=7, largest_kept=0.1, is_dropped=False, **tokens),
    ]
    for evidence in found:
        note_evidence(runtime, evidence)
    assert list(runtime.evidence) == found
    assert runtime.active_plans.publishable_tokens(1) is None
    assert runtime.active_plans.publishable_tokens(2) == 4
