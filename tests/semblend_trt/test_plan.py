"""A plan that could corrupt KV is refused, and what it says of its tokens adds up."""

from functools import partial

import numpy as np
import pytest

from semblend_trt.errors import PlanError
from semblend_trt.plan import EngineExecution, EngineMode, PlanKind, PlanSpan, ReuseTerms, SemanticKvPlan, SpanCheck

NUM_LAYERS = 4


def execution(**changes):
    return EngineExecution(**{"mode": EngineMode.WRAPPER, "num_layers": NUM_LAYERS, **changes})


def plan(**changes):
    """Prompt of 32, 8 computed, hole 8..9, span 10..19 from 30, hole 20..23, suffix from 24."""
    fields = {"request_id": 7, "kind": PlanKind.REQUEST_LOCAL, "spans": (PlanSpan("d", 30, 10, 10),)}
    fields |= {"prompt_token_ids": np.arange(100, 132, dtype=np.int32), "execution": execution()}
    fields |= {"num_computed_tokens": 8, "matched_tokens": 16, "block_size": 8}
    return SemanticKvPlan(**{**fields, **changes})


STOCK = execution(mode=EngineMode.STOCK)


BROKEN = [
    *(("span_range", partial(PlanSpan, "d", *each)) for each in ((0, 0, 0), (-1, 0, 1), (0, -1, 1))),
    ("span_range", lambda: PlanSpan("d", 0, 0, 1, generation=-1)),
    ("exact_span_approximate", lambda: PlanSpan("d", 0, 0, 1, exact=True, generation=1)),
    ("generation_unchecked", lambda: plan(spans=(PlanSpan("d", 30, 10, 10, generation=1),))),
    ("exact_span_shifted", lambda: PlanSpan("d", 0, 1, 1, exact=True)),
    *(("boundary_outside_model", partial(execution, recompute_boundary_layer=at)) for at in (NUM_LAYERS + 1, -1)),
    ("boundary_outside_model", lambda: execution(num_layers=0)),
    ("boundary_needs_wrapper", lambda: execution(mode=EngineMode.STOCK, recompute_boundary_layer=1)),
    ("check_needs_wrapper", lambda: execution(mode=EngineMode.STOCK, check=SpanCheck(1, 0.1))),
    ("check_outside_model", lambda: execution(check=SpanCheck(NUM_LAYERS, 0.1))),
    ("head_tokens_negative", lambda: execution(head_tokens=-1)),
    ("head_needs_wrapper", lambda: execution(mode=EngineMode.STOCK, head_tokens=16)),
    *(("negative_count", partial(plan, **{name: -1})) for name in ("num_computed_tokens", "matched_tokens")),
    ("negative_count", lambda: plan(block_size=0)),
    ("no_token_left", lambda: plan(matched_tokens=24)),
    ("spans_overlap", lambda: plan(spans=(PlanSpan("d", 0, 10, 5), PlanSpan("e", 0, 14, 2)))),
    ("spans_overlap", lambda: plan(spans=(PlanSpan("d", 0, 16, 2), PlanSpan("e", 0, 10, 2)))),
    ("span_outside_prompt", lambda: plan(spans=(PlanSpan("d", 0, 30, 3),))),
    ("span_below_computed", lambda: plan(spans=(PlanSpan("d", 0, 7, 3),))),
    ("span_beyond_prefix", lambda: plan(spans=(PlanSpan("d", 0, 20, 5),))),
    ("exact_prefix_with_approximate_span", lambda: plan(kind=PlanKind.EXACT_PREFIX)),
    ("discovery_promises_tokens", lambda: plan(kind=PlanKind.DISCOVERY_ONLY)),
    ("hole_needs_wrapper", lambda: plan(execution=STOCK)),
    ("hole_needs_wrapper", lambda: plan(spans=(PlanSpan("d", 0, 8, 10),), execution=STOCK)),
    ("blocks_too_few", lambda: plan(target_block_ids=(0, 1))),
    ("block_negative", lambda: plan(target_block_ids=(0, -1, 2))),
    ("block_repeated", lambda: plan(target_block_ids=(0, 1, 0))),
]


