"""What a self-check finds is the same on every rank."""

from __future__ import annotations

import pytest

from engine_wrapper.self_check import LayoutError, raise_difference
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
