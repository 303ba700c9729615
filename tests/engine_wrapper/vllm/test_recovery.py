"""What could be neither placed nor computed by our rows is computed by vLLM: all answers are cold ones, and vLLM's own
counts of a prompt are what was used, whatever was promised."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from semblend_trt.outcome import VLLM_RECEIPT
from tests.builders.vllm import DONOR, LONG, MOVED, NEW, WHOLE, assert_cold, both_modes, fail_planned, taught
from tests.engine_wrapper.watching import watched


def nothing(monkeypatch, served):
    """All goes well."""


def are_gone(monkeypatch, served):
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


def fails_once(monkeypatch, served):
    """A plan cannot be executed: our rows compute its request whole."""
    fail_planned(monkeypatch, served, once=True)


def cannot_be_read(monkeypatch, served):
    """The order of a step's requests is unknown."""
    monkeypatch.setattr(served.worker._forward, "_batch", lambda _: (_ for _ in ()).throw(LookupError("injected")))


def is_disordered(monkeypatch, served):
    """The rows of a step stand in another order than its requests are told in."""
    runner = (forward := served.worker._forward)._runner
    monkeypatch.setattr(forward, "_runner", replace(runner, order=lambda: runner.order()[::-1]))


def is_lost(monkeypatch, served):
    """vLLM runs its steps past our forward."""
    served.worker._forward.remove()


def is_unread(monkeypatch, served):
    """A step in which something was promised is told in words that are not known."""
    read = (steps := served.core.scheduler.connector._scheduler._steps).read

    def fails(output):
        if any(request.num_computed_tokens > 400 for request in output.scheduled_new_reqs):
            raise AttributeError("injected")
        return read(output)

    monkeypatch.setattr(steps, "read", fails)


def in_both_modes(cases):
    both = [(each, mode) for mode in (True, False) for each in cases]
    names = [f"{each.__name__}-{'async' if mode else 'in turn'}" for each, mode in both]
    return pytest.mark.parametrize(("fail", "is_async"), both, indirect=["is_async"], ids=names)


# The last one takes our forward from the model, which no later test gives back.
FAILURES = [fail_planned, cannot_be_read, is_disordered, is_unread, is_lost]


@pytest.mark.promise("engines", "A load or a plan that...")
@in_both_modes(FAILURES)
def test_a_double_failure_costs_nobody_a_token(engine, cold, is_async, fail, monkeypatch):
    served = engine("position_fix", kept=True, max_num_batched_tokens=96, max_num_seqs=2)
    assert (taught(served).core.batch_queue is not None) == is_async
    fail(monkeypatch, served)
    answers = assert_cold(served, cold, LONG, NEW, MOVED, DONOR)
    assert served.refusal in ("planned_forward", "plan_not_executed", "step_unreadable")
    assert [each.cached for each in answers[:2]] == [0, 0]
    assert_cold(served, cold, MOVED, NEW)
    assert set(served.faults) == {served.refusal}
    assert served.report(1).reason == served.report().reason == served.refusal


class Told:
    """What vLLM sends of each step: its counts of prompts, and receipts."""

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


FAULTS = {
    nothing: set(),
    are_gone: set(),
    load_fails: {"start_load_kv"},
    fails_once: {"planned_forward"},
    fail_planned: {"planned_forward"},
    is_lost: {"plan_not_executed"},
}


@pytest.mark.promise(
    "engines", "A load or a plan that fails in vLLM is computed, and no token of a failed step is taken"
)
@pytest.mark.promise("commands", "Usage, receipt, audit log, metrics and...")
@in_both_modes(FAULTS)
def test_what_is_told_is_what_was_used(engine, cold, is_async, fail, monkeypatch):
    served = taught(engine("verified", kept=True, disable_log_stats=False))
    if fail not in (is_lost, fail_planned):
        # In these cases vLLM tells its hit with the first token, and computes the prompt a second time.
        served.ask(NEW, max_tokens=1)
    told = Told(monkeypatch, served)
    fail(monkeypatch, served)
    answers = served.ask(NEW, MOVED, DONOR[:200], max_tokens=4)
    if fail is not nothing:
        assert [each.tokens for each in answers[:2]] == [cold(NEW).tokens[:4], cold(MOVED).tokens[:4]]
    assert set(served.faults) == FAULTS[fail]
    assert (told.own, told.external) == (told.total("exact_prefix"), told.total("reused"))
    assert told.hits == told.total("reused")
    for name, cached in told.cached.items():
        assert cached == told.receipts[name]["exact_prefix_tokens"] + told.receipts[name]["reused_tokens"]
    assert sum(each.cached for each in answers) == told.own + told.external
    assert (told.total("reused") > 0) == (told.total("offered") > 0) == (fail is nothing)


