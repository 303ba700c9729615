"""Intervals of differences: how wide, and where they lie."""

from __future__ import annotations

import numpy as np
import pytest

from validation.replay.report import ratio_interval


def test_equal_differences_leave_no_doubt() -> None:
    interval = ratio_interval([2.0] * 50, [4.0] * 50)
    assert interval is not None
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((0.5, 0.5, 0.5))
    assert interval.is_a_difference


def test_what_follows_from_itself_says_less_than_independent_requests() -> None:
    random = np.random.default_rng(3)
    steps = random.normal(size=40)
    slow, shuffled = np.repeat(steps, 40), random.permutation(np.repeat(steps, 40))
    wide, narrow = (ratio_interval(values, np.ones(1_600)) for values in (slow, shuffled))
    assert wide is not None
    assert narrow is not None
    assert wide.estimate == pytest.approx(narrow.estimate)
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(5)
    held = 0
    for _ in range(200):
        interval = ratio_interval(random.normal(1.0, 3.0, size=900), np.ones(900))
        assert interval is not None
        held += interval.low <= 1.0 <= interval.high
    assert 175 <= held <= 199


def test_a_few_requests_have_none() -> None:
    assert ratio_interval([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) is None
