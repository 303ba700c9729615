"""Thresholds lie between harmless and trap deviations, and candidates come by what they compute."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from engine_wrapper.sequence_work import sample_of
from semblend_trt.plan import WINDOW_TOKENS, SpanCheck
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from validation.calibration.command import identity_of
from validation.calibration.deviations import DeviationCollector, PromptDeviations
from validation.calibration.search import (
    SAMPLE_EVERY,
    WITNESS_EVERY,
    Candidate,
    Found,
    Search,
    candidates,
    computed_share,
    sampled_checks,
    thresholds,
    unseen_share,
    window_thresholds,
    witness_bounds,
    witnessed,
)
from validation.calibration.trials import Rule, Trials
from validation.families.catalog import FamilyRequest, write_cases
from validation.measurement import ServingSettings
from validation.models import PROFILE_NAME, shipped_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from validation.cases import Case
    from validation.embedded_engine import EmbeddedEngines
    from validation.samples import Sample

LAYERS = 4
LENGTHS = (100, 100)


def prompts(means: tuple[float, float], seed: int) -> list[PromptDeviations]:
    """Ten prompts of two spans whose tokens deviate around `means`, in every layer."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(10):
        spans = [
            mean * rng.uniform(0.5, 1.5, size=(LAYERS, length)) for mean, length in zip(means, LENGTHS, strict=True)
        ]
        found.append(PromptDeviations("family", np.concatenate(spans, axis=1).astype(np.float32), LENGTHS, 0, 200))
    return found


HARMLESS, TRAPS = prompts((0.04, 0.05), 1), prompts((0.05, 0.26), 2)


def test_one_threshold_lies_in_the_gap_between_the_spans() -> None:
    found = thresholds(HARMLESS, TRAPS, layer=1)
    assert found == sorted(found)
    gap = found[-1]
    assert 0.06 < gap < 0.24
    assert all(0.03 < value < 0.08 for value in found[:-1])


def test_other_prompts_of_the_same_families_nominate_the_same_thresholds_or_their_neighbours() -> None:
    steps = [
        [math.log(value, 1.2) for value in thresholds(prompts((0.04, 0.05), seed), prompts((0.05, 0.26), seed + 50), 1)]
        for seed in range(3, 8)
    ]
    assert all(step == pytest.approx(round(step)) for found in steps for step in found)
    assert max(found[-1] for found in steps) - min(found[-1] for found in steps) <= 1.01


def test_without_traps_and_without_prompts_nothing_is_made_up_and_a_profile_can_hold_it() -> None:
    assert thresholds([], TRAPS, 1) == []
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
def test_the_computed_share_is_that_of_the_layers_and_tokens(
    found: list[PromptDeviations], check: dict[str, float], heads: int, share: float
) -> None:
    assert computed_share(ProfileCheck(**check), heads, found, LAYERS) == pytest.approx(share)


def test_samples_are_tried_at_thresholds_of_harmless_tokens_and_cost_what_they_compare() -> None:
    dense = ProfileCheck(layer=2, threshold=0.1)
    first, second = sampled_checks(dense, HARMLESS)
    assert dense.threshold > first.sample_threshold > second.sample_threshold > 0.05
    # Of 100 tokens the first window, and of the 68 behind it one in 8.
    loose = first.model_copy(update={"sample_threshold": 1.0})
    assert computed_share(loose, 0, HARMLESS, LAYERS) == pytest.approx((WINDOW_TOKENS + 9) / 100 * 0.5)
    assert computed_share(loose, 0, HARMLESS, LAYERS) <= computed_share(second, 0, HARMLESS, LAYERS) < 0.5
    # A sample that lets nothing pass leaves the whole check.
    strict = first.model_copy(update={"sample_threshold": 0.0})
    assert computed_share(strict, 0, HARMLESS, LAYERS) == computed_share(dense, 0, HARMLESS, LAYERS)
    assert sampled_checks(ProfileCheck(layer=2, threshold=0.01), HARMLESS)[0].sample_threshold == 0.01


def test_what_a_sample_did_not_see_is_told() -> None:
    values = np.zeros((2, 96), dtype=np.float32)
    compared = sample_of([96], SAMPLE_EVERY, 0)
    hidden = next(token for token in range(64, 96) if token not in compared)
    values[1, [5, hidden]] = 0.9
    prompt = PromptDeviations("f", values, (96,), 0, 96)
    check = ProfileCheck(layer=1, threshold=0.5, sample_every=SAMPLE_EVERY, sample_threshold=0.2)
    # Token 5 is in the first window, which is checked with the next one: only itself is computed.
    kept, seen = prompt.kept_and_compared(SpanCheck(**check.model_dump()), 0)
    assert np.flatnonzero(~kept).tolist() == [5]
    assert seen[:64].all()
    assert unseen_share(check, 0, [prompt]) == pytest.approx(1 / 95)
    assert unseen_share(check.model_copy(update={"sample_every": 0}), 0, [prompt]) == 0.0


def test_heads_are_computed_and_what_lies_behind_them_is_checked_span_by_span() -> None:
    values = np.array([[0.0] * 6, [9.0, 9.0, 0.1, 9.0, 0.3, 0.1]], dtype=np.float32)
    prompt = PromptDeviations("f", values, (1, 2, 3), 4, 10)
    assert prompt.kept(None, 1).tolist() == [False, False, True, False, True, True]
    assert prompt.kept(SpanCheck(1, 0.2), 1).tolist() == [False, False, True, False, False, True]
    assert prompt.kept(SpanCheck(1, 0.2, max_span_share=0.4), 1).tolist() == [False, False, True, False, False, False]
    assert not prompt.kept(SpanCheck(1, 0.2), 3).any()


