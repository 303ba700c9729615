"""What plans cost: the work of a plan, prices from measured times, and whether a plan saves enough."""

import numpy as np
import pytest

from semblend_trt.cost import CostModel, LoadCost, cold_work, fitted, plan_work
from semblend_trt.plan import PlanSpan, SpanCheck
from tests.semblend_trt.plans import plan_of

LAYERS = 4


def plan(spans, exact=(), **execution):
    """A plan of 1,000 tokens, of which `spans` (start, end) are moved."""
    own = [PlanSpan("a", start, start, end - start, index in exact) for index, (start, end) in enumerate(spans)]
    return plan_of(*own, prompt=1000, layers=LAYERS, **execution)


def pairs(begin, end):
    return (end**2 - begin**2) / 2


def test_the_work_of_a_cold_prompt_is_that_of_all_its_rows():
    assert cold_work(100, 1000, LAYERS, None).tolist() == [4, 3600, 4 * pairs(100, 1000)]
    assert cold_work(100, 1000, LAYERS, 300).tolist() == [12, 3600, 4 * pairs(100, 1000)]


@pytest.mark.parametrize(
    ("execution", "launches", "rows", "checks"),
    [
        ({}, 4, 4 * 600, 0),
        ({"head_tokens": 50}, 4, 4 * 650, 0),
        ({"recompute_boundary_layer": 2}, 4, 4 * 600 + 2 * 400, 0),
        ({"check": SpanCheck(1, 0.1)}, 4, 4 * 600 + 2 * 400, 1),
        ({"check": SpanCheck(1, largest_share=0.5)}, 4, 4 * 600 + 2 * 400 + 2 * 200, 1),
        # A window of 32, and one token in 16 of the 368 after it.
        ({"check": SpanCheck(1, 0.1, sample_every=16)}, 6, 4 * 600 + 2 * (600 + 32 + 23), 1),
    ],
)
def test_the_work_of_a_plan_is_what_it_computes_if_its_check_finds_nothing(execution, launches, rows, checks):
    found = plan_work(plan([(200, 600)], **execution), None)
    assert (found[0], found[1], found[3]) == (launches, rows, checks)


def test_exact_spans_and_pairs_are_left_out():
    found = plan_work(plan([(0, 300), (400, 900)], exact=(0,)), 100)
    assert found.tolist() == [4 * 2, 4 * 200, 4 * (pairs(300, 400) + pairs(900, 1000)), 0]


def test_prices_are_found_again_and_none_is_negative():
    rng = np.random.default_rng(0)
    work = [rng.uniform(1, size, 3) * (1, 1e3, 1e6) for size in (2, 20, 200, 2000, 5, 50)]
    prices = np.array([1e-3, 2e-6, 3e-9])
    assert fitted(work, [each @ prices for each in work]) == pytest.approx(prices)
    sizes = (10.0, 100.0, 1000.0, 10_000.0)
    each, row, pair = fitted([np.array([1, size, size**2]) for size in sizes], [1 + n - 1e-5 * n**2 for n in sizes])
    assert min(each, row) > 0
    assert pair == 0
    # What nothing was measured of is free.
    assert fitted([np.array([1.0, 0.0])], [2.0]) == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize("seconds", [[], [0.0], [-1.0], [float("nan")]])
def test_times_that_say_nothing_are_refused(seconds):
    with pytest.raises(ValueError, match="measure at least once"):
        fitted([np.ones(2)] * len(seconds), seconds)


@pytest.mark.parametrize(
    ("load", "far", "share", "saves"),
    [
        (LoadCost(), 0, 0.39, True),
        (LoadCost(), 0, 0.41, False),
        (LoadCost(each=200.0), 0, 0.36, False),
        (LoadCost(near=1.0), 0, 0.31, False),
        (LoadCost(far=1.0), 0, 0.39, True),
        (LoadCost(far=1.0), 400, 0.31, False),
    ],
)
def test_a_plan_saves_what_its_rows_and_loads_leave(load, far, share, saves):
    costs = CostModel(LAYERS, None, (0, 1, 0), (0, 1, 0, 0), load)
    assert costs.cold(1000) == 4000
    assert costs.saves(plan([(200, 600)]), far, share) is saves


def test_exact_spans_save_nothing_since_they_are_used_in_any_case():
    costs = CostModel(LAYERS, None, (0, 1, 0), (0, 1, 0, 0), LoadCost())
    assert not costs.saves(plan([(0, 900), (905, 910)], exact=(0,)), 0, 0.1)
    assert costs.saves(plan([(0, 900), (905, 920)], exact=(0,)), 0, 0.1)
