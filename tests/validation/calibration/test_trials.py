"""Trials serve plants that a check misses, add prompts until a family is decided, and compare with two cold runs."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from rich.progress import Progress

from benchmarks.evidence.seen_documents import executed_plans
from engine_wrapper.embedded.request import SamplingParams
from semblend_trt.errors import SemBlendError
from semblend_trt.reuse_profile import ReuseProfile
from validation.calibration import trials as judging
from validation.calibration.deviations import DeviationCollector
from validation.calibration.trials import PLANTED, TRIES, Comparison, Planter, Rule, Trials, Verdict, write_plants
from validation.cases import Tokeniser
from validation.embedded_engine import open_llm
from validation.families.catalog import FamilyRequest, write_cases
from validation.measurement import ServingSettings
from validation.metrics import evidence
from validation.models import PROFILE_NAME, shipped_model
from validation.samples import line_of

MIN_SPAN = 48
BLIND = {"threshold": 1.0, "max_span_share": 1.0, "window_threshold": None}


@pytest.fixture(scope="module")
def collector(shipped):
    return DeviationCollector(shipped.runner.model, shipped.facts, MIN_SPAN)


@pytest.fixture(scope="module")
def profile():
    return ReuseProfile.read(shipped_model() / PROFILE_NAME)


def with_check(profile, **fields):
    return profile.model_copy(update={"check": profile.check.model_copy(update=fields)})


def test_the_planter_takes_those_of_which_most_is_kept(shipped, collector, profile):
    plants = write_plants(shipped, FamilyRequest(seed=3), ["header_trap"], 8)
    planter = Planter(collector, Tokeniser(shipped, 8).tokenise)
    half = with_check(profile, threshold=0.8, window_threshold=None)
    chosen = planter.hardest(plants, half, 8)
    missed = planter.missed(chosen, half)
    assert missed == sorted(missed, reverse=True)
    assert missed[0] > 0
    assert chosen[:3] == planter.hardest(plants, half, 3)
    [prompt] = planter.deviations_of(chosen[:1])
    kept = prompt.kept(half.terms.check, half.head_tokens)
    assert missed[0] == pytest.approx(prompt.values[half.check.layer :, kept].astype(np.float64).sum())
    # What a policy computes whole is not missed.
    exact = profile.model_copy(update={"policy": "exact", "check": None, "head_tokens": 0})
    assert planter.missed(plants[:1], with_check(profile, threshold=0.0)) == planter.missed(plants[:1], exact) == [0.0]
    assert planter.missed(plants[:1], with_check(profile, **BLIND))[0] > 0.0


FEW = ("system_prompt", "far_header_trap")


@pytest.fixture
def trials(shipped, collector):
    """Prompts of 512 tokens of any family, but three groups only of those in FEW."""

    def write(family, first, count):
        asked = FamilyRequest((family,), groups=count, questions=1, tokens=512, seed=5, first=first)
        if family == PLANTED:
            return write_plants(shipped, asked, [family], count)
        cases = write_cases(shipped, asked)
        return cases[: max(0, 3 - first)] if family in FEW else cases

    settings = ServingSettings(str(shipped_model()), max_tokens=8, min_span=MIN_SPAN, batch=8)
    return Trials(shipped, write, settings, collector)


@pytest.mark.parametrize(
    ("family", "reached"), [("reordered", [0, 1, 2, 3]), ("header_trap", [0, 1, 2, 3]), ("prose", [0, 1])]
)
def test_donors_grow_through_as_many_generations_as_there_are_documents_for(
    shipped, profile, tmp_path, family, reached
):
    asked = FamilyRequest((family,), groups=1, questions=1, tokens=1_536, generations=3)
    [case], path = write_cases(shipped, asked), tmp_path / PROFILE_NAME
    [ungrown] = write_cases(shipped, replace(asked, generations=0))
    assert (case.prompt, case.donors[-1:]) == (ungrown.prompt, ungrown.donors)
    profile.model_copy(update={"generations": 3}).write(path)
    with open_llm(shipped_model(), shipped.runner.share(), {"PROFILE": str(path)}, pool_tokens=8_192) as llm:
        plans, used = executed_plans(llm), []
        for text in (*case.donors, case.prompt):
            tokens = [*shipped.tokenizer.encode(text)]
            [output] = llm.generate([tokens], SamplingParams(max_tokens=1))
            llm.settle()
            plan = plans.pop(output.request_id, None)
            used.append(None if plan is None else max(span.generation for span in plan.spans))
    assert used == [None, *reached]


def rule(*looks, proof=True, margin=0.5):
    return Rule(looks, margin, 0.95, proof)


def written(profile, folder, **fields):
    path = folder / PROFILE_NAME
    with_check(profile, **fields).write(path)
    return path


def test_a_candidate_is_served_the_plants_that_it_misses(trials, profile, tmp_path):
    assert trials.known([PLANTED], 2, lambda _: None) == [PLANTED]
    assert len(trials.deviations(PLANTED, TRIES)) == TRIES
    verdict = trials.judge(written(profile, tmp_path, layer=1, **BLIND), [PLANTED], rule(8, margin=0.1), "")
    [found] = verdict.comparisons
    assert (verdict.holds, verdict.inferior) == (False, PLANTED)
    assert found.line.samples == 8
    assert found.line.follows_donor > 0.5


def test_prompts_are_added_until_the_loss_is_bounded(trials, profile, tmp_path):
    verdict = trials.judge(written(profile, tmp_path), ["header_trap", "reordered"], rule(3, 6, 9, 12, 50), "")
    assert verdict.holds
    assert [each.line.family for each in verdict.comparisons] == ["header_trap", "reordered"]
    for each in verdict.comparisons:
        assert each.likelihood.lower >= -0.5
        assert each.exact_match.difference == 0.0
        assert abs(each.noise.difference) < 1e-4
        assert each.line.samples == each.likelihood.samples == each.likelihood.groups == 6


def test_the_progress_bar_counts_families_that_need_no_more_prompts(trials, profile, tmp_path, monkeypatch):
    shown, update = [], Progress.update

    def kept(bar, *given, **changes):
        update(bar, *given, **changes)
        shown.extend((task.completed, task.total) for task in bar.tasks)

    monkeypatch.setattr(Progress, "update", kept)
    names, path = ["header_trap", "reordered"], written(profile, tmp_path)
    for proof in (True, False):  # one family after the other, and both together
        assert trials.judge(path, names, rule(3, 6, 50, proof=proof), "").holds
    assert [each for each, _ in itertools.groupby(shown)] == [(0, 2), (1, 2), (2, 2), (0, 2), (2, 2)]
    shown.clear()
    assert not trials.judge(path, names, rule(2, 4, margin=0.01), "").holds
    assert set(shown) == {(0, 2)}


def test_a_policy_that_loses_fails_at_the_first_trap_and_nothing_more_is_served(trials, profile, tmp_path):
    path = written(profile, tmp_path, layer=1, **BLIND)
    verdict = trials.judge(path, ["header_trap", "reordered"], rule(8, margin=0.1), "")
    assert (verdict.inferior, len(verdict.comparisons)) == ("header_trap", 1)
    assert "fails at header_trap" in verdict.outcome()


def test_what_the_budget_leaves_open_is_not_accepted(trials, profile, tmp_path):
    """After it no other family is served."""
    names, path = ["reordered", "header_trap"], written(profile, tmp_path)
    verdict = trials.judge(path, names, rule(2, 4, margin=0.01), "")
    assert (verdict.holds, verdict.inferior, verdict.undecided) == (False, None, ("reordered",))
    assert "undecided at reordered" in verdict.outcome()
    assert [each.line.family for each in verdict.comparisons] == ["reordered"]
    screened = trials.judge(path, names, rule(2, 4, margin=0.01, proof=False), "")
    assert screened.holds
    assert [each.line.family for each in screened.comparisons] == names


def test_a_family_that_has_lost_too_much_in_a_quarter_of_the_budget_is_given_up(trials, profile, tmp_path, make_sample):
    blind = written(profile, tmp_path, layer=1, **BLIND)
    verdict = trials.judge(blind, ["header_trap"], rule(1, 2, 4, 8, margin=0.8), "")
    assert (verdict.inferior, verdict.undecided, verdict.comparisons[0].line.samples) == (None, ("header_trap",), 2)
    sample, asked = make_sample(), rule(250, 500, 1000, margin=0.01)
    for losses, gives_up in ((2, False), (3, True)):
        found = evidence([-1.0] * losses + [0.0] * (250 - losses), range(250))
        compared = Comparison(line_of("reordered", "verified", [sample], {sample.case_id: sample}), found, None, found)
        assert (compared.holds, compared.fails, asked.gives_up(compared, 250)) == (False, False, gives_up)
        assert not asked.gives_up(compared, 249)
        assert not replace(asked, proof=False).gives_up(compared, 250)


def test_prompts_of_which_there_are_few_can_only_rule_out(trials, profile, tmp_path):
    verdict = trials.judge(written(profile, tmp_path), ["system_prompt"], rule(2, 4, margin=0.01), "")
    assert verdict.holds
    assert verdict.comparisons[0].line.samples == 3
    blind = written(profile, tmp_path, layer=1, **BLIND)
    verdict = trials.judge(blind, ["far_header_trap"], rule(3, 6, 9, margin=0.01), "")
    assert verdict.comparisons[0].line.samples == 3
    assert (verdict.holds, verdict.inferior, verdict.undecided) == (False, None, ("far_header_trap",))


@pytest.mark.parametrize(
    ("ours", "holds", "fails"),
    [
        pytest.param([0.0] * 420, True, False, id="nothing lost"),
        pytest.param([0.0] * 300, False, False, id="too few to say"),
        pytest.param([-1.0] * 20 + [0.0] * 400, False, True, id="one answer of 21 lost"),
        pytest.param([-0.4, 0.4] * 400, False, False, id="noise alone"),
    ],
)
def test_a_family_holds_or_fails_by_the_bounds_of_its_likelihood(make_sample, ours, holds, fails):
    sample = make_sample()
    found = evidence(ours, range(len(ours)))
    line = line_of("reordered", "verified", [sample], {sample.case_id: sample})
    comparison = Comparison(line, found, None, found)
    assert (comparison.holds, comparison.fails) == (holds, fails)
    lost = evidence([-1.0] * 30, range(30))
    assert Comparison(line, found, lost, found).fails
    assert Verdict((comparison,)).holds


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("profile_mismatch", "does not take the profile"),
        ("check_needs_wrapper", "executes no plans"),
        ("self_check", "executes no plans"),
        ("attention_backend", "executes no plans"),
    ],
)
def test_an_engine_that_cannot_serve_a_candidate_ends_the_trial(make_sample, reason, told):
    with pytest.raises(SemBlendError, match=told):
        judging._check_candidate_was_tried([make_sample(), make_sample(reason=reason)])
    judging._check_candidate_was_tried([make_sample(reason=each) for each in (None, "deviation", "no_donor_match")])
