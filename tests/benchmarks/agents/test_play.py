"""KL and changed answers of agents' turns."""

import math

import pytest

from benchmarks.agents.play import Turn, distances


def turn(answer, *rows):
    return Turn(1.0, 10, 0, answer, [{token: math.log(p) for token, p in row.items()} for row in rows])


def test_answers_are_compared_up_to_the_first_other_token():
    cold = turn([1, 2, 3], {1: 0.9, 5: 0.1}, {2: 0.5, 6: 0.5}, {3: 1.0})
    warm = turn([1, 6, 9], {1: 0.9, 5: 0.1}, {2: 0.25, 6: 0.75}, {9: 1.0})
    [kl], changed = distances([cold], [warm])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert (kl, changed) == (pytest.approx(expected / 2), 1)
    assert distances([cold], [cold]) == ([pytest.approx(0)], 0)
