"""Every request ends in exactly one outcome, in bounded memory; one table names every reason, with what to do."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from semblend_trt import outcome as module
from semblend_trt.errors import SemBlendError
from semblend_trt.outcome import Outcome, OutcomeLedger, ReuseReport, Scope, advice, counted_as
from tests.pages import Page, code_in

USED = ReuseReport(Outcome.BACKEND_MATERIALIZED_REUSE.value, None, reused_tokens=96)
COLD = ReuseReport(Outcome.COLD_FALLBACK.value, None)


def declined(reason):
    return ReuseReport(Outcome.BACKEND_DECLINED_REUSE.value, reason)


def test_what_is_recorded_is_counted_and_remembered():
    ledger = OutcomeLedger()
    for request_id, report in enumerate((USED, declined("low_reuse"), ReuseReport(COLD.outcome, "low_reuse"))):
        ledger.record(request_id, report)
    counts = ledger.counts()
    never = ("exact_prefix_route", "semantic_discovery_only", "semantic_placement")
    once = ("backend_materialized_reuse", "backend_declined_reuse", "cold_fallback")
    counted = {outcome.value: count for outcome, count in counts.items()}
    assert counted == dict.fromkeys(never, 0) | dict.fromkeys(once, 1)
    assert ledger.reasons() == {"low_reuse": 2}
    assert ledger.of(0) is USED
    assert ledger.of(4) is None
    assert json.loads(json.dumps(counts)) == counts


@pytest.mark.parametrize("second", Outcome)
def test_second_outcome_is_refused_and_counts_nothing(second):
    ledger = OutcomeLedger()
    ledger.record(1, COLD)
    with pytest.raises(SemBlendError, match="request 1 ended as cold_fallback"):
        ledger.record(1, ReuseReport(second.value, "late"))
    assert sum(ledger.counts().values()) == 1
    assert ledger.reasons() == {}


@pytest.mark.parametrize("reason", [None, ""])
def test_declined_reuse_needs_a_reason(reason):
    ledger = OutcomeLedger()
    with pytest.raises(SemBlendError, match="needs a reason"):
        ledger.record(1, declined(reason))
    assert ledger.of(1) is None
    assert sum(ledger.counts().values()) == 0


def test_a_receipt_has_what_docs_receipts_md_describes_and_only_json():
    rows = [code_in(cell) for cell, _ in Page("docs/receipts.md").rows]
    report = ReuseReport(Outcome.BACKEND_MATERIALIZED_REUSE.value, None, reused_tokens=3, largest_kept=0.25)
    assert list(report.receipt) == [codes[0] for codes in rows if codes and codes[0] in report.receipt]
    assert len(report.receipt) == len(rows[1 : rows.index([], 1)])
    assert json.loads(json.dumps(report.receipt)) == report.receipt
    assert (report.receipt["reused_tokens"], report.receipt["largest_kept"]) == (3, 0.25)


@pytest.mark.parametrize("name", ["largest_kept", "sampled_deviation"])
@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_is_no_number_is_null_in_a_receipt(name, value):
    report = ReuseReport(Outcome.BACKEND_MATERIALIZED_REUSE.value, None, **{name: value})
    assert report.receipt[name] is None


def test_forgotten_request_may_end_again_and_stays_counted():
    ledger = OutcomeLedger()
    ledger.record(1, COLD)
    ledger.forget(1)
    ledger.forget(1)
    assert ledger.of(1) is None
    ledger.record(1, COLD)
    assert ledger.counts()[Outcome.COLD_FALLBACK] == 2


def test_reports_and_reasons_are_bounded_and_none_is_lost():
    ledger = OutcomeLedger()
    for request_id in range(module.MAX_REPORTS + 8):
        ledger.record(request_id, declined("low_reuse" if request_id % 2 else f"reason-{request_id}"))
    assert [request_id for request_id in range(16) if ledger.of(request_id)] == list(range(8, 16))
    assert ledger.reasons() == dict.fromkeys(("low_reuse", module.OTHER_REASON), module.MAX_REPORTS // 2 + 4)


def test_each_reason_is_a_label_with_whole_sentences():
    for scope, name, text in ((each, *item) for each, texts in module.TEXTS.items() for item in texts.items()):
        assert name.isidentifier()
        assert name == name.lower() == counted_as(name)
        assert text[0].isupper() or text.startswith("vLLM")
        assert text.endswith(".")
        assert not set(text) & set("|\n")
        assert text == advice(name, scope)
    assert not module.REASONS & module.FAULTS


def test_advice_comes_from_the_first_scope_that_has_the_reason():
    assert "--attention-backend" in advice("attention_backend", Scope.VLLM)
    assert "attn_backend" in advice("attention_backend", Scope.ATTACHMENT, Scope.DECODER)
    assert advice("no_donor_match", Scope.ENGINE) == advice("no_donor_match")
    assert advice("unnamed") == ""
    assert counted_as("unnamed") == module.OTHER_REASON


def test_a_page_gets_the_table_of_each_scope_that_it_names():
    made = module.filled("before\n<!-- reasons: plan -->old<!-- end -->\nafter\n")
    assert made.startswith("before\n")
    assert made.endswith("after\n")
    assert "old" not in made
    assert [name for name in module.TEXTS[Scope.PLAN] if f"`{name}` |" not in made] == []
    assert module.filled(made) == made


def test_racing_threads_record_each_request_once():
    ledger = OutcomeLedger()

    def record(request_id):
        try:
            ledger.record(request_id, ReuseReport(COLD.outcome, "low_reuse"))
        except SemBlendError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(record, [request_id for request_id in range(300) for _ in range(4)]))
    assert sum(won) == 300
    assert ledger.counts()[Outcome.COLD_FALLBACK] == ledger.reasons()["low_reuse"] == 300
