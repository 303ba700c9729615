"""Every request ends in exactly one outcome, in bounded memory; one table names every reason, with what to do."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from semblend_trt import outcome, reasons
from semblend_trt.errors import SemBlendError
from semblend_trt.outcome import Outcome, OutcomeLedger, ReuseReport
from semblend_trt.reasons import Scope, advice, counted_as
from tests.pages import Page, code_in

USED = ReuseReport(Outcome.BACKEND_MATERIALIZED_REUSE.value, None, reused_tokens=96)
COLD = ReuseReport(Outcome.COLD_FALLBACK.value, None)


def test_an_end_is_kept_once_until_it_is_forgotten_and_a_decline_needs_a_reason():
    ledger = OutcomeLedger()
    ledger.record(1, USED)
    with pytest.raises(SemBlendError, match="request 1 ended as backend_materialized_reuse and cannot end as cold"):
        ledger.record(1, COLD)
    for reason in (None, ""):
        with pytest.raises(SemBlendError, match="needs a reason"):
            ledger.record(2, ReuseReport(Outcome.BACKEND_DECLINED_REUSE.value, reason))
    assert (ledger.of(1), ledger.of(2)) == (USED, None)
    ledger.forget(1)
    ledger.forget(1)
    assert ledger.of(1) is None
    ledger.record(1, COLD)
    assert ledger.of(1) is COLD


def test_the_last_reports_are_kept(monkeypatch):
    monkeypatch.setattr(outcome, "MAX_REPORTS", 8)
    ledger = OutcomeLedger()
    for request_id in range(16):
        ledger.record(request_id, COLD)
    assert [request_id for request_id in range(16) if ledger.of(request_id)] == list(range(8, 16))


def test_a_receipt_has_what_docs_receipts_md_describes_and_only_json():
    cells = [cell for cell, *_ in Page("docs/receipts.md").rows]
    report = ReuseReport(Outcome.BACKEND_MATERIALIZED_REUSE.value, None, reused_tokens=3, largest_kept=0.25)
    assert list(report.receipt) == [name for cell in cells[1 : cells.index("server")] for name in code_in(cell)]
    assert json.loads(json.dumps(report.receipt)) == report.receipt
    assert (report.receipt["reused_tokens"], report.receipt["largest_kept"]) == (3, 0.25)
    for value in (None, float("nan"), float("inf")):
        assert replace(report, largest_kept=value, sampled_deviation=value).receipt["largest_kept"] is None


def test_each_reason_is_a_label_with_advice():
    for scope, name, text in ((each, *item) for each, texts in reasons.TEXTS.items() for item in texts.items()):
        assert name.isidentifier()
        assert name == name.lower() == counted_as(name)
        assert text == advice(name, scope)
        assert not set(text) & set("|\n")  # it stands in a table
    assert not reasons.REASONS & reasons.FAULTS


def test_advice_comes_from_the_first_scope_that_has_the_reason():
    assert "--attention-backend" in advice("attention_backend", Scope.VLLM)
    assert "attn_backend" in advice("attention_backend", Scope.ATTACHMENT, Scope.DECODER)
    assert advice("no_donor_match", Scope.ENGINE) == advice("no_donor_match")
    assert advice("unnamed") == ""
    assert counted_as("unnamed") == reasons.OTHER_REASON


def test_racing_threads_record_each_request_once():
    ledger = OutcomeLedger()

    def record(request_id):
        try:
            ledger.record(request_id, COLD)
        except SemBlendError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(record, [request_id for request_id in range(300) for _ in range(4)]))
    assert sum(won) == 300
