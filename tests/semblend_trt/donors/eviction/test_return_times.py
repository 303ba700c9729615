"""The time until the next use follows the gaps that were seen, whatever they are."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.donors.block_kind import BlockKind
from semblend_trt.donors.eviction.return_times import FIRST_SECONDS, ReturnTimes

CODE = BlockKind.CODE


def seconds_after(gaps: list[float]) -> float:
    times = ReturnTimes()
    for gap in gaps:
        times.came_back(CODE, gap)
    return times.seconds(CODE)


def test_before_anything_is_seen_it_is_the_first_guess() -> None:
    times = ReturnTimes()
    assert {times.seconds(kind) for kind in BlockKind} == {FIRST_SECONDS}
    times.came_back(CODE, 1.0)
    assert times.seconds(CODE) < times.seconds(BlockKind.TEMPLATE) == FIRST_SECONDS


@pytest.mark.parametrize("mean", [0.1, 8.0, 3600.0])
def test_uses_at_random_moments_wait_for_their_mean_gap(mean: float) -> None:
    """Of exponential gaps the time to the next use is the mean gap, at whatever moment one looks."""
    generator = random.Random(0)
    assert seconds_after([generator.expovariate(1 / mean) for _ in range(20_000)]) == pytest.approx(mean, rel=0.15)


def test_a_random_moment_falls_into_the_long_gaps() -> None:
    """Nine gaps of a second and one of 91: 91 % of all moments lie in the long one, and wait 45.5 s on average."""
    expected = (9 * 1**2 + 91**2) / (2 * 100)
    assert seconds_after([*[1.0] * 9, 91.0] * 2000) == pytest.approx(expected, rel=0.02)


def test_what_was_is_forgotten() -> None:
    assert seconds_after([*[1000.0] * 5000, *[2.0] * 20_000]) == pytest.approx(1.0, rel=0.01)


@given(st.lists(st.floats(-1e9, 1e9), max_size=50))
def test_no_gap_ends_it(gaps: list[float]) -> None:
    """Clocks may stand still, or jump."""
    assert 0 < seconds_after(gaps) <= max(FIRST_SECONDS, *map(abs, gaps), 0.0)


def test_a_clock_that_stands_still_never_takes_it_to_nothing() -> None:
    assert seconds_after([0.0] * 100_000) == pytest.approx(0.0005, rel=0.01)
