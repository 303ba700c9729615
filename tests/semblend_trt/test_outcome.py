"""Every request ends in exactly one outcome, in bounded memory."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from semblend_trt.errors import SemBlendError
from semblend_trt.outcome import OTHER_REASON, Outcome, OutcomeLedger


def test_the_six_outcomes() -> None:
    assert {outcome.value for outcome in Outcome} == {
        "exact_prefix_route",
        "semantic_discovery_only",
        "semantic_placement",
        "backend_materialized_reuse",
        "backend_declined_reuse",
        "cold_fallback",
    }


def test_settled_request_is_counted_and_remembered() -> None:
    ledger = OutcomeLedger()
    ledger.settle(1, Outcome.BACKEND_MATERIALIZED_REUSE, reused_tokens=96)
    ledger.settle(2, Outcome.BACKEND_DECLINED_REUSE, "low_reuse")
    ledger.settle(3, Outcome.COLD_FALLBACK, "low_reuse")
    counts = ledger.counts()
    assert set(counts) == set(Outcome)
    assert counts[Outcome.BACKEND_MATERIALIZED_REUSE] == counts[Outcome.BACKEND_DECLINED_REUSE] == 1
    assert sum(counts.values()) == 3
    assert ledger.reasons() == {"low_reuse": 2}
    settled = ledger.of(1)
    assert settled is not None
    assert (settled.outcome, settled.reason) == (Outcome.BACKEND_MATERIALIZED_REUSE, None)
    assert settled.evidence["reused_tokens"] == 96
    assert ledger.of(4) is None
    assert json.loads(json.dumps(counts))["cold_fallback"] == 1


@pytest.mark.parametrize("second", Outcome)
def test_second_outcome_is_refused_and_counts_nothing(second: Outcome) -> None:
    ledger = OutcomeLedger()
    ledger.settle(1, Outcome.COLD_FALLBACK)
    with pytest.raises(SemBlendError, match="request 1 ended as cold_fallback"):
        ledger.settle(1, second, "late")
    assert sum(ledger.counts().values()) == 1
    assert ledger.reasons() == {}


@pytest.mark.parametrize("reason", [None, ""])
def test_declined_reuse_needs_a_reason(reason: str | None) -> None:
    ledger = OutcomeLedger()
    with pytest.raises(SemBlendError, match="needs a reason"):
        ledger.settle(1, Outcome.BACKEND_DECLINED_REUSE, reason)
    assert ledger.of(1) is None
    assert sum(ledger.counts().values()) == 0


def test_forgotten_request_may_end_again_and_stays_counted() -> None:
    ledger = OutcomeLedger()
    ledger.settle(1, Outcome.COLD_FALLBACK)
    ledger.forget(1)
    ledger.forget(1)
    assert ledger.of(1) is None
    ledger.settle(1, Outcome.COLD_FALLBACK)
    assert ledger.counts()[Outcome.COLD_FALLBACK] == 2


def test_only_recent_requests_keep_detail() -> None:
    ledger = OutcomeLedger(recent=8)
    for request_id in range(100):
        ledger.settle(request_id, Outcome.COLD_FALLBACK)
    assert [request_id for request_id in range(100) if ledger.of(request_id)] == list(range(92, 100))
    assert ledger.counts()[Outcome.COLD_FALLBACK] == 100


def test_reasons_are_bounded_and_none_is_lost() -> None:
    ledger = OutcomeLedger(max_reasons=3)
    for request_id in range(10):
        ledger.settle(request_id, Outcome.BACKEND_DECLINED_REUSE, f"reason-{request_id}")
    ledger.settle(10, Outcome.BACKEND_DECLINED_REUSE, "reason-0")
    assert ledger.reasons() == {OTHER_REASON: 7, "reason-0": 2, "reason-1": 1, "reason-2": 1}


@pytest.mark.parametrize("bounds", [{"recent": 0}, {"max_reasons": 0}])
def test_a_ledger_without_room_is_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(SemBlendError):
        OutcomeLedger(**bounds)


def test_racing_threads_settle_each_request_once() -> None:
    ledger = OutcomeLedger()

    def settle(request_id: int) -> bool:
        try:
            ledger.settle(request_id, Outcome.COLD_FALLBACK, "race")
        except SemBlendError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(settle, [request_id for request_id in range(300) for _ in range(4)]))
    assert sum(won) == 300
    assert ledger.counts()[Outcome.COLD_FALLBACK] == ledger.reasons()["race"] == 300
