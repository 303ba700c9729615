"""What the metrics count, that engines share them, and that serving never fails by them."""

import builtins
import gc
import logging
from collections import Counter as Counts
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest

from semblend_trt.audit import DROP_REASONS, AuditLog
from semblend_trt.donors.donor_index import HeldDonors
from semblend_trt.metrics import TOKEN_KINDS, metrics_for
from semblend_trt.outcome import Outcome, ReuseReport
from semblend_trt.reasons import FAULTS, OTHER_REASON

USED, DECLINED = Outcome.BACKEND_MATERIALIZED_REUSE.value, Outcome.BACKEND_DECLINED_REUSE.value
CHECKED = ReuseReport(USED, None, 700, 140, 800, 800, 100, 0.04, sampled_tokens=90)
UNKNOWN = ReuseReport(USED, None, 64, 736, 800, None, None, None, sampled_tokens=None)


class Index:
    """Donors of one engine."""

    def __init__(self, held):
        self._held = held

    def held(self):
        return self._held


@pytest.fixture
def registry():
    return CollectorRegistry()


def value(registry, name, **labels):
    found = registry.get_sample_value(f"semblend_{name}", labels)
    assert found is not None, f"{name} {labels} is not there"
    return found


def tokens(registry):
    return {kind: value(registry, "tokens_total", kind=kind) for kind in TOKEN_KINDS}


def test_every_outcome_kind_and_fault_is_there_from_the_start(registry):
    metrics_for(True, registry)
    assert {value(registry, "requests_total", outcome=outcome.value) for outcome in Outcome} == {0.0}
    assert set(tokens(registry).values()) == {0.0}
    assert {value(registry, "faults_total", fault=fault) for fault in FAULTS} == {0.0}
    assert value(registry, "donors") == 0
    assert value(registry, "donor_bytes", tier="host") == value(registry, "donor_bytes", tier="device") == 0


def test_a_checked_request(registry):
    metrics_for(True, registry).request_ended(replace(CHECKED, exact_prefix_tokens=64))
    assert value(registry, "requests_total", outcome=USED) == 1
    assert tokens(registry) == {
        "offered": 800,
        "sampled": 90,
        "checked": 800,
        "reused": 700,
        "recomputed": 100,
        "exact_prefix": 64,
    }
    assert value(registry, "kept_deviation_count") == 1
    assert value(registry, "kept_deviation_sum") == 0.04


def test_a_check_that_no_rank_reports_counts_what_is_known(registry):
    metrics_for(True, registry).request_ended(UNKNOWN)
    assert tokens(registry) == dict.fromkeys(TOKEN_KINDS, 0) | {"offered": 800, "reused": 64}
    assert value(registry, "kept_deviation_count") == 0


def test_refusals_and_lookups(registry):
    metrics = metrics_for(True, registry)
    for reason in ("low_reuse", "low_reuse", "deviation"):
        metrics.request_ended(ReuseReport(DECLINED, reason))
    metrics.looked_up(0.002)
    assert value(registry, "requests_total", outcome=DECLINED) == 3
    assert value(registry, "refusals_total", reason="low_reuse") == 2
    assert value(registry, "refusals_total", reason="deviation") == 1
    assert value(registry, "lookup_seconds_count") == 1
    assert value(registry, "lookup_seconds_bucket", le="0.0025") == 1
    assert value(registry, "lookup_seconds_bucket", le="0.001") == 0


def test_engines_of_one_process_share_the_series_and_add_up(registry):
    engines = [metrics_for(True, registry) for _ in range(3)]
    indexes = [Index(HeldDonors(2, 100, 10)), Index(HeldDonors(3, 1000, 0))]
    for metrics in engines:
        metrics.request_ended(CHECKED)
    for metrics, index in zip(engines, indexes, strict=False):
        metrics.watch(index)
    assert value(registry, "requests_total", outcome=USED) == 3
    assert value(registry, "donors") == 5
    assert value(registry, "donor_bytes", tier="host") == 1100
    assert value(registry, "donor_bytes", tier="device") == 10
    engines[0].close()
    engines[0].close()
    assert value(registry, "donors") == 3
    assert value(registry, "requests_total", outcome=USED) == 3


