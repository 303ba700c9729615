"""Plans beside other requests, in parts, and when something fails: every answer is the one without reuse."""

import pytest

from engine_wrapper.vllm.attention import VllmRows
from tests.engine_wrapper.vllm.conftest import (
    WHOLE,
    both_schedulings,
    cold_answers,
    fail_planned,
    random_tokens,
    taught,
)

some = random_tokens(1)
DOCUMENTS = [some(500) for _ in range(2)]
DONORS = [[*some(20 + 9 * i), *document, *some(20)] for i, document in enumerate(DOCUMENTS)]
MOVED = [[*some(33 + 5 * i), *document, *some(70)] for i, document in enumerate(DOCUMENTS)]
NEW = some(150)


@pytest.fixture(scope="module")
def cold():
    return cold_answers(*DONORS, *MOVED, NEW)


def assert_cold(served, cold, *prompts, **options):
    found = served.ask(*prompts, max_tokens=16, **options)
    answers = found if isinstance(found, list) else [found]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == cold(prompt).tokens
    return answers


def test_several_plans_run_in_one_step_beside_a_cold_prompt_and_decodes(engine, cold):
    served = taught(engine(*WHOLE), *DONORS)
    assert_cold(served, cold, MOVED[0], NEW, MOVED[1])
    assert [each > 400 for each in served.offered_of(3)] == [True, False, True]
    assert not served.runtime.faults
    # Two sequences at a time: the later ones are planned while the first ones decode.
    served = taught(engine(*WHOLE, max_num_seqs=2), *DONORS)
    assert_cold(served, cold, NEW, MOVED[0], DONORS[0], MOVED[1])
    assert served.offered_of(4)[1] > 400
    assert not served.runtime.faults


@pytest.mark.parametrize("policy", [WHOLE, ("verified",)], ids=["boundary", "verified"])
def test_a_plan_is_cut_to_the_budget_of_a_step(
    engine,
    cold,
    policy,
    monkeypatch,
):
    served = taught(engine(*policy, max_num_batched_tokens=128, max_num_seqs=4), *DONORS)
    most = 0
    enter = VllmRows.enter

    def watched(rows, stage):
        nonlocal most
        most = max(most, stage.num_rows)
        enter(rows, stage)

    monkeypatch.setattr(VllmRows, "enter", watched)
    assert_cold(served, cold, MOVED[0], MOVED[1])
    assert min(served.offered_of(2)) > 400
    assert 0 < most <= 128
    assert not served.runtime.faults


@pytest.mark.every_version
def test_approximate_kv_is_never_published(engine, cold):
    served = taught(engine("position_fix"), *DONORS)
    served.forget()
    first = served.ask(MOVED[0], max_tokens=40)
    assert first.cached > 400
    served.runtime.refusal = "test"
    # In front of the document everything was computed, and is exact.
    exact = MOVED[0].index(DOCUMENTS[0][0])
    again = served.ask(MOVED[0], max_tokens=16)
    assert again.cached <= exact
    assert again.tokens == cold(MOVED[0]).tokens


@pytest.mark.every_version
def test_a_plan_that_fails_is_computed_and_its_neighbour_is_unharmed(engine, cold, monkeypatch):
    served = taught(engine("position_fix"), *DONORS)
    failures = fail_planned(monkeypatch, served)
    assert_cold(served, cold, MOVED[0], NEW)
    assert len(failures) == 2
    assert served.runtime.faults["planned_forward"] == 1
    assert served.runtime.refusal == "planned_forward"
    assert_cold(served, cold, MOVED[1])  # served as without us from then on


def test_donors_that_are_lost_on_the_way_cost_a_cold_prefill(engine, cold, monkeypatch):
    served = taught(engine("position_fix"), *DONORS)
    worker = served.worker._worker
    load = worker._load

    def lost(plans, changes):
        worker.store.clear()
        load(plans, changes)

    monkeypatch.setattr(worker, "_load", lost)
    assert_cold(served, cold, MOVED[0], NEW)
    assert "load_failed" in {served.scheduler.outcomes.of(number).reason for number in (served.last - 1, served.last)}


def test_a_load_that_raises_is_reported_and_computed(engine, cold, monkeypatch):
    served = taught(engine("position_fix"), *DONORS)

    def broken(plans, _):
        if plans:
            raise OSError("the tier is gone")

    monkeypatch.setattr(served.worker._worker, "_load", broken)
    assert_cold(served, cold, NEW, MOVED[1])
    assert served.runtime.faults["start_load_kv"] == 1


def test_a_plan_that_no_forward_has_executed_is_computed(engine, cold):
    served = taught(engine("position_fix"), *DONORS)
    served.worker._forward.remove()
    assert_cold(served, cold, MOVED[0], NEW)
    assert served.runtime.faults["plan_not_executed"] == 1
    assert served.runtime.refusal == "plan_not_executed"


def test_salts_keep_texts_apart(engine, cold):
    served = engine("position_fix")
    served.ask(DONORS[0], max_tokens=1, salts=["a"])
    served.settle()
    for salt in ("b", None):
        [answer] = assert_cold(served, cold, MOVED[0], salts=[salt])
        assert answer.cached == 0
    assert served.ask(MOVED[0], salts=["a"]).cached > 400


def test_requests_that_are_preempted_come_back_with_their_answers(engine, cold, monkeypatch):
    # Both prompts have 19 blocks, and the first tokens of the second one's answer lie in another.
    served = taught(engine(*WHOLE, num_gpu_blocks_override=39, max_model_len=1024), *DONORS)
    preempt, times = served.core.scheduler._preempt_request, 0

    def counted(*arguments, **options):
        nonlocal times
        times += 1
        preempt(*arguments, **options)

    monkeypatch.setattr(served.core.scheduler, "_preempt_request", counted)
    assert_cold(served, cold, *MOVED)
    assert times
    assert not served.runtime.faults


@both_schedulings
def test_an_aborted_request_frees_its_blocks(is_async, engine):
    from vllm import SamplingParams

    served = engine("position_fix")
    free = served.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    llm_engine = served.llm.llm_engine
    llm_engine.add_request("left", {"prompt_token_ids": DONORS[0]}, SamplingParams(max_tokens=64, ignore_eos=True))
    for _ in range(3):
        llm_engine.step()
    llm_engine.abort_request(["left"])
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    served.settle()
    assert served.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert not served.runtime.faults
