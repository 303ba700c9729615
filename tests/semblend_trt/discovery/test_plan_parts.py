"""What chosen runs make of a plan: which run is exact, where holes are, and where a strict plan ends."""

from __future__ import annotations

import pytest

from semblend_trt.discovery.plan_parts import cut_to_block, exact_run, holes_of, span_of
from semblend_trt.discovery.span_index import Run
from semblend_trt.plan import PlanSpan

FIRST, SECOND = PlanSpan("a", 0, 0, 100, exact=True), PlanSpan("b", 7, 100, 70)


def test_the_exact_run_is_the_longest_from_both_starts() -> None:
    runs = [Run("a", 0, 0, 90), Run("b", 0, 0, 120), Run("c", 0, 0, 120), Run("d", 5, 0, 300), Run("e", 0, 5, 300)]
    assert exact_run(runs, 30, 110) == Run("b", 30, 30, 80)
    assert exact_run(runs[3:], 0, 400) is None
    assert exact_run(runs, 120, 400) is None


@pytest.mark.parametrize(
    ("min_span", "expected"),
    [
        (1, [FIRST, PlanSpan("b", 7, 100, 60)]),
        (60, [FIRST, PlanSpan("b", 7, 100, 60)]),
        (61, [PlanSpan("a", 0, 0, 96, exact=True)]),
        (97, []),
    ],
)
def test_a_strict_plan_ends_where_a_block_ends(min_span: int, expected: list[PlanSpan]) -> None:
    assert cut_to_block([FIRST, SECOND], 16, min_span) == expected


def test_a_span_inside_one_block_is_dropped() -> None:
    assert cut_to_block([PlanSpan("a", 0, 33, 14)], 16, 1) == []
    assert cut_to_block([], 16, 1) == []


def test_holes_lie_before_and_between_the_spans() -> None:
    assert holes_of([FIRST, SECOND], 0) == []
    assert holes_of([SECOND, PlanSpan("b", 0, 200, 9)], 96) == [range(96, 100), range(170, 200)]


def test_a_span_holds_its_run() -> None:
    assert span_of(Run("a", 0, 0, 5), exact=True) == PlanSpan("a", 0, 0, 5, exact=True)
    assert span_of(Run("a", 3, 9, 5)) == PlanSpan("a", 3, 9, 5)
