"""Thresholds lie between harmless and trap deviations, and candidates come by what they compute."""

import math
from dataclasses import replace

import numpy as np
import pytest

from engine_wrapper.deviation_check import sample_of
from semblend_trt.plan import WINDOW_TOKENS, SpanCheck
from semblend_trt.reuse_profile import ProfileCheck, leaves_unchecked
from validation.calibration import search
from validation.calibration.deviations import PromptDeviations
from validation.calibration.search import SAMPLE_EVERY, candidates, computed_share, sampled_checks, thresholds
from validation.calibration.trials import Comparison, Rule, Verdict
from validation.families.catalog import Kind
from validation.metrics import evidence
from validation.samples import line_of

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
    assert thresholds([], TRAPS, 1) == search.window_thresholds([], 1) == []
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


def test_samples_are_tried_at_bounds_of_harmless_windows_and_cost_what_they_compare():
    dense = ProfileCheck(layer=2, threshold=0.1)
    found = sampled_checks(dense, HARMLESS)
    assert {check.sample_every for check in found} == {SAMPLE_EVERY, SAMPLE_EVERY // 2}
    assert all(0.03 < check.sample_threshold < dense.threshold for check in found)
    for window in (WINDOW_TOKENS, WINDOW_TOKENS // 2):
        own = [each for each in found if (each.sample_every, each.window_tokens) == (SAMPLE_EVERY, window)]
        # Of 100 tokens the first window, and one of each stratum behind it.
        loose = own[0].model_copy(update={"sample_threshold": 1.0})
        compared = window + -(-(100 - window) // SAMPLE_EVERY)
        assert computed_share(loose, 0, HARMLESS, LAYERS) == pytest.approx(compared / 100 * 0.5)
        shares = [computed_share(check, 0, HARMLESS, LAYERS) for check in own]
        assert computed_share(loose, 0, HARMLESS, LAYERS) <= shares[-1] < shares[0] <= 0.5
    # Windows that the check judges as well keep their length.
    windowed = sampled_checks(dense.model_copy(update={"window_threshold": 0.05}), HARMLESS)
    assert {check.window_tokens for check in windowed} == {WINDOW_TOKENS}
    # A sample that lets nothing pass leaves the whole check.
    strict = found[0].model_copy(update={"sample_threshold": 0.0})
    assert computed_share(strict, 0, HARMLESS, LAYERS) == computed_share(dense, 0, HARMLESS, LAYERS)


def test_the_mean_of_a_sample_is_that_of_what_it_compares_in_each_window():
    values = np.arange(2 * 70, dtype=np.float32).reshape(2, 70)
    prompt = PromptDeviations("f", values, (33, 37), 0, 70)
    compared = sample_of([33, 37], 8, WINDOW_TOKENS, 0)
    windows = [range(32), range(32, 33), range(33, 65), range(65, 70)]
    means = [np.mean([values[1, token] for token in compared if token in window]) for window in windows]
    assert prompt.sample_means(1, 8, WINDOW_TOKENS) == pytest.approx(means)


def test_what_a_sample_did_not_see_is_told():
    values = np.zeros((2, 96), dtype=np.float32)
    compared = sample_of([96], SAMPLE_EVERY, WINDOW_TOKENS, 0)
    hidden = next(token for token in range(64, 96) if token not in compared)
    values[1, [5, hidden]] = 0.9
    prompt = PromptDeviations("f", values, (96,), 0, 96)
    check = ProfileCheck(layer=1, threshold=0.5, sample_every=SAMPLE_EVERY, sample_threshold=0.2)
    # Token 5 is in the first window, which is checked with the next one: only itself is computed.
    kept, seen = prompt.kept_and_compared(SpanCheck(**check.model_dump()), 0)
    assert np.flatnonzero(~kept).tolist() == [5]
    assert seen[:64].all()
    assert search.unseen_share(check, 0, [prompt]) == pytest.approx(1 / 95)
    assert search.unseen_share(check.model_copy(update={"sample_every": 0}), 0, [prompt]) == 0.0


def test_heads_are_computed_and_what_lies_behind_them_is_checked_span_by_span():
    values = np.array([[0.0] * 6, [9.0, 9.0, 0.1, 9.0, 0.3, 0.1]], dtype=np.float32)
    prompt = PromptDeviations("f", values, (1, 2, 3), 4, 10)
    assert prompt.kept(None, 1).tolist() == [False, False, True, False, True, True]
    assert prompt.kept(SpanCheck(1, 0.2), 1).tolist() == [False, False, True, False, False, True]
    assert prompt.kept(SpanCheck(1, 0.2, max_span_share=0.4), 1).tolist() == [False, False, True, False, False, False]
    assert not prompt.kept(SpanCheck(1, 0.2), 3).any()


def test_thresholds_of_windows_lie_above_most_harmless_windows_and_below_that_of_tokens():
    found = search.window_thresholds(HARMLESS, 1)
    assert found == sorted(found)
    assert all(0.03 < value < 0.06 for value in found)
    checks = [each.check for each in candidates(HARMLESS, TRAPS, LAYERS) if each.check is not None]
    assert {check.window_threshold for check in checks if check.layer == 1} == {None, *found}
    assert all(check.window_threshold is None or check.window_threshold < check.threshold for check in checks)


def test_candidates_come_by_computed_share_and_each_can_be_a_profile():
    found = candidates(HARMLESS, TRAPS, LAYERS)
    assert found[0] == search.Candidate("position_fix", 0.0)
    shares = [each.computed_share for each in found]
    assert shares == sorted(shares)
    assert shares[-1] < 1.0
    assert {each.boundary for each in found if each.policy == "boundary"} == {1, 2, 3}
    heads = {(each.check.layer, each.head_tokens) for each in found if each.check is not None}
    assert heads == {(layer, head) for layer in (1, 2, 3) for head in (0, 8)}
    assert [each.full_layers for each in found if each.name == "boundary 2"] == [2]


def test_no_check_is_tried_that_sees_no_further_than_a_window():
    found = candidates(HARMLESS, TRAPS, LAYERS, lowest_check=2)
    assert found == [each for each in candidates(HARMLESS, TRAPS, LAYERS) if not each.check or each.check.layer > 1]


def test_means_are_of_each_span_and_of_its_windows():
    values = np.array([[1.0, 3.0, *[5.0] * WINDOW_TOKENS, 7.0]], dtype=np.float32)
    prompt = PromptDeviations("f", values, (2, WINDOW_TOKENS + 1), 0, values.size)
    assert prompt.span_means(0).tolist() == [2.0, pytest.approx(5.0 + 2.0 / (WINDOW_TOKENS + 1))]
    assert prompt.window_means(0).tolist() == [2.0, 5.0, 7.0]


DEEP_LAYERS = 12
DEEP, DEEP_TRAPS = prompts((0.04, 0.05), 1, DEEP_LAYERS), prompts((0.05, 0.26), 2, DEEP_LAYERS)


def share_of(candidate):
    return candidate.computed_share


def checks_of(layer):
    return [each for each in candidates(DEEP, DEEP_TRAPS, DEEP_LAYERS) if each.check and each.check.layer == layer]


class Answers:
    """In place of trials. What `judged` returns for a candidate and a title is a verdict: by default the candidates in
    `holding` lose nothing, all others fail; what was compared is `told`."""

    def __init__(self, holding=(), told=(), judged=None):
        self.asked, self.told = [], told
        self.judged = judged or (lambda each, _: Verdict(told, inferior=None if each in holding else "trap"))

    def known(self, families, count, tell):
        return list(families)

    def deviations(self, family, count):
        return [replace(prompt, family=family) for prompt in (DEEP_TRAPS if family == "trap" else DEEP)]

    def judge(self, path, families, rule, title):
        self.last = families, rule
        return self.judged(self.asked[-1], title)

    def search(self, generations=(), sample_tries=2, **options):
        rule = Rule((1,), 0.1, 0.95, proof=False)
        kinds = {"harmless": Kind.HARMLESS.value, "trap": Kind.TRAP.value}
        given = (DEEP_LAYERS, kinds, self, rule, lambda *_: (self, rule), self.asked.append, 99, sample_tries)
        return search.Search(*given, generations, lambda _: None, **options)


def confirmed_in_order(found):
    return [each.candidate for each in found.tried if each.stage == "confirm"]


def test_the_deepest_of_checks_that_compute_about_the_same_wins_and_then_the_cheapest_sample_of_it():
    deeper, strictest = checks_of(2)[0], [max(checks_of(layer), key=share_of) for layer in (1, 2)]
    about = [each for each in checks_of(1) if each.computed_share < deeper.computed_share < 1.1 * each.computed_share]
    far = [each for each in checks_of(1) if 1.1 * each.computed_share < deeper.computed_share]
    assert Answers([*strictest, about[-1], deeper]).search().run().winner == deeper
    assert Answers([*strictest, about[-1]]).search().run().winner == about[-1]
    assert Answers([*strictest, far[-1], deeper]).search().run().winner == far[-1]
    samples = [
        replace(deeper, check=check, computed_share=computed_share(check, deeper.head_tokens, DEEP, DEEP_LAYERS))
        for check in sampled_checks(deeper.check, DEEP)
    ]
    found = Answers([*strictest, about[-1], deeper, *samples]).search().run()
    assert found.winner == min(samples, key=share_of)
    assert confirmed_in_order(found) == [deeper, found.winner]


@pytest.mark.parametrize("evidence", [(), ("harmless", "trap"), ("harmless", "another")])
def test_what_leaves_text_unchecked_is_tried_where_the_families_can_justify_it(evidence):
    answers = Answers(judged=lambda *_: Verdict(()))
    search = answers.search(evidence=evidence)
    winner = search.run().winner
    is_justified = "another" not in evidence
    assert any(leaves_unchecked(each.policy, each.check) for each in answers.asked) == is_justified
    assert leaves_unchecked(winner.policy, winner.check) == is_justified
    answers.asked.clear()
    replace(search, screen=replace(search.screen, margin=0.2)).run()
    assert any(leaves_unchecked(each.policy, each.check) for each in answers.asked) == (not evidence)


@pytest.mark.parametrize("tries", [0, 1, 2])
def test_a_check_stays_confirmed_where_samples_of_it_are_not_and_few_of_these_are_tried(tries):
    dense = max(checks_of(1), key=share_of)

    def judged(each, title):
        is_sample = each.check is not None and each.check.sample_every > 0
        return Verdict((), inferior=None if each == dense or (is_sample and title.startswith("screen")) else "trap")

    found = Answers(judged=judged).search(sample_tries=tries).run()
    assert found.winner == dense
    tried = confirmed_in_order(found)
    assert tried[0] == dense
    assert tried[1:] == sorted(tried[1:], key=share_of)
    assert len(tried) == 1 + tries


def test_where_one_was_not_confirmed_the_strictest_of_its_layer_is_asked_before_the_others():
    """The prompts of a failed confirmation choose among what is left, so that a layer takes one of them at most."""
    again, dearest = [], checks_of(3)[-1]

    def judged(each, title):
        if title.startswith("screen again"):
            families, rule = answers.last
            assert (families, rule.confidence) == (("trap",), 0.95)
            again.append(each)
        elif title.startswith("screen"):
            return Verdict((), inferior=None if each.full_layers in (1, 2, 3) and each.check else "trap")
        return Verdict((), undecided=() if each == dearest else ("trap",))

    answers = Answers(judged=judged)
    found = answers.search(sample_tries=0).run()
    assert found.winner == dearest
    told = confirmed_in_order(found)
    refuted = [each.full_layers for each in told[: told.index(dearest)]]
    assert len(refuted) == len(set(refuted)) > 0
    assert {max(checks_of(layer), key=share_of) for layer in (1, 2)} <= set(again)
    assert [each.stage for each in found.tried].count("screen again") == len(again)


def test_a_confirmation_begins_where_others_were_stopped_that_compute_most_and_then_where_it_has_lost_most(make_sample):
    sample = make_sample()

    def lost(family, share):
        found = evidence([-share] * 4, range(4))
        return Comparison(line_of(family, "verified", [sample], {sample.case_id: sample}), found, None, found)

    low, high, own = (search.Candidate("boundary", layers / DEEP_LAYERS, boundary=layers) for layers in (1, 3, 4))
    stopped = [
        search.Tried(low, "screen", Verdict((), inferior="shallow")),
        search.Tried(high, "screen", Verdict((), undecided=("deep",))),
        search.Tried(own, "screen", Verdict((lost("small", 0.01), lost("large", 0.02), lost("deep", 0.0)))),
    ]
    families = ["none", "small", "large", "shallow", "deep"]
    order = search._most_doubtful_first(search.Found(tried=stopped), own, families)
    assert order == ["deep", "shallow", "large", "small", "none"]


@pytest.mark.parametrize(
    ("holding", "reached", "allowed"), [((1, 3), 3, 3), ((1,), 3, 1), ((3,), 3, 0), ((1, 3), 1, 1), ((1, 3), 0, 0)]
)
def test_a_profile_allows_the_generations_that_hold_and_that_prompts_were_served_from(
    make_sample, holding, reached, allowed
):
    sample = make_sample(generation=reached)
    same = evidence([0.0, 0.0], [0, 1], 0.1, 0.95)
    told = Comparison(line_of("harmless", "verified", [sample], {sample.case_id: sample}), same, None, same)
    first = max(checks_of(1), key=share_of)
    answers = Answers([first, *(replace(first, generations=each) for each in holding)], (told,))
    found = answers.search((1, 3)).run()
    assert found.winner == replace(first, generations=allowed)
    assert found.comparisons == (told,)
    names = [each.name for each in confirmed_in_order(found)]
    assert names[:2] == [first.name, f"{first.name} generations 1"]
