"""What plans cost: the work of a plan, prices from measured times, and whether a plan saves enough."""

from dataclasses import replace

import numpy as np
import pytest

from semblend_trt.cost import CostModel, cold_work, fitted, plan_work
from semblend_trt.plan import BudgetLevel, PlanSpan, SpanCheck
from tests.semblend_trt.plans import plan_of

LAYERS = 4
LEVELLED = SpanCheck(1, 0.1, sample_every=16, levels=(BudgetLevel(0.1, 0.25), BudgetLevel(0.2, 1.0)))


def plan(spans, exact=(), **execution):
    """A plan of 1,000 tokens, of which `spans` (start, end) are moved."""
    own = [PlanSpan("a", start, start, end - start, index in exact) for index, (start, end) in enumerate(spans)]
    return plan_of(*own, prompt=1000, layers=LAYERS, **execution)


def pairs(begin, end):
    return (end**2 - begin**2) / 2


@pytest.mark.parametrize(
    ("execution", "forwards", "rows", "checks"),
    [
        ({}, 1, 600, 0),
        ({"head_tokens": 50}, 1, 650, 0),
        ({"recompute_boundary_layer": 2}, 1, 600 + 400 / 2, 0),
        ({"check": SpanCheck(1, 0.1)}, 1, 600 + 400 / 2, 1),
        ({"check": SpanCheck(1, largest_share=0.5)}, 1, 600 + 400 / 2 + 200 / 2, 1),
        # A window of 32, and one token in 16 of the 368 after it.
        ({"check": SpanCheck(1, 0.1, sample_every=16)}, 1.5, 600 + (600 + 32 + 23) / 2, 1),
        ({"check": LEVELLED}, 2.5, 2 * 600 + (600 + 32 + 23) / 2 + 400 / 2 + 100 / 2, 1),
        ({"check": replace(LEVELLED, compares_all=False)}, 2.5, 2 * 600 + (600 + 32 + 23) / 2 + 100, 1),
    ],
)
def test_the_work_of_a_plan_is_what_it_computes_if_its_check_finds_nothing(execution, forwards, rows, checks):
    found = plan_work(plan([(200, 600)], **execution))
    assert (found[0], found[1], found[3]) == (forwards, pytest.approx(rows), checks)


def test_exact_spans_and_pairs_are_left_out():
    found = plan_work(plan([(0, 300), (400, 900)], exact=(0,)))
    assert found.tolist() == [1, 200, pairs(300, 400) + pairs(900, 1000), 0]
    assert cold_work(300, 400).tolist() == [1, 100, pairs(300, 400)]


def test_prices_are_found_again_and_none_is_negative():
    rng = np.random.default_rng(0)
    work = [rng.uniform(1, size, 3) * (1, 1e3, 1e6) for size in (2, 20, 200, 2000, 5, 50)]
    prices = np.array([1e-3, 2e-6, 3e-9])
    assert fitted([(each, each @ prices) for each in work]) == pytest.approx(prices)
    sizes = (10.0, 100.0, 1000.0, 10_000.0)
    each, row, pair = fitted([(np.array([1, n, n**2]), 1 + n - 1e-5 * n**2) for n in sizes])
    assert min(each, row) > 0
    assert pair == 0
    # What nothing was measured of is free.
    assert fitted([(np.array([1.0, 0.0]), 2.0)]) == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize("seconds", [[], [0.0], [-1.0], [float("nan")]])
def test_times_that_say_nothing_are_refused(seconds):
    with pytest.raises(ValueError, match="measure at least once"):
        fitted([(np.ones(2), each) for each in seconds])


@pytest.mark.parametrize(
    ("spans", "exact", "move_price", "share", "saves"),
    [
        *(([(200, 600)], (), *row) for row in ((0, 0.39, 1), (0, 0.41, 0), (0.1, 0.35, 1), (0.1, 0.37, 0))),
        # Exact spans save nothing, as they are used in any case.
        *(([(0, 900), (905, end)], (0,), 0, 0.1, saves) for end, saves in ((910, 0), (920, 1))),
    ],
)
def test_a_plan_saves_what_its_rows_and_moves_leave(spans, exact, move_price, share, saves):
    costs = CostModel((0, 1, 0), (0, 1, 0, 0), move_price)
    assert costs.cold(200, 1000) == 800
    assert costs.saves(plan(spans, exact), share) == saves
