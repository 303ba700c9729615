"""Which tokens count as reused, under each rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from validation.replay.simulation import ReuseRule, simulate
from validation.replay.trace import trace_of
from validation.replay.workloads import workload_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from validation.replay.trace import Trace

TOKENS = {"header": 100, "other": 100, "document": 500, "small": 20}
PREFIX, SPAN = ReuseRule("exact_prefix", True), ReuseRule("span", False, min_tokens=64, recompute_tokens=16)


def test_behind_another_header_only_spans_count(trace_from: Callable[..., Trace]) -> None:
    trace = trace_from([["header", "document"], ["other", "document"], ["header", "document", "small"]], TOKENS)
    assert simulate(trace, PREFIX, "lru", 10_000).reused.tolist() == [0, 0, 600]
    assert simulate(trace, SPAN, "lru", 10_000).reused.tolist() == [0, 500 - 16, 600 - 16]


def test_short_spans_do_not_count_and_the_last_token_is_always_computed(trace_from: Callable[..., Trace]) -> None:
    trace = trace_from([["small"], ["small"], ["header"], ["header"]], TOKENS)
    assert simulate(trace, PREFIX, "lru", 10_000).reused.tolist() == [0, 19, 0, 99]
    assert simulate(trace, SPAN, "lru", 10_000).reused.tolist() == [0, 0, 0, 84]


def test_a_block_that_stands_in_a_prompt_twice_is_not_its_own_hit(trace_from: Callable[..., Trace]) -> None:
    trace = trace_from([["header", "header", "small"], ["header", "small", "header"]], TOKENS)
    assert simulate(trace, SPAN, "lru", 10_000).reused.tolist() == [0, 120 - 16 + 100 - 16]


def test_short_blocks_make_a_span_where_they_stand_as_they_stood_when_they_came(
    trace_from: Callable[..., Trace],
) -> None:
    small = dict.fromkeys("abcdef", 30)
    trace = trace_from(
        [["header", *"abcd"], ["other", *"abcd"], ["other", *"dcba"], ["other", *"bcefab"]], TOKENS | small
    )
    # In the last one `other`, b c, and a b are spans of at least 64 tokens only where they are long enough.
    assert simulate(trace, SPAN, "lru", 10_000).reused.tolist() == [0, 120 - 16, 84, 84]


@pytest.mark.parametrize("rule", [PREFIX, SPAN])
def test_policies_differ_and_equal_traces_give_equal_outcomes(rule: ReuseRule) -> None:
    def reused(policy: str) -> list[int]:
        trace = trace_of(workload_lines("rag_shared_corpus", 150, 3))
        return simulate(trace, rule, policy, 12_000).reused.tolist()

    assert reused("adaptive_semantic") == reused("adaptive_semantic")
    assert len({sum(reused(policy)) for policy in ("lru", "lfu", "size_aware", "adaptive_semantic")}) == 4


@pytest.mark.parametrize(("workload", "other"), [("tool_agent_session_reuse", "lru"), ("rag_shared_corpus", "lfu")])
def test_the_adaptive_policy_comes_close_to_the_plain_one_that_fits(workload: str, other: str) -> None:
    """Turns of conversations want the least recently used to go, documents of a corpus the least often used."""
    trace = trace_of(workload_lines(workload, 400, 0))
    capacity = sum(trace.spans.tokens) // 4
    adaptive, plain = (simulate(trace, SPAN, policy, capacity).reused.sum() for policy in ("adaptive_semantic", other))
    assert adaptive > 0.97 * plain
