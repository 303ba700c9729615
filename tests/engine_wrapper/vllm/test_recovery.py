"""What could be neither placed nor computed by our rows is computed by vLLM: all answers are cold ones."""

from dataclasses import replace

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from engine_wrapper.vllm.scheduler import Recovery
from tests.engine_wrapper.vllm.conftest import DONOR, LONG, MOVED, NEW, assert_cold, both_modes, fail_planned, taught


def fails_twice(monkeypatch, served):
    """Neither plans nor what they promised can be computed by our rows."""
    fail_planned(monkeypatch, served)


def cannot_be_read(monkeypatch, served):
    """The order of a step's requests is unknown."""
    forward = served.worker._forward
    monkeypatch.setattr(forward, "_batch", lambda options: (_ for _ in ()).throw(LookupError("injected")))


def is_disordered(monkeypatch, served):
    """The rows of a step stand in another order than its requests are told in."""
    forward = served.worker._forward
    runner = forward._runner
    monkeypatch.setattr(forward, "_runner", replace(runner, order=lambda: runner.order()[::-1]))


def is_lost(monkeypatch, served):
    """vLLM runs its steps past our forward."""
    served.worker._forward.remove()


def is_unread(monkeypatch, served):
    """A step in which something was promised is told in words that are not known."""
    half = served.core.scheduler.connector._scheduler
    read = half._steps.read

    def fails(output):
        if any(request.num_computed_tokens > 400 for request in output.scheduled_new_reqs):
            raise AttributeError("injected")
        return read(output)

    monkeypatch.setattr(half._steps, "read", fails)


FAILURES = [fails_twice, cannot_be_read, is_disordered, is_lost, is_unread]


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
@both_modes
def test_a_double_failure_costs_nobody_a_token(engine, cold, is_async, fail, monkeypatch):
    served = taught(engine("position_fix", max_num_batched_tokens=96, max_num_seqs=2))
    assert (served.core.batch_queue is not None) == is_async
    fail(monkeypatch, served)
    answers = assert_cold(served, cold, LONG, NEW, MOVED, DONOR)
    assert served.refusal in ("planned_forward", "plan_not_executed", "step_unreadable")
    assert [each.cached for each in answers[:2]] == [0, 0]
    assert_cold(served, cold, MOVED, NEW)
    assert set(served.faults) == {served.refusal}
    assert served.scheduler.outcomes.reasons()[served.refusal] >= 2


def test_a_step_that_a_graph_replays_costs_its_plan_and_no_later_one(engine, cold, monkeypatch):
    """A full graph of a decode runs no forward of ours; a small budget may leave a planned prompt so few tokens."""
    served = taught(engine("position_fix"))
    forward = served.worker._forward
    with monkeypatch.context() as change:
        change.setattr(served.worker, "_replayed", 1 << 20)
        change.setattr(forward, "_run_step", lambda arguments, options: forward._stock(*arguments, **options))
        [answer] = assert_cold(served, cold, MOVED)
    assert (answer.cached, served.refusal, dict(served.faults)) == (0, None, {"plan_not_executed": 1})
    assert served.ask(MOVED).cached > 0


@pytest.mark.parametrize("call", ["wait_for_save", "get_finished"])
def test_an_end_that_cannot_be_taken_note_of_costs_the_steps_donors(engine, cold, call, monkeypatch):
    served = engine("position_fix")
    worker = served.worker._worker
    with monkeypatch.context() as change:
        change.setattr(worker, call, lambda *_: (_ for _ in ()).throw(RuntimeError("injected")))
        served.ask(DONOR, max_tokens=1)
        served.ask(LONG, max_tokens=1)
    assert set(served.faults) == {call}
    answers = assert_cold(served, cold, MOVED, NEW)
    assert [each.cached for each in answers] == [0, 0]


def test_a_request_may_end_behind_a_forward_whose_step_has_not(engine, cold, monkeypatch):
    """With a grammar the V2 runner samples a step after vLLM has ended requests of the one before."""
    served = taught(engine("position_fix"))
    open_behind, end = [], served.worker.wait_for_save

    def watched(metadata):
        open_behind.append(served.runtime.is_forward_open)
        end(metadata)

    monkeypatch.setattr(served.worker, "wait_for_save", watched)
    assert_cold(served, cold, NEW, LONG)
    assert open_behind
    assert not any(open_behind)


@pytest.mark.every_version
def test_a_plan_that_fails_twice_leaves_its_neighbour_unharmed(engine, cold, monkeypatch):
    served = taught(engine("position_fix"))
    failures = fail_planned(monkeypatch, served)
    assert_cold(served, cold, MOVED, NEW)
    assert (len(failures), served.faults) == (2, {"planned_forward": 1})
    assert_cold(served, cold, MOVED)  # served as without us from then on


@both_modes
def test_what_was_never_written_is_not_hit(engine, cold, is_async, monkeypatch):
    served = taught(engine("position_fix"))
    fails_twice(monkeypatch, served)
    # The donor's text comes again where it stood: vLLM publishes its blocks before they are loaded, and hits them.
    assert_cold(served, cold, DONOR, NEW, DONOR, DONOR)
    assert served.refusal == "planned_forward"
    assert_cold(served, cold, DONOR, MOVED)
    served.settle()
    pool = served.core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@both_modes
def test_a_step_that_failed_can_be_aborted(engine, cold, is_async, monkeypatch):
    served = taught(engine("position_fix"))
    fails_twice(monkeypatch, served)
    llm_engine = served.llm.llm_engine
    for name, prompt in (("gone", MOVED), ("kept", NEW)):
        llm_engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=16, temperature=0))
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


def test_blocks_are_told_where_vllm_cannot_begin_again():
    class Broken:
        class scheduler_config:  # noqa: N801 - vLLM's name
            async_scheduling = True

        def update_from_output(self):
            """Marks vLLM's scheduler."""

        def reset_prefix_cache(self, reset_running_requests=False):
            raise AssertionError("injected")

        def bound(self):
            recovery = Recovery()
            recovery.bind()
            return recovery

    recovery = Broken().bound()
    recovery.compute_again([3, 4])
    assert (recovery.take_failed_blocks(), recovery.take_failed_blocks()) == ({3, 4}, set())
