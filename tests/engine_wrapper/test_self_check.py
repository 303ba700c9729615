"""What a self-check finds is the same on every rank."""

from contextlib import contextmanager

import pytest
import torch

from engine_wrapper.self_check import LayoutError, difference, differences, raise_difference
from kernels.layout import KvGeometry
from semblend_trt.ranks import Ranks


def test_everything_is_run_though_the_first_differs():
    """A forward waits for the other ranks, which may have found nothing."""
    ran = []

    def found():
        for problem in ("the first", None, "the last"):
            ran.append(problem)
            yield problem

    with pytest.raises(LayoutError, match="the first"):
        raise_difference(found(), Ranks())
    assert ran == ["the first", None, "the last"]


def test_what_another_rank_has_found_is_raised_here():
    class Second(Ranks):
        def gather(self, value):
            return [["the other rank's"], value]

    with pytest.raises(LayoutError, match="the other rank's"):
        raise_difference([None], Second())
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


def test_rows_that_are_no_numbers_differ():
    rows = torch.ones(4, 2)
    assert difference("rows", rows, rows, torch.float32) is None
    assert "by nan" in difference("rows", rows * torch.nan, rows, torch.float32)