def test_a_request_may_end_behind_a_forward_whose_step_has_not(engine, cold, monkeypatch):
    """With a grammar the V2 runner samples a step after vLLM has ended requests of the one before."""
    served = taught(engine("position_fix", kept=True))
    open_behind, end = [], served.worker.wait_for_save

    def ended(metadata):
        open_behind.append(served.runtime.is_forward_open)
        end(metadata)

    monkeypatch.setattr(served.worker, "wait_for_save", ended)
    assert_cold(served, cold, NEW, LONG)
    assert open_behind
    assert not any(open_behind)


@pytest.mark.promise("engines", "In vLLM a full graph of...")
def test_a_step_that_a_graph_replays_costs_its_plan_and_no_later_one(engine, cold, monkeypatch):
    """A full graph of a decode runs no forward of ours; a small budget may leave a planned prompt so few tokens."""
    served = taught(engine("position_fix", kept=True))
    forward = served.worker._forward
    with monkeypatch.context() as change:
        change.setattr(served.worker, "_replayed", 1 << 20)
        change.setattr(forward, "_run_step", lambda arguments, options: forward._stock(*arguments, **options))
        [answer] = assert_cold(served, cold, MOVED)
    assert (answer.cached, served.refusal, dict(served.faults)) == (0, None, {"plan_not_executed": 1})
    assert served.ask(MOVED).cached > 0


@pytest.mark.parametrize("call", ["wait_for_save", "get_finished"])
def test_an_end_that_cannot_be_taken_note_of_costs_the_steps_donors(engine, cold, call, monkeypatch):
    """Where no save can begin, vLLM goes on holding the blocks, and their KV is read there."""
    served = engine(*WHOLE)
    worker = served.worker._worker
    with monkeypatch.context() as change:
        change.setattr(worker, call, lambda *_: (_ for _ in ()).throw(RuntimeError("injected")))
        served.ask(DONOR, max_tokens=1)
        served.ask(LONG, max_tokens=1)
    assert set(served.faults) == {call}
    assert_cold(served, cold, MOVED, NEW)
    assert [offered > 0 for offered in served.offered_of(2)] == [call == "get_finished", False]


@pytest.mark.every_version
@both_modes
def test_what_was_never_written_is_not_hit_and_a_step_that_failed_can_be_aborted(engine, cold, is_async, monkeypatch):
    served = taught(engine("position_fix"))
    fail_planned(monkeypatch, served)
    # The donor's text comes again where it stood: vLLM publishes its blocks before they are loaded, and hits them.
    assert_cold(served, cold, DONOR, NEW, DONOR, DONOR)
    assert served.refusal == "planned_forward"
    assert_cold(served, cold, DONOR, MOVED)
    served.settle()
    assert served.blocks.get_num_free_blocks() == served.blocks.num_gpu_blocks - 1
    taught(served.renew())
    llm_engine = served.llm.llm_engine
    for name, prompt in (("gone", MOVED), ("kept", NEW)):
        llm_engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=8, temperature=0))
    llm_engine.step()
    assert served.refusal == "planned_forward"
    llm_engine.abort_request(["gone"])
    ended = []
    while llm_engine.has_unfinished_requests():
        ended += [output for output in llm_engine.step() if output.finished]
    assert [(each.request_id, list(each.outputs[0].token_ids)) for each in ended] == [("kept", cold(NEW).tokens)]
    assert_cold(served, cold, MOVED, NEW)


def test_a_scheduler_of_another_kind_is_refused(engine, cold, monkeypatch):
    monkeypatch.setattr(Scheduler, "reset_prefix_cache", lambda scheduler: True)
    served = engine("position_fix")
    assert served.refusal == "recovery"
    served.ask(DONOR, max_tokens=1)
    assert [each.cached for each in assert_cold(served, cold, MOVED, NEW)] == [0, 0]


def test_blocks_are_told_where_vllm_cannot_begin_again(engine, monkeypatch):
    served = engine("position_fix", kept=True)
    recovery = served.worker.recovery
    monkeypatch.setattr(recovery, "_is_async", True)
    with monkeypatch.context() as change:
        change.setattr(served.core.scheduler, "reset_prefix_cache", Mock(side_effect=AssertionError("injected")))
        recovery.compute_again([3, 4])
    assert (recovery.take_failed_blocks(), recovery.take_failed_blocks()) == ({3, 4}, set())