def test_thresholds_of_windows_lie_above_most_harmless_windows_and_below_that_of_tokens() -> None:
    found = window_thresholds(HARMLESS, 1)
    assert found == sorted(found)
    assert all(0.03 < value < 0.06 for value in found)
    assert window_thresholds([], 1) == []
    checks = [each.check for each in candidates(HARMLESS, TRAPS, LAYERS) if each.check is not None]
    assert {check.window_threshold for check in checks if check.layer == 1} == {None, *found}
    assert all(check.window_threshold is None or check.window_threshold < check.threshold for check in checks)


def test_candidates_come_by_computed_share_and_each_can_be_a_profile() -> None:
    found = candidates(HARMLESS, TRAPS, LAYERS)
    assert found[0] == Candidate("position_fix", 0.0)
    shares = [each.computed_share for each in found]
    assert shares == sorted(shares)
    assert shares[-1] < 1.0
    assert {each.boundary for each in found if each.policy == "boundary"} == {1, 2, 3}
    assert {(each.check.layer, each.head_tokens) for each in found if each.check is not None} == {
        (layer, head) for layer in (1, 2, 3) for head in (0, 8)
    }
    assert [each.full_layers for each in found if each.name == "boundary 2"] == [2]


def test_means_are_of_each_span_and_of_its_windows() -> None:
    values = np.array([[1.0, 3.0, *[5.0] * WINDOW_TOKENS, 7.0]], dtype=np.float32)
    prompt = PromptDeviations("f", values, (2, WINDOW_TOKENS + 1), 0, values.size)
    assert prompt.span_means(0).tolist() == [2.0, pytest.approx(5.0 + 2.0 / (WINDOW_TOKENS + 1))]
    assert prompt.window_means(0).tolist() == [2.0, 5.0, 7.0]


def test_bounds_of_witnesses_lie_above_all_that_harmless_prompts_showed(make_sample: Callable[..., Sample]) -> None:
    shown = [(), (0.0, 0.02), (0.0, 0.3)]
    low, high = witness_bounds(make_sample(largest_witness=each) for each in shown)
    assert 0.0 < low < 2e-3
    assert 0.3 * 1.2 < high <= 0.3 * 1.2**2
    assert witness_bounds([make_sample(largest_witness=())]) == []
    alone = Candidate("verified", 0.2, check=ProfileCheck(layer=1, threshold=0.5))
    found = witnessed(alone, (low, high))
    assert alone.computed_share < found.computed_share < alone.computed_share + 0.01
    assert (found.check.witness_every, found.check.witness_bounds) == (WITNESS_EVERY, (low, high))
    assert found.name.startswith(alone.name)


FAMILIES = {"header_trap": "trap", "reordered": "harmless"}
SETTINGS = ServingSettings(str(shipped_model()), max_tokens=8, batch=8)


@pytest.fixture(scope="module")
def trials(shipped: EmbeddedEngines) -> Callable[[int], Trials]:
    """Trials with prompts of a seed, whose cold answers are served once."""
    collector = DeviationCollector(shipped.runner.model, shipped.facts, SETTINGS.min_span)

    def write(seed: int, name: str, first: int, count: int) -> list[Case]:
        asked = FamilyRequest((name,), groups=count, questions=1, tokens=512, seed=seed, first=first)
        return write_cases(shipped, asked)

    return functools.cache(lambda seed: Trials(shipped, functools.partial(write, seed), SETTINGS, seed, collector))


@pytest.fixture
def search(
    shipped: EmbeddedEngines, trials: Callable[[int], Trials], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[float], Search]:
    """A search in the two lowest layers, where no check sees the header trap, that accepts a loss of `margin`. Prompts
    are few, so witnesses are many."""
    monkeypatch.setattr("engine_wrapper.sequence_work.LEAST_WITNESSES", 100)
    namespace, geometry = identity_of(shipped, SETTINGS)

    def written(candidate: Candidate) -> Path:
        path, check, head = tmp_path / PROFILE_NAME, candidate.check, candidate.head_tokens
        given = {"policy": candidate.policy, "check": check, "boundary": candidate.boundary, "head_tokens": head}
        ReuseProfile.made_for(namespace, geometry, **given).write(path)
        return path

    def make(margin: float) -> Search:
        rule = Rule((4,), margin, 0.95, proof=False)
        return Search(2, FAMILIES, trials(3), rule, lambda _: (trials(4), rule), written, 50, print)

    return make


def test_where_no_check_holds_witnesses_are_tried_behind_those_that_let_least_pass(
    search: Callable[[float], Search],
) -> None:
    found = search(0.05).run()
    assert found.winner.check.layer == 1
    assert found.winner.check.witness_every
    assert found.witnesses.is_on
    assert {each.line.family for each in found.comparisons} == set(FAMILIES)
    assert any(each.line.reused > 0 for each in found.comparisons if each.line.family == "reordered")


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_a_winner_has_witnesses_where_they_catch_what_it_has_lost(
    search: Callable[[float], Search], threshold: float
) -> None:
    alone, found = Candidate("verified", 0.2, check=ProfileCheck(layer=1, threshold=threshold)), Found()
    assert search(1.0)._is_confirmed(found, alone, list(FAMILIES))
    loses = threshold == 1.0
    assert found.witnesses.is_on == loses == bool(found.winner.check.witness_every)
    assert (found.witnesses.lost > 0, found.witnesses.caught > 0) == (loses, loses)
