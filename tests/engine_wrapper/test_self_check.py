"""What a self-check finds is the same on every rank, and reuse that does not pay is left out."""

from contextlib import contextmanager
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from engine_wrapper import self_check
from engine_wrapper.self_check import LayoutError, difference, differences, measured, plan_over, raise_difference
from kernels.layout import KvGeometry, PagedKv
from kernels.rope import still
from semblend_trt.cost import CostModel, cold_work, plan_work
from semblend_trt.plan import SpanCheck
from semblend_trt.ranks import EngineRanks, Ranks
from tests.builders.engine import DONOR, SHIFTED, serve, teach


def test_all_is_run_and_the_first_difference_of_any_rank_is_raised():
    """A forward waits for the other ranks, which may have found nothing."""
    ran, second = [], EngineRanks(1, 2, lambda value: [["the other rank's"], value])
    for ranks, first in ((Ranks(), "the first"), (second, "the other rank's")):
        with pytest.raises(LayoutError, match=first):
            raise_difference((ran.append(each) or each for each in ("the first", None, "the last")), ranks)
    assert ran == ["the first", None, "the last"] * 2
    raise_difference([None], Ranks())


@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_where_an_engine_rounds_late_a_plan_is_compared_within_what_is_stored(offset):
    """A run without a plan reads its own rows unrounded, but within `as_stored`; a plan reads rounded ones."""
    tokens, rounded = torch.arange(80), []
    engine_rows = torch.randn(80, 4, generator=torch.Generator().manual_seed(1))
    stored = engine_rows + 1.0

    @contextmanager
    def as_stored():
        rounded.append(True)
        yield
        rounded.clear()

    def run(batch, plans, max_rows):
        read = stored + offset if plans else stored if rounded else engine_rows
        return read[batch.begins[0] :]

    asked = tokens, engine_rows, KvGeometry(2, 1, 4, 16, 1), torch.float8_e4m3fn, run
    whole, *behind_plans = differences(*asked, as_stored)
    assert whole is None
    assert [each is None for each in behind_plans] == [offset == 0.0] * 2
    assert rounded == []
    assert [each is None for each in differences(*asked)] == [True, False, False]


class Clock:
    """Each row of a layer takes a second, and each forward a hundred; loads take none."""

    def __init__(self, monkeypatch):
        self.now, self.ran = 0.0, []
        monkeypatch.setattr(self_check, "seconds_of", self.seconds_of)

    def seconds_of(self, call, _):
        begin = self.now
        call()
        return self.now - begin or 1e-9

    def run(self, tokens, begin, blocks, plan):
        rows = len(tokens) - begin if plan is None else len(tokens) - sum(span.length for span in plan.spans)
        self.ran.append((len(tokens), set(tokens), set(blocks)))
        self.now += 100 + rows


def measure(run, longest=300, samples=True):
    geometry = KvGeometry(1, 2, 16, 8)
    kv = PagedKv(torch.zeros(5, 1, 2, geometry.row_elements), torch.arange(1, 5), geometry)
    return measured(run, [1, 2, 3], kv, still(16), Ranks(), longest, samples=samples)


@pytest.mark.parametrize(("longest", "last"), [(300, 256), (100, 96), (31, 0)])
def test_prices_are_those_of_the_forwards_that_ran_up_to_the_longest_prompt(monkeypatch, longest, last):
    clock = Clock(monkeypatch)
    found = measure(clock.run, longest, samples=False)
    assert max((length for length, _, _ in clock.ran), default=0) == last
    assert all(tokens == {1, 2, 3} and blocks == {1, 2, 3, 4} for _, tokens, blocks in clock.ran)
    assert (found is None) is (last == 0)
    if last == 256:  # fewer lengths do not tell a row from a pair
        assert found.cold_prices == pytest.approx((100, 1, 0), abs=1e-6)
        assert found.cold(0, 1000) == pytest.approx(1100)
        assert found.move_price < 1e-9


def test_a_forward_that_took_longer_than_its_rows_does_not_make_every_pair_dear(monkeypatch):
    """Seconds of a 7B model on a card. The few rows after a long prefix take a twentieth longer than they should."""
    clock, prices = Clock(monkeypatch), (0.022, 23e-6, 0.55e-9, 0.004)

    def run(tokens, begin, _, plan):
        cold = (*cold_work(begin, len(tokens)), 0)
        work = cold if plan is None else plan_work(plan)
        is_late = plan is not None and len(tokens) == 4096 and len(tokens) - plan.reused_tokens < 100
        clock.now += (1.05 if is_late else 1) * np.dot(work, prices)

    found, geometry = measure(run, longest=8192), KvGeometry(28, 2, 16, 8)
    plan = plan_over([1] * 8192, geometry, 32, 6176, SpanCheck(2, 1.0, sample_every=16, sample_threshold=1.0))
    assert found.planned(plan) == pytest.approx(np.dot(plan_work(plan), prices), rel=0.15)


def test_what_fails_is_not_measured(caplog):
    assert measure(Mock(side_effect=RuntimeError("no forward"))) is None
    assert "could not be measured" in caplog.text


@pytest.mark.promise("reuse", "Where the engine has measured that...")
@pytest.mark.usefixtures("position_fix")
@pytest.mark.parametrize(
    ("share", "costs", "reason"),
    [(0.0, None, None), (1.0, None, "does_not_pay"), (0.1, CostModel((0, 1, 0), (0, 1, 0, 0), 0), None)],
)
def test_reuse_in_an_engine_has_to_pay(engine, share, costs, reason):
    llm = engine(MIN_SAVING=share)
    runtime = llm.connector_scheduler._runtime
    assert (runtime.costs is None) is (share == 0)
    assert not llm.executor.pool.any()
    runtime.costs = costs or runtime.costs
    teach(llm, DONOR)
    answer = serve(llm, SHIFTED)
    assert answer.reuse_reason == reason
    assert answer.reused_tokens == (0 if reason else 200)
    cold = serve(engine.cold(), SHIFTED)
    assert reason is None or answer.outputs[0].token_ids == cold.outputs[0].token_ids


def test_rows_that_are_no_numbers_differ():
    rows = torch.ones(4, 2)
    assert difference("rows", rows, rows, torch.float32) is None
    assert "by nan" in difference("rows", rows * torch.nan, rows, torch.float32)