@pytest.mark.promise("reuse", "A donor of a generation above...")
@pytest.mark.parametrize(("invariant", "build"), BROKEN, ids=[f"{i}-{name}" for i, (name, _) in enumerate(BROKEN)])
def test_broken_plan_is_refused_by_name(invariant, build):
    with pytest.raises(PlanError) as caught:
        build()
    assert caught.value.reason == invariant
    assert str(caught.value)


def test_only_approximate_tokens_behind_the_heads_are_checked():
    check = SpanCheck(1, 0.1)
    assert plan(execution=execution(check=check)).is_checked
    assert plan(execution=execution(check=check, head_tokens=9)).is_checked
    assert not plan(execution=execution(check=check, head_tokens=10)).is_checked
    assert not plan().is_checked
    exact = (PlanSpan("d", 10, 10, 10, exact=True),)
    assert not plan(execution=execution(check=check), spans=exact).is_checked
    assert not plan(execution=execution(check=check)).without_spans("gone").is_checked
    assert not plan(execution=execution(check=check), kind=PlanKind.DISCOVERY_ONLY, matched_tokens=0).is_checked


def test_a_donor_ends_before_the_first_span_of_the_last_generation():
    checked = execution(check=SpanCheck(1, 0.1))
    exact, third = PlanSpan("d", 8, 8, 4, exact=True), PlanSpan("f", 0, 16, 4, generation=2)
    assert [plan().donor_part(allowed) for allowed in (0, 1, 2)] == [(10, 0), (32, 1), (32, 1)]
    mixed = plan(spans=(exact, PlanSpan("e", 0, 12, 4), third), execution=checked)
    assert [mixed.donor_part(allowed) for allowed in range(4)] == [(12, 0), (16, 1), (16, 1), (32, 3)]


def test_without_spans_computes_the_whole_promise():
    emptied = plan(target_block_ids=(5, 3, 9)).without_spans("gone")
    assert emptied.holes == (range(8, 24),)
    assert (emptied.prefix_end, emptied.reused_tokens) == (24, 0)
    assert emptied.diagnostics == {"dropped": "gone"}
    with pytest.raises(PlanError) as caught:
        plan(spans=(PlanSpan("d", 40, 8, 16),), execution=STOCK).without_spans("gone")
    assert caught.value.reason == "hole_needs_wrapper"


EXACT, MOVED = PlanSpan("d", 8, 8, 4, exact=True), (PlanSpan("e", 0, 12, 4), PlanSpan("f", 40, 18, 6))


@pytest.mark.parametrize(
    ("valid", "holes", "exact"),
    [
        (plan(), [range(8, 10), range(20, 24)], 10),
        (plan(spans=(EXACT, *MOVED)), [range(16, 18)], 12),
        (plan(spans=MOVED, num_computed_tokens=0, matched_tokens=31), [range(12), range(16, 18), range(24, 31)], 12),
        (plan(kind=PlanKind.EXACT_PREFIX, spans=(EXACT,)), [range(12, 24)], 32),
        (plan(kind=PlanKind.DISCOVERY_ONLY, spans=MOVED, matched_tokens=0), [], 32),
    ],
)
def test_a_donor_of_generation_0_is_the_exact_part(valid, holes, exact):
    assert (valid.holes, valid.exact_token_count) == (tuple(holes), exact)
    assert valid.donor_part(0) == (exact, 0)


@pytest.mark.parametrize(
    ("terms", "reason", "expected"),
    [
        (ReuseTerms(), None, 100),
        (ReuseTerms(boundary=2), "boundary_needs_wrapper", 100),
        (ReuseTerms(head_tokens=16), "head_needs_wrapper", 84),
        (ReuseTerms(check=SpanCheck(1, largest_share=0.15)), "check_needs_wrapper", 85),
        (ReuseTerms(boundary=2, check=SpanCheck(1, threshold=0.0)), "check_needs_wrapper", 100),
    ],
)
def test_what_a_stock_engine_cannot_keep_and_the_reuse_that_can_be_counted_on(terms, reason, expected):
    assert (terms.wrapper_reason, terms.expected_reuse(100)) == (reason, expected)
