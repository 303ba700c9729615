"""Metrics against worked examples, and properties that hold for any text and any logits."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from validation import metrics

tokens = st.lists(st.integers(0, 9), max_size=12)
rows = st.lists(st.floats(-30, 30), min_size=5, max_size=5)


@pytest.mark.parametrize(
    ("answer", "reference", "is_same"),
    [(" The answer, is 42.\n", "answer is 42", True), ("42", "43", False), ("", "42", False)],
)
def test_exact_match_ignores_case_punctuation_articles_and_space(answer, reference, is_same):
    assert metrics.exact_match(answer, reference) is is_same


@pytest.mark.parametrize(
    ("answer", "reference", "scores"),
    [
        ("red red blue", "red green", (2 / 5, 2 / 5, 2 / 5)),  # common words count as often as both have them
        ("one two three four", "four three two one", (1.0, 0.25, 1.0)),  # only ROUGE-L sees order
        ("", "", (1.0, 1.0, 1.0)),
        ("", "word", (0.0, 0.0, 0.0)),
    ],
)
def test_closeness_on_worked_examples(answer, reference, scores):
    """ROUGE-1, ROUGE-L and token F1."""
    assert metrics.closeness(answer, reference) == pytest.approx(scores)


@given(tokens, tokens)
def test_token_agreement_is_by_position_and_one_only_for_equal_answers(ours, theirs):
    agreement = metrics.token_agreement(ours, theirs)
    assert 0.0 <= agreement <= 1.0
    assert (agreement == 1.0) == (ours == theirs)
    assert agreement == metrics.token_agreement(theirs, ours)
    assert metrics.token_agreement([1, 2, 3, 4], [1, 9, 3]) == 0.5


def test_a_loss_is_the_mean_over_the_tokens_and_a_uniform_guess_has_the_vocabulary_as_perplexity():
    logits = torch.tensor([[0.0, 0.0, 0.0], [5.0, 0.0, 0.0], [9.0, 9.0, 9.0]])
    expected = (math.log(3) + math.log(1 + 2 * math.exp(-5))) / 2
    assert metrics.loss(logits, (2, 0)) == pytest.approx(expected)
    assert metrics.perplexity(metrics.loss(torch.zeros(3, 7), [0, 6, 3])) == pytest.approx(7.0)
    assert metrics.perplexity(metrics.loss(torch.tensor([[0.0, 50.0]]), [1])) == pytest.approx(1.0)
    assert math.isfinite(metrics.perplexity(metrics.loss(torch.tensor([[0.0, 1e6]]), [0])))


@given(rows, rows, st.floats(-5, 5))
def test_kl_is_the_sum_over_the_reference_never_negative_and_does_not_see_a_constant(ours, theirs, shift):
    reference, other = torch.tensor(ours), torch.tensor(theirs)
    divergence = metrics.kl_divergence(reference, other)
    assert divergence >= 0.0
    assert metrics.kl_divergence(reference, reference) == 0.0
    assert metrics.kl_divergence(reference, other + shift) == pytest.approx(divergence, rel=1e-3, abs=1e-4)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    worked = metrics.kl_divergence(torch.tensor([0.75, 0.25]).log(), torch.tensor([0.5, 0.5]).log())
    assert worked == pytest.approx(expected)
    both = metrics.kl_divergence(torch.stack((reference, reference)), torch.stack((other, reference)))
    assert both == pytest.approx(divergence / 2)


@pytest.mark.parametrize(
    ("answer", "part", "expected"),
    [("It is The 42.", "42", True), ("142", "42", False), ("a New York taxi", "new york", True), ("any", "the", False)],
)
def test_an_answer_contains_whole_normalised_words(answer, part, expected):
    assert metrics.contains(answer, part) == expected


def bounded(values, groups=None):
    """The comparison of values, each in a group of its own where `groups` does not tell."""
    return metrics.non_inferiority(values, range(len(values)) if groups is None else groups)


def test_answers_on_the_same_documents_count_as_one_observation():
    """Copies of each group's value narrow nothing; taken as independent, they would."""
    rng = random.Random(3)
    values = [rng.choice((-1.0, 0.0, 0.0, 0.0)) for _ in range(60)]
    copies = [value for value in values for _ in range(10)]
    copied = bounded(copies, [index // 10 for index in range(600)])
    assert copied.lower == pytest.approx(bounded(values).lower)
    assert bounded(copies).lower > copied.lower + 0.03


def test_few_losses_pass_in_many_prompts_alone_large_groups_count_for_more_and_one_group_bounds_nothing():
    assert not bounded([-1.0, *[0.0] * 99]).holds
    assert bounded([-1.0, *[0.0] * 999]).holds
    assert bounded([1.0, 0.0, 0.0, 0.0], ["a", "b", "b", "b"]).difference == 0.25
    found = bounded([0.0, 0.0], ["same", "same"])
    assert (found.lower, found.holds) == (-math.inf, False)
    assert metrics.non_inferiority([], []) is None
