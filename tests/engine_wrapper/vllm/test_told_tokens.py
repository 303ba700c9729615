"""What fails is computed, and vLLM's own counts of a prompt are what was used, whatever was promised."""

import pytest

from semblend_trt.outcome import VLLM_RECEIPT
from tests.engine_wrapper.vllm.conftest import DONOR, MOVED, NEW, both_modes, fail_planned, taught
from tests.engine_wrapper.vllm.test_recovery import fails_twice
from tests.engine_wrapper.vllm.test_recovery import is_lost as is_not_executed
from tests.engine_wrapper.watching import watched


def nothing(monkeypatch, served):
    """All goes well."""


def is_lost(monkeypatch, served):
    """The donors are gone when they are to be placed: our rows compute what was promised."""
    worker = served.worker._worker
    load = worker._load
    monkeypatch.setattr(worker, "_load", lambda *told: (worker.store.clear(), load(*told)))


def load_fails(monkeypatch, served):
    """The tier cannot be read: our rows compute what was promised."""

    def fails(plans, _):
        if plans:
            raise OSError("injected")

    monkeypatch.setattr(served.worker._worker, "_load", fails)


def forward_fails_once(monkeypatch, served):
    """A plan cannot be executed: our rows compute its request whole."""
    fail_planned(monkeypatch, served, once=True)


FAULTS = {
    nothing: set(),
    is_lost: set(),
    load_fails: {"start_load_kv"},
    forward_fails_once: {"planned_forward"},
    is_not_executed: {"plan_not_executed"},
    fails_twice: {"planned_forward"},
}


class Told:
    def __init__(self, monkeypatch, served):
        self.external = self.own = self.hits = 0
        self.cached, self.receipts = {}, {}
        watched(monkeypatch, served.core.scheduler, "update_from_output", self._read)

    def _read(self, found, *_):
        for outputs in found.values():
            for each in outputs.outputs:
                self._take(each)
            if (stats := outputs.scheduler_stats) is not None and (hits := stats.connector_prefix_cache_stats):
                self.hits += hits.hits + hits.preempted_hits

    def _take(self, output):
        if (stats := output.prefill_stats) is not None:
            self.own += stats.num_local_cached_tokens
            self.external += stats.num_external_cached_tokens
            self.cached[output.request_id] = stats.num_cached_tokens
        if output.kv_transfer_params is not None:
            self.receipts[output.request_id] = output.kv_transfer_params[VLLM_RECEIPT]

    def total(self, name):
        return sum(each[f"{name}_tokens"] for each in self.receipts.values())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@both_modes
def test_what_is_told_is_what_was_used(engine, cold, is_async, fault, monkeypatch):
    served = taught(engine("verified", disable_log_stats=False))
    if fault not in (is_not_executed, fails_twice):
        # In these cases vLLM tells its hit with the first token, and computes the prompt a second time.
        served.ask(NEW, max_tokens=1)
    told = Told(monkeypatch, served)
    fault(monkeypatch, served)
    answers = served.ask(NEW, MOVED, DONOR[:200], max_tokens=4)
    if fault is not nothing:
        assert [each.tokens for each in answers[:2]] == [cold(NEW).tokens[:4], cold(MOVED).tokens[:4]]
    assert set(served.faults) == FAULTS[fault]
    assert (told.own, told.external) == (told.total("exact_prefix"), told.total("reused"))
    assert told.hits == told.total("reused")
    for name, cached in told.cached.items():
        assert cached == told.receipts[name]["exact_prefix_tokens"] + told.receipts[name]["reused_tokens"]
    assert sum(each.cached for each in answers) == told.own + told.external
    assert (told.total("reused") > 0) == (told.total("offered") > 0) == (fault is nothing)
