"""The bound on known cases: nothing lost, too much lost, too few groups, and answers that hang together."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from validation.noninferiority import non_inferiority


def test_equal_answers_everywhere_differ_by_nothing() -> None:
    found = non_inferiority([0.0] * 200, [index // 4 for index in range(200)])
    assert found is not None
    assert (found.difference, found.lower, found.samples, found.groups) == (0.0, 0.0, 200, 50)
    assert found.holds


def test_a_loss_everywhere_has_no_spread_and_fails() -> None:
    found = non_inferiority([-1.0] * 20, range(20))
    assert found is not None
    assert (found.difference, found.lower, found.holds) == (-1.0, -1.0, False)


def test_the_bound_is_that_of_the_normal_approximation_on_many_groups() -> None:
    """One value a group: mean - 1.645 * sd / sqrt(n), up to the bootstrap's own noise."""
    values = np.random.default_rng(5).normal(0.1, 1.0, 2_000)
    found = non_inferiority(values.tolist(), range(2_000))
    assert found is not None
    expected = values.mean() - 1.6449 * values.std() / math.sqrt(2_000)
    assert found.lower == pytest.approx(expected, abs=2e-3)


def test_answers_on_the_same_documents_count_as_one_observation() -> None:
    """Copies of each group's value narrow nothing; taken as independent, they would."""
    rng = random.Random(3)
    values = [rng.choice((-1.0, 0.0, 0.0, 0.0)) for _ in range(60)]
    alone = non_inferiority(values, range(60))
    copied = non_inferiority([value for value in values for _ in range(10)], [index // 10 for index in range(600)])
    independent = non_inferiority([value for value in values for _ in range(10)], range(600))
    assert alone is not None
    assert copied is not None
    assert independent is not None
    assert copied.lower == pytest.approx(alone.lower)
    assert independent.lower > copied.lower + 0.03


def test_few_losses_in_few_prompts_do_not_pass_and_in_many_they_do() -> None:
    few = non_inferiority([-1.0, *[0.0] * 99], range(100))
    many = non_inferiority([-1.0, *[0.0] * 999], range(1_000))
    assert few is not None
    assert many is not None
    assert not few.holds
    assert many.holds


def test_large_groups_count_for_more() -> None:
    found = non_inferiority([1.0, 0.0, 0.0, 0.0], ["a", "b", "b", "b"])
    assert found is not None
    assert found.difference == 0.25


def test_one_group_bounds_nothing_and_no_prompt_gives_nothing() -> None:
    found = non_inferiority([0.0, 0.0], ["same", "same"])
    assert found is not None
    assert (found.lower, found.holds) == (-math.inf, False)
    assert non_inferiority([], []) is None


@settings(max_examples=25)
@given(st.lists(st.sampled_from((-1.0, 0.0, 1.0)), min_size=2, max_size=40), st.integers(0, 2**32))
def test_the_bound_is_seeded_and_not_above_the_difference_by_more_than_noise(values: list[float], seed: int) -> None:
    first, second = (non_inferiority(values, range(len(values)), seed=seed, resamples=999) for _ in range(2))
    assert first is not None
    assert first == second
    assert min(values) <= first.lower <= first.difference


@pytest.mark.parametrize(
    ("values", "groups", "sentence"),
    [([0.0], ["a", "b"], "1 differences come with 2 groups"), ([math.nan, 0.0], ["a", "b"], "not finite")],
)
def test_a_wrong_comparison_is_refused(values: list[float], groups: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        non_inferiority(values, groups)
