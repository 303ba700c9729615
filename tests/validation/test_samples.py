"""A sample stands beside cold's, and a line says what its samples add up to."""

from dataclasses import replace

import pytest
import torch

from validation.arms import Arm
from validation.cases import Case, Expectation
from validation.samples import Answer, Reuse, lines_of, sample_of

CASE = Case("case", "header_trap", "1k", ("donor",), "prompt", "42", True, Expectation.REUSE, "case", donor_answer="17")


def answer(text="42", reuse=None, loss=None):
    return Answer(1, 100, (1, 2), text, torch.tensor([[0.0, 1.0, 2.0]]), loss, None, reuse or Reuse())


@pytest.mark.parametrize(
    ("text", "match", "contains", "follows"),
    [("42", True, True, False), ("17", False, False, True), ("It holds 42.", False, True, False)],
)
def test_an_answer_is_right_or_holds_the_right_one_or_is_the_donors(text, match, contains, follows):
    sample = sample_of(Arm("position_fix"), CASE, answer(text), answer(), 8)
    assert (sample.exact_match, sample.contains_reference, sample.follows_donor) == (match, contains, follows)


def test_computed_share_counts_the_layers_below_the_check():
    """80 of 90 tokens beyond the engine's prefix are reused above the 2 lowest of 8 layers."""
    ours = answer(reuse=Reuse(exact_prefix_tokens=10, offered_tokens=85, checked_tokens=85, reused_tokens=80))
    sample = sample_of(Arm("verified", full_layers=2), CASE, ours, answer(), 8)
    assert sample.computed_share == pytest.approx((10 + 80 * 2 / 8) / 90)


def test_lines_are_by_family_and_arm_and_compare_with_cold(make_sample):
    arms = ("cold", "verified")
    counts = {"offered_tokens": 900, "reused_tokens": 880, "recomputed_tokens": 20}
    samples = [
        make_sample(workload=family, group=f"{family}-{i // 2}", arm=arm, exact_match=arm == "cold" or i > 0, **counts)
        for arm in arms
        for family in ("reordered", "header_trap")
        for i in range(4)
    ]
    samples = [replace(each, case_id=f"{each.workload}-{index % 4}") for index, each in enumerate(samples)]
    cold = {sample.case_id: sample for sample in samples if sample.arm == "cold"}
    lines = {(line.family, line.arm): line for line in lines_of(samples, cold)}
    assert len(lines) == 4
    verified = lines["header_trap", "verified"]
    assert (verified.samples, verified.groups, verified.exact_match) == (4, 2, 0.75)
    assert verified.exact_match_bound.difference == -0.25
    assert not verified.holds
    assert (verified.offered, verified.reused, verified.fires) == (3_600, 3_520, 4)
    assert verified.reused_share == pytest.approx(3_520 / 3_600)
    assert lines["reordered", "cold"].holds
