"""Every request ends in exactly one outcome, and the outcome says what happened."""

import numpy as np
import pytest

from semblend_trt.connector.report import outcome_of, report_of
from semblend_trt.connector.request_table import TrackedRequest
from semblend_trt.outcome import Outcome
from semblend_trt.plan import (
    AttentionMode,
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    PublicationPolicy,
    SemanticKvPlan,
)


def plan(kind=PlanKind.REQUEST_LOCAL_SEGMENTED):
    matched = 0 if kind is PlanKind.DISCOVERY_ONLY else 60
    return SemanticKvPlan(
        request_id=1,
        namespace_key="namespace",
        kind=kind,
        publication=PublicationPolicy.REQUEST_LOCAL,
        spans=(PlanSpan("donor", 0, 20, 50),),
        prompt_token_ids=tuple(range(100)),
        num_computed_tokens=10,
        matched_tokens=matched,
        block_size=16,
        execution=EngineExecution(EngineMode.WRAPPER, AttentionMode.HOLES_AND_SUFFIX, 3, suffix_start=10 + matched),
    )


def tracked(**fields):
    request = TrackedRequest(1, "namespace", np.arange(100, dtype=np.int32), fields.pop("computed", 0))
    for name, value in fields.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("fields", "outcome", "reason"),
    [
        ({"plan": plan()}, Outcome.BACKEND_MATERIALIZED_REUSE, None),
        ({"plan": plan(), "load_failed": True}, Outcome.BACKEND_DECLINED_REUSE, "load_failed"),
        ({"plan": plan(PlanKind.DISCOVERY_ONLY)}, Outcome.SEMANTIC_DISCOVERY_ONLY, None),
        ({"reason": "low_reuse", "runs_found": 2, "computed": 16}, Outcome.BACKEND_DECLINED_REUSE, "low_reuse"),
        ({"reason": "no_donor_match", "runs_found": 2, "computed": 16}, Outcome.EXACT_PREFIX_ROUTE, "no_donor_match"),
        ({"reason": "prefix_covers_prompt", "computed": 96}, Outcome.EXACT_PREFIX_ROUTE, "prefix_covers_prompt"),
        ({"reason": "no_donor_match"}, Outcome.COLD_FALLBACK, "no_donor_match"),
        ({"reason": "internal_error", "computed": 96}, Outcome.BACKEND_DECLINED_REUSE, "internal_error"),
        ({"reason": "salt_invalid"}, Outcome.COLD_FALLBACK, "salt_invalid"),
    ],
)
def test_outcomes(fields, outcome, reason):
    assert outcome_of(tracked(**fields)) == (outcome, reason)


def test_report_counts_tokens_from_donors_and_holes():
    report = report_of(tracked(plan=plan(), computed=10))
    assert (report.reused_tokens, report.computed_holes) == (50, 10)


def test_failed_load_reuses_nothing_and_computes_all_that_was_promised():
    report = report_of(tracked(plan=plan(), computed=10, load_failed=True))
    assert (report.reused_tokens, report.computed_holes) == (0, 60)


def test_discovery_reports_no_tokens():
    report = report_of(tracked(plan=plan(PlanKind.DISCOVERY_ONLY), computed=10))
    assert (report.reused_tokens, report.computed_holes) == (0, 0)
