"""No block that reaches beyond the exact part of a request is ever publishable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_wrapper.embedded.block_manager import BlockManager, RootKey
from engine_wrapper.embedded.llm_args import KvCacheConfig
from engine_wrapper.publication import PublicationGuard
from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import (
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    SemanticKvPlan,
)
from semblend_trt.runtime import ActivePlans

BLOCK_SIZE = 8


def make_plan(request_id: int, span_start: int, prompt_length: int, *, exact: bool = False) -> SemanticKvPlan:
    """A plan with one span, from `span_start` to the last token but one."""
    donor_start = span_start if exact else span_start + 3
    matched = prompt_length - 1
    return SemanticKvPlan(
        request_id=request_id,
        kind=PlanKind.EXACT_PREFIX if exact else PlanKind.REQUEST_LOCAL,
        spans=(PlanSpan("donor", donor_start, span_start, matched - span_start, exact=exact),),
        prompt_token_ids=tuple(range(prompt_length)),
        num_computed_tokens=0,
        matched_tokens=matched,
        block_size=BLOCK_SIZE,
        execution=EngineExecution(EngineMode.WRAPPER, 4),
    )


def test_a_request_without_a_plan_is_published_whole() -> None:
    assert PublicationGuard(ActivePlans(), BLOCK_SIZE).publishable(1, 37) == 37


def test_an_exact_plan_is_published_whole() -> None:
    plans = ActivePlans()
    plans.put(make_plan(1, 0, 40, exact=True))
    assert PublicationGuard(plans, BLOCK_SIZE).publishable(1, 50) == 50


@given(
    span_start=st.integers(0, 60),
    length=st.integers(62, 90),
    tokens=st.integers(0, 120),
    block_size=st.integers(1, 33),
)
def test_only_whole_blocks_below_the_first_approximate_position(
    span_start: int, length: int, tokens: int, block_size: int
) -> None:
    plans = ActivePlans()
    plan = make_plan(7, span_start, length)
    plans.put(plan)
    guard = PublicationGuard(plans, block_size)
    publishable = guard.publishable(7, tokens)
    assert 0 <= publishable <= tokens
    # Every block that the published tokens touch ends before the approximate part.
    assert -(-publishable // block_size) * block_size <= plan.exact_token_count
    # Nothing exact is withheld but the block that the exact part ends in.
    assert publishable == tokens or publishable > plan.exact_token_count - block_size
    assert guard.publishable(8, tokens) == tokens


def test_the_limit_outlives_the_plan_and_ends_with_the_blocks() -> None:
    plans = ActivePlans()
    guard = PublicationGuard(plans, BLOCK_SIZE)
    plans.put(make_plan(1, 20, 40))
    assert plans.take(1) is not None
    plans.discard(1)
    assert guard.publishable(1, 60) == 16
    guard.released(1)
    assert guard.publishable(1, 60) == 60


@given(span_start=st.integers(0, 60), length=st.integers(62, 90), rounded=st.booleans())
def test_a_block_manager_offers_exact_blocks_only(span_start: int, length: int, rounded: bool) -> None:
    plans = ActivePlans()
    manager = BlockManager(16, KvCacheConfig(tokens_per_block=BLOCK_SIZE), lambda source, target: None)
    manager.publication = PublicationGuard(plans, BLOCK_SIZE) if rounded else PublicationGuard(plans)
    key, tokens = RootKey(), list(range(length))
    plan = make_plan(1, span_start, length)
    plans.put(plan)
    manager.add_sequence(1, key, manager.match(key, tokens), length)
    manager.allocate(1, length)
    manager.publish(1, tokens)
    manager.release(1)
    matched = manager.match(key, tokens)
    assert len(matched.nodes) * BLOCK_SIZE + matched.partial_tokens == span_start // BLOCK_SIZE * BLOCK_SIZE


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="block_size is 0"):
        PublicationGuard(ActivePlans(), 0)
