"""Thresholds lie between harmless and trap deviations, and candidates come by what they compute."""

import math

import numpy as np
import pytest

from semblend_trt.reuse_profile import ProfileCheck
from validation.calibration.calibration import candidates, computed_share, thresholds, window_thresholds
from validation.calibration.deviations import PromptDeviations

LAYERS = 4
LENGTHS = (100, 100)


def prompts(means, seed, layers=LAYERS):
    """Ten prompts of two spans whose tokens deviate around `means`, in every layer."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(10):
        spans = [
            mean * rng.uniform(0.5, 1.5, size=(layers, length)) for mean, length in zip(means, LENGTHS, strict=True)
        ]
        found.append(PromptDeviations("family", np.concatenate(spans, axis=1).astype(np.float32), LENGTHS, 0, 200))
    return found


HARMLESS, TRAPS = prompts((0.04, 0.05), 1), prompts((0.05, 0.26), 2)


def test_thresholds_are_powers_of_which_one_lies_in_the_gap_between_the_spans():
    """Other prompts of the same families nominate the same ones or their neighbours."""
    gaps = []
    for seed in range(1, 6):
        found = thresholds(prompts((0.04, 0.05), seed), prompts((0.05, 0.26), seed + 50), layer=1)
        steps = [math.log(value, 1.2) for value in found]
        assert steps == sorted(steps) == pytest.approx([round(step) for step in steps])
        assert 0.06 < found[-1] < 0.24
        assert all(0.03 < value < 0.08 for value in found[:-1])
        gaps.append(steps[-1])
    assert max(gaps) - min(gaps) <= 1.01


def test_without_traps_and_without_prompts_nothing_is_made_up_and_a_profile_can_hold_it():
    assert thresholds([], TRAPS, 1) == window_thresholds([], 1) == []
    assert all(0.03 < value < 0.08 for value in thresholds(HARMLESS, [], 1))
    far = prompts((2.0, 3.0), 3)
    assert thresholds(far, far, 1) == []


@pytest.mark.parametrize(
    ("found", "check", "heads", "share"),
    [
        (HARMLESS, {"threshold": 0.1, "layer": 1}, 0, 0.25),
        (HARMLESS, {"threshold": 0.1, "layer": 3}, 0, 0.75),
        (HARMLESS, {"threshold": 0.0, "layer": 1}, 0, 1.0),
        pytest.param(TRAPS, {"threshold": 0.1, "layer": 2, "max_span_share": 0.5}, 0, 0.75, id="one of two spans"),
        pytest.param(HARMLESS, {"threshold": 0.1, "layer": 2}, 8, 1 - 0.5 * (100 - 8) / 100, id="heads"),
        pytest.param(HARMLESS, {"threshold": 0.1, "layer": 2}, 100, 1.0, id="nothing but heads"),
    ],
)
def test_the_computed_share_is_that_of_the_layers_and_tokens(found, check, heads, share):
    assert computed_share(ProfileCheck(**check), heads, found, LAYERS) == pytest.approx(share)


def test_candidates_come_by_computed_share_and_each_can_be_a_profile():
    found = candidates(HARMLESS, TRAPS, LAYERS)
    shares = [each.computed_share for each in found]
    assert shares == sorted(shares)
    assert shares[-1] < 1.0
    heads = {(each.check.layer, each.head_tokens) for each in found}
    assert heads == {(layer, head) for layer in (1, 2, 3) for head in (0, 8)}
    assert len({each.name for each in found}) == len(found)


@pytest.mark.promise(
    "engines",
    "A check lies above a layer with full attention: no other is calibrated, and a profile with another is refused "
    "by name",
)
def test_no_check_is_tried_that_sees_no_further_than_a_window():
    found = candidates(HARMLESS, TRAPS, LAYERS, lowest_check=2)
    assert found == [each for each in candidates(HARMLESS, TRAPS, LAYERS) if each.check.layer > 1]
