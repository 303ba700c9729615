"""Every request ends in exactly one outcome, and the outcome and its figures say what happened."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.connector.report import ReuseReport, outcome_of, report_of
from semblend_trt.connector.request_table import TrackedRequest
from semblend_trt.outcome import Outcome, OutcomeLedger
from semblend_trt.plan import (
    CheckEvidence,
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    SemanticKvPlan,
    SpanCheck,
)

SHIFTED = (PlanSpan("donor", 0, 20, 50),)


def plan(kind=PlanKind.REQUEST_LOCAL, spans=SHIFTED, **execution):
    matched = 0 if kind is PlanKind.DISCOVERY_ONLY else 60
    return SemanticKvPlan(
        request_id=1,
        kind=kind,
        spans=spans,
        prompt_token_ids=tuple(range(100)),
        num_computed_tokens=10,
        matched_tokens=matched,
        block_size=16,
        execution=EngineExecution(EngineMode.WRAPPER, 3, **execution),
    )


def tracked(**fields):
    request = TrackedRequest(1, "namespace", np.arange(100, dtype=np.int32), fields.pop("computed", 0))
    for name, value in fields.items():
        setattr(request, name, value)
    return request


CHECK = SpanCheck(1, threshold=0.2)
WITH_EXACT = (PlanSpan("exact", 10, 10, 15, exact=True), PlanSpan("donor", 0, 30, 40))
EVIDENCE = CheckEvidence(1, 50, 50, 30, 20, 0.11, False)
DROPPED = CheckEvidence(1, 50, 50, 0, 50, 0.0, True)
DROPPED_BEHIND_EXACT = CheckEvidence(1, 55, 40, 15, 40, 0.0, True)
USED, DECLINED = Outcome.BACKEND_MATERIALIZED_REUSE, Outcome.BACKEND_DECLINED_REUSE


@pytest.mark.parametrize(
    ("fields", "outcome", "reason"),
    [
        ({"plan": plan()}, USED, None),
        ({"plan": plan(), "load_failed": True}, DECLINED, "load_failed"),
        ({"plan": plan(check=CHECK)}, USED, None),
        ({"plan": plan(check=CHECK), "evidence": EVIDENCE}, USED, None),
        ({"plan": plan(check=CHECK), "evidence": DROPPED}, DECLINED, "deviation"),
        ({"plan": plan(spans=WITH_EXACT, check=CHECK), "evidence": DROPPED_BEHIND_EXACT}, USED, "deviation"),
        ({"plan": plan(check=CHECK), "evidence": DROPPED, "load_failed": True}, DECLINED, "load_failed"),
        ({"plan": plan(PlanKind.DISCOVERY_ONLY)}, Outcome.SEMANTIC_DISCOVERY_ONLY, None),
        ({"reason": "low_reuse", "runs_found": 2, "computed": 16}, DECLINED, "low_reuse"),
        ({"reason": "no_profile", "runs_found": 1}, DECLINED, "no_profile"),
        ({"reason": "profile_mismatch", "runs_found": 1}, DECLINED, "profile_mismatch"),
        ({"reason": "check_needs_wrapper", "runs_found": 1}, DECLINED, "check_needs_wrapper"),
        ({"reason": "no_donor_match", "runs_found": 2, "computed": 16}, Outcome.EXACT_PREFIX_ROUTE, "no_donor_match"),
        ({"reason": "prefix_covers_prompt", "computed": 96}, Outcome.EXACT_PREFIX_ROUTE, "prefix_covers_prompt"),
        ({"reason": "no_donor_match"}, Outcome.COLD_FALLBACK, "no_donor_match"),
        ({"reason": "internal_error", "computed": 96}, DECLINED, "internal_error"),
        ({"reason": "salt_invalid"}, Outcome.COLD_FALLBACK, "salt_invalid"),
    ],
)
def test_outcomes(fields, outcome, reason):
    assert outcome_of(tracked(**fields)) == (outcome, reason)


# reused, computed holes, offered, checked, recomputed, largest kept
@pytest.mark.parametrize(
    ("fields", "figures"),
    [
        ({"reason": "low_reuse", "runs_found": 1}, (0, 0, 0, 0, 0, 0.0)),
        ({"plan": plan()}, (50, 10, 50, 0, 0, 0.0)),
        ({"plan": plan(recompute_boundary_layer=3)}, (50, 10, 50, 0, 0, 0.0)),
        ({"plan": plan(head_tokens=8)}, (42, 18, 50, 0, 8, 0.0)),
        ({"plan": plan(spans=WITH_EXACT, head_tokens=8)}, (47, 13, 55, 0, 8, 0.0)),
        ({"plan": plan(), "load_failed": True}, (0, 60, 0, 0, 0, 0.0)),
        ({"plan": plan(PlanKind.DISCOVERY_ONLY)}, (0, 0, 0, 0, 0, 0.0)),
        ({"plan": plan(check=CHECK), "evidence": EVIDENCE}, (30, 30, 50, 50, 20, 0.11)),
        ({"plan": plan(check=CHECK), "evidence": DROPPED}, (0, 60, 50, 50, 50, 0.0)),
        ({"plan": plan(spans=WITH_EXACT, check=CHECK), "evidence": DROPPED_BEHIND_EXACT}, (15, 45, 55, 40, 40, 0.0)),
        ({"plan": plan(check=CHECK)}, (0, 60, 50, None, None, None)),
        ({"plan": plan(spans=WITH_EXACT, check=CHECK)}, (15, 45, 55, None, None, None)),
    ],
)
def test_figures(fields, figures):
    report = report_of(tracked(computed=10, **fields))
    assert (
        report.reused_tokens,
        report.computed_holes,
        report.offered_tokens,
        report.checked_tokens,
        report.recomputed_tokens,
        report.largest_kept,
    ) == figures


@given(
    checked=st.booleans(),
    told=st.booleans(),
    is_dropped=st.booleans(),
    kept=st.integers(0, 40),
    head=st.integers(0, 60),
    load_failed=st.booleans(),
    kind=st.sampled_from([None, PlanKind.DISCOVERY_ONLY, PlanKind.REQUEST_LOCAL]),
)
def test_the_ledger_says_what_the_report_says_and_tokens_add_up(
    checked, told, is_dropped, kept, head, load_failed, kind
):
    request = tracked(load_failed=load_failed, reason=None if kind else "not_exact", runs_found=1, computed=10)
    if kind is not None:
        request.plan = plan(kind, WITH_EXACT, check=CHECK if checked else None, head_tokens=head)
        if told and request.plan.is_checked:
            kept = 0 if is_dropped else min(kept, 40 - min(head, 40))
            evidence = CheckEvidence(1, 55, 40 - min(head, 40), 15 + kept, 40 - kept, 0.1 if kept else 0.0, is_dropped)
            request.evidence = evidence
    report = report_of(request)
    ledger = OutcomeLedger()
    outcome, reason = outcome_of(request)
    ledger.settle(1, outcome, reason, **report.figures)
    assert ReuseReport.from_settled(ledger.of(1)) == report
    assert (outcome.value, reason) == (report.outcome, report.reason)
    if report.recomputed_tokens is not None:
        assert report.offered_tokens == report.reused_tokens + report.recomputed_tokens
    matched = request.matched_tokens
    assert report.reused_tokens + report.computed_holes == matched
    assert (report.checked_tokens is None) == (report.largest_kept is None)
    if outcome is Outcome.BACKEND_DECLINED_REUSE:
        assert report.reused_tokens == 0


def test_evidence_of_a_plan_without_a_check_is_ignored():
    request = tracked(plan=plan(), computed=10)
    assert report_of(request) == report_of(replace(request, evidence=EVIDENCE))