def test_an_engine_that_is_gone_holds_no_donors(registry):
    metrics = metrics_for(True, registry)
    index = Index(HeldDonors(2, 100, 10))
    metrics.watch(index)
    del index
    gc.collect()
    assert value(registry, "donors") == 0


def test_faults_add_up_and_never_fall(registry):
    engines = [metrics_for(True, registry) for _ in range(2)]
    counted = [Counts({"metadata": 2}), Counts({"metadata": 2})]
    for metrics, faults in zip(engines, counted, strict=True):
        metrics.watch_faults(faults)
    counted[1]["request_data"] += 1
    assert value(registry, "faults_total", fault="metadata") == 4
    assert value(registry, "faults_total", fault="request_data") == 1
    engines[1].close()
    engines[1].close()
    counted[1].clear()
    counted[0]["metadata"] += 1
    assert value(registry, "faults_total", fault="metadata") == 5
    assert value(registry, "faults_total", fault="request_data") == 1


def test_lost_audit_events_are_shown_by_reason(registry, tmp_path):
    """Up to the log's own end, and in the sum of all engines; an engine without a log shows nothing."""
    engines = [metrics_for(True, registry) for _ in range(3)]
    logs = [AuditLog(path) for path in (tmp_path / "a", tmp_path / "b", None)]
    for metrics, log in zip(engines, logs, strict=True):
        metrics.watch_audit(log.dropped)
    assert {value(registry, "audit_dropped_total", reason=reason) for reason in DROP_REASONS} == {0.0}
    for log in logs:
        log.event("bad", value=object())
    logs[0].close()
    logs[0].event("late")
    engines[0].close()
    assert value(registry, "audit_dropped_total", reason="not_json") == 2
    assert value(registry, "audit_dropped_total", reason="closed") == 1


def test_they_are_in_the_registry_that_a_server_shows():
    metrics_for(True)
    page = generate_latest(REGISTRY).decode()
    for name in ("requests_total", "refusals", "tokens_total", "lookup_seconds_bucket", "kept_deviation_sum", "donors"):
        assert f"semblend_{name}" in page


def test_switched_off_nothing_is_registered(registry):
    use_all(metrics_for(False, registry))
    assert list(registry.collect()) == []


def test_without_prometheus_client_nothing_is_counted(registry, monkeypatch):
    imported = builtins.__import__

    def without(name, *arguments):
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return imported(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    use_all(metrics_for(True, registry))
    monkeypatch.undo()
    assert list(registry.collect()) == []


def test_taken_names_cost_the_metrics_and_no_more(registry, caplog):
    Counter("semblend_requests", "Another package's.", registry=registry)
    with caplog.at_level(logging.WARNING):
        use_all(metrics_for(True, registry))
    assert "no metrics are kept" in caplog.text


@pytest.mark.parametrize("report", [None, ReuseReport(USED, None, -1, 0, -5)])
def test_a_wrong_report_raises_nothing_and_is_told_once(registry, report, caplog):
    metrics = metrics_for(True, registry)
    with caplog.at_level(logging.ERROR):
        metrics.request_ended(report)
        metrics.request_ended(report)
        metrics.looked_up("soon")  # type: ignore[arg-type]
    assert len(caplog.records) == 1


def test_unknown_reasons_are_counted_together(registry):
    metrics = metrics_for(True, registry)
    for reason in ("a", "b", "deviation", "\ud800"):
        metrics.request_ended(ReuseReport(DECLINED, reason))
    assert value(registry, "refusals_total", reason=OTHER_REASON) == 3
    assert value(registry, "refusals_total", reason="deviation") == 1


def test_racing_engines_lose_no_count(registry):
    def serve(_):
        metrics = metrics_for(True, registry)
        metrics.request_ended(replace(CHECKED, exact_prefix_tokens=1))
        metrics.watch(Index(HeldDonors(1, 1, 1)))
        generate_latest(registry)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(serve, range(200)))
    assert value(registry, "requests_total", outcome=USED) == 200
    assert tokens(registry)["exact_prefix"] == 200


def use_all(metrics):
    metrics.looked_up(0.1)
    metrics.request_ended(replace(CHECKED, exact_prefix_tokens=3))
    metrics.watch(Index(HeldDonors(1, 1, 1)))
    metrics.close()
