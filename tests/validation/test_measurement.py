"""Prefixes that are expected to be exact, answers along cold's own, an arm's settings and audit, and its samples."""

import json
import os
from dataclasses import replace

import pytest
import torch

from validation.arms import COLD, COLD_AGAIN, EXACT_PREFIX, POSITION_FIX, Arm, ArmChoices, arms_of
from validation.cases import Case, Expectation
from validation.embedded_engine import EmbeddedEngines
from validation.engines import AuditFile, audit_counts, environment
from validation.families.catalog import FamilyRequest, write_cases
from validation.measurement import BatchServer, Measurement, ServingSettings, concerns
from validation.models import shipped_model
from validation.samples import Answer, Reuse, lines_of, sample_of

[MOVED] = arms_of([POSITION_FIX], ArmChoices(8, boundary=1))


@pytest.mark.parametrize("unit", [1, 32])
def test_an_exact_prefix_is_expected_in_whole_units_of_the_engine(shipped, unit):
    """Of a token that all prompts begin with an engine that keeps whole blocks reuses nothing."""
    engines = EmbeddedEngines(shipped.runner)
    engines.prefix_unit = unit
    cases = write_cases(engines, FamilyRequest(("reordered",), groups=1, questions=2, tokens=512))
    arms = arms_of([COLD, EXACT_PREFIX, POSITION_FIX], ArmChoices(8, boundary=1))
    samples, _ = Measurement(engines, cases, ServingSettings(str(shipped_model()), max_tokens=4), arms).run()
    expected = [sample.expected_exact_tokens for sample in samples if sample.arm == POSITION_FIX]
    assert any(expected) == (unit == 1)


def test_arms_are_forced_along_colds_own_answer(shipped):
    cases = write_cases(shipped, FamilyRequest(("header_trap", "prose"), groups=1, questions=1, tokens=640))
    server = BatchServer(shipped, cases, ServingSettings(str(shipped_model()), max_tokens=6))
    arms = arms_of([COLD, COLD_AGAIN, POSITION_FIX], ArmChoices(8, boundary=1))
    cold, again, moved = ({sample.case_id: sample for sample in server.samples(arm)} for arm in arms)
    for name, sample in moved.items():
        assert cold[name].answer_kl < 1e-6
        assert again[name].answer_kl < 1e-6
        assert sample.answer_kl >= 0.0
        assert sample.loss is not None
        assert sample.answer_tokens == cold[name].answer_tokens
        # An answer is another one exactly if one of its likeliest tokens is.
        assert (sample.answer != cold[name].answer) <= (sample.token_agreement < 1.0)
    trap = [name for name in moved if "trap" in name]
    assert max(moved[name].answer_kl for name in trap) > 0.1


def test_a_group_of_an_isolated_arm_finds_its_own_donors_only(shipped):
    [own] = write_cases(shipped, FamilyRequest(("reordered",), groups=1, questions=1, tokens=512))
    cases = [own, replace(own, id="bare", group="bare", donors=())]
    server = BatchServer(shipped, cases, ServingSettings(str(shipped_model()), max_tokens=2))
    for isolated in (False, True):
        first, bare = server.samples(replace(MOVED, isolated=isolated))
        assert (first.reused_tokens > 100, bare.reused_tokens > 100) == (True, not isolated)


EVENTS = [
    {"event": "scheduler_initialized"},
    {"event": "donor_registered", "donor_id": "abc-1", "token_count": 100, "error": None},
    {"event": "donor_registered", "donor_id": "abc-2", "token_count": 0, "error": "no room"},
    {"event": "lookup", "request_id": 3, "found": True, "num_new_matched_tokens": 90, "rejection_reason": None},
    {"event": "lookup", "request_id": 4, "found": False, "num_new_matched_tokens": 0, "rejection_reason": "no_donor"},
    {"event": "materialized", "request_id": 3, "materialized": 270, "requires_rope_correction": True},
    {"event": "materialized", "request_id": 5, "materialized": 30, "requires_rope_correction": False},
]


def test_counts_are_those_of_one_arm():
    events = [{**event, "arm": arm} for event in EVENTS for arm in ("boundary", "position_fix")]
    *counts, reasons = audit_counts(events, "boundary").values()
    assert (counts, reasons) == ([7, 1, 1, 2, 300, 90, 1], {"no_donor": 1})
    assert not any(audit_counts(events, "cold").values())


def test_events_of_a_request_include_its_donor():
    about = [event for event in EVENTS if concerns(event, frozenset({1, 3}))]
    assert about == [EVENTS[1], EVENTS[3], EVENTS[5]]


def test_a_log_is_read_as_it_grows_and_only_in_whole_lines(tmp_path):
    audit = AuditFile(tmp_path / "log.jsonl")
    assert audit.read() == []
    lines = [json.dumps(event) + "\n" for event in EVENTS]
    audit.path.write_text(lines[0] + lines[1][:9])
    assert audit.read() == EVENTS[:1]
    audit.path.write_text("".join(lines))
    assert audit.read() == EVENTS


def test_the_callers_settings_neither_leak_in_nor_get_lost(monkeypatch):
    monkeypatch.setenv("TRTLLM_SEMBLEND_POLICY", "off")
    monkeypatch.setenv("SEMBLEND_MIN_SPAN", "7")
    monkeypatch.setenv("SEMBLENDER", "another program's")
    before = dict(os.environ)
    with pytest.raises(RuntimeError), environment({"SEMBLEND_POLICY": "boundary"}):  # noqa: PT012
        ours = {name: value for name, value in os.environ.items() if "SEMBLEND_" in name}
        assert ours == {"SEMBLEND_POLICY": "boundary", "SEMBLEND_MIN_SAVING": "0"}
        assert os.environ["SEMBLENDER"] == "another program's"
        raise RuntimeError
    assert dict(os.environ) == before


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
