"""vLLM's own modes around plans: answers are those of cold runs, and in none is anything approximate published."""

import pytest
from torch.cuda import is_available
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from engine_wrapper.vllm.attention import VllmRows
from tests.builders.vllm import (
    DOCUMENT,
    DONOR,
    MOVED,
    NEW,
    WHOLE,
    assert_cold,
    both_modes,
    cold_answers,
    random_tokens,
    some,
    taught,
)
from tests.engine_wrapper.watching import watched

HEAD, BLOCK = 70, 32
MODES = [{"block_size": 16}, {"block_size": 128}, {"enable_prefix_caching": False}, {"enforce_eager": False}]


def assert_planned(served, cold):
    assert_cold(served, cold, MOVED)
    assert served.offered > 400


@pytest.mark.promise("engines", "In vLLM answers without a plan...")
@pytest.mark.parametrize("options", MODES, ids=str)
def test_answers_are_cold_ones(engine, cold, options):
    served = taught(engine(*WHOLE, **options))
    assert bool(served.worker._forward._graphs._batches) == (is_available() and "enforce_eager" in options)
    assert_planned(served, cold)
    beside = served.ask(NEW, MOVED, max_tokens=8)
    assert [each.tokens for each in beside] == [cold(NEW).tokens, cold(MOVED).tokens]


@both_modes
def test_an_answer_that_stops_early_is_cold_and_a_donor(engine, cold, is_async):
    served = taught(engine(*WHOLE))
    stop = cold(MOVED).tokens[5]
    until = cold(MOVED).tokens.index(stop) + 1
    [found] = served.outputs(MOVED, stop_token_ids=[stop], max_tokens=8)
    assert served.offered > 400
    assert (found.outputs[0].token_ids, found.outputs[0].stop_reason) == (cold(MOVED).tokens[:until], stop)
    served.emptied()
    # With async scheduling a step ran behind the stop; the donor that is left holds nothing of it.
    assert_planned(served, cold)


@pytest.mark.parametrize(("is_async", "steps"), [(True, 2), (True, 5), (False, 2), (False, 5)], indirect=["is_async"])
def test_an_aborted_request_leaves_what_was_computed(engine, cold, is_async, steps):
    # One part of the prompt a step: the abort comes within the prompt, or while it decodes.
    served = engine("position_fix", kept=True, max_num_batched_tokens=256)
    llm_engine, pool = served.llm.llm_engine, served.blocks
    free = pool.get_num_free_blocks()
    llm_engine.add_request("left", {"prompt_token_ids": MOVED}, SamplingParams(max_tokens=64, ignore_eos=True))
    for _ in range(steps):
        llm_engine.step()
    llm_engine.abort_request(["left"])
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    served.settle()
    assert pool.get_num_free_blocks() == free
    served.forget()
    [answer] = assert_cold(served, cold, MOVED)
    assert answer.cached >= 256  # what was computed is a donor, and right


def stored_hashes(_, batch):
    """Of the blocks that a batch of vLLM's KV events says are stored."""
    return {each for event in batch.events if type(event).__name__ == "BlockStored" for each in event.block_hashes}


@pytest.mark.promise("engines", "Approximate blocks stay out of vLLM's prefix cache and KV events")
@pytest.mark.parametrize(
    ("is_async", "options"), [(True, {}), (False, {"max_num_batched_tokens": 64})], indirect=["is_async"], ids=str
)
def test_approximate_blocks_are_never_published(engine, cold, is_async, options, monkeypatch):
    # Room for two prompts: what is held is given to others while they are asked again and again.
    room = {"num_gpu_blocks_override": 44, "max_model_len": 1024}
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    served = engine("position_fix", kv_events_config=events, **room, **options)
    sent = watched(monkeypatch, served.core.scheduler.kv_event_publisher, "publish", stored_hashes)
    hashes = watched(monkeypatch, served.core.scheduler, "add_request", lambda _, request: request.block_hashes)
    for each in (NEW, DONOR):
        served.ask(each, max_tokens=1)
    others = random_tokens(2)
    for _ in range(2):
        served.ask(MOVED, max_tokens=100, ignore_eos=True)
        assert served.report().reused_tokens > 400
        exact, approximate = hashes[-1][: HEAD // BLOCK], hashes[-1][HEAD // BLOCK :]
        assert len(approximate) == len([*MOVED, *range(100)]) // BLOCK - len(exact)
        served.ask(others(600), others(600), max_tokens=40, ignore_eos=True)
        assert not any(served.blocks.get_cached_block(each, [0]) for each in approximate)
        # Each block that was ever published has an event.
        hashes_sent = set().union(*sent)
        assert not hashes_sent & {*map(maybe_convert_block_hash, approximate)}
        assert hashes_sent >= {*map(maybe_convert_block_hash, exact)} > set()
    served.runtime.refusal = "test"
    answer = served.ask(MOVED, max_tokens=8)
    assert (answer.cached <= HEAD, answer.tokens) == (True, cold(MOVED).tokens)
    assert served.ask(MOVED, max_tokens=8).cached >= len(MOVED) - BLOCK


drawn = random_tokens(1)
DOCUMENTS = [drawn(500) for _ in range(2)]
DONORS = [[*drawn(20 + 9 * i), *document, *drawn(20)] for i, document in enumerate(DOCUMENTS)]
SHIFTED = [[*drawn(33 + 5 * i), *document, *drawn(70)] for i, document in enumerate(DOCUMENTS)]
FRESH = drawn(150)


@pytest.fixture(scope="module")
def cold_of_two():
    return cold_answers(*DONORS, *SHIFTED, FRESH, SHIFTED[0][:500])


@pytest.mark.promise(
    "engines", "In vLLM plans run beside other requests, in chunks, under preemption and either scheduling"
)
@both_modes
def test_several_plans_run_in_one_step_beside_a_cold_prompt_and_decodes(engine, cold_of_two, is_async):
    served = taught(engine(*WHOLE), *DONORS)
    assert_cold(served, cold_of_two, SHIFTED[0], FRESH, SHIFTED[1])
    assert [each > 400 for each in served.offered_of(3)] == [True, False, True]
    served = taught(engine(*WHOLE, max_num_seqs=2), *DONORS)
    assert (served.core.batch_queue is not None) == is_async
    for _ in range(2):
        assert_cold(served, cold_of_two, FRESH, SHIFTED[0], DONORS[0], SHIFTED[0][:500], SHIFTED[1], SHIFTED[0])
        assert served.offered_of(6)[1] > 400
        served.forget()


@pytest.mark.parametrize("policy", [WHOLE, ("verified",)], ids=["boundary", "verified"])
def test_a_plan_is_cut_to_the_budget_of_a_step(engine, cold_of_two, policy, monkeypatch):
    served = taught(engine(*policy, max_num_batched_tokens=128, max_num_seqs=4), *DONORS)
    rows = watched(monkeypatch, VllmRows, "enter", lambda _, __, stage, **___: stage.num_rows)
    found = served.ask(*SHIFTED, max_tokens=8)
    assert [each.tokens for each in found] == [cold_of_two(each).tokens for each in SHIFTED]
    assert min(served.offered_of(2)) > 400
    assert 0 < max(rows) <= 128


@pytest.mark.promise("engines", "Approximate blocks stay out of vLLM's...")
@pytest.mark.every_version
def test_approximate_kv_is_never_published_and_salts_keep_texts_apart(engine, cold_of_two):
    served = taught(engine("position_fix"), *DONORS)
    assert served.ask(SHIFTED[0], max_tokens=40).cached > 400
    served.runtime.refusal = "test"
    [again] = assert_cold(served, cold_of_two, SHIFTED[0])
    assert again.cached <= SHIFTED[0].index(DOCUMENTS[0][0])
    served.renew().ask(DONORS[0], max_tokens=1, salts=["a"])
    served.settle()
    for salt in ("b", None):
        [answer] = assert_cold(served, cold_of_two, SHIFTED[0], salts=[salt])
        assert answer.cached == 0
    assert served.ask(SHIFTED[0], salts=["a"]).cached > 400


@pytest.mark.promise("engines", "In vLLM plans run beside other...")
@pytest.mark.parametrize(("policy", "priority"), [("fcfs", None), ("priority", [5, 0])], ids=["fcfs", "priority"])
def test_requests_that_are_preempted_come_back_with_their_answers(engine, cold_of_two, policy, priority, monkeypatch):
    # Both prompts have 19 blocks, and the first tokens of the second one's answer lie in another.
    served = taught(engine(*WHOLE, num_gpu_blocks_override=39, max_model_len=1024, scheduling_policy=policy), *DONORS)
    scheduler = served.core.scheduler
    preempted = watched(monkeypatch, scheduler, "_preempt_request", lambda _, request, *__, **___: request.priority)
    assert_cold(served, cold_of_two, *SHIFTED, priority=priority)
    assert {*preempted} == {max(priority or [0])}


DRAFTS = {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
REPEATED = some(40) * 4  # an answer to it has drafts that are taken


@pytest.mark.promise("engines", "In vLLM drafts of the text change no answer and no donor")
@pytest.mark.every_version
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_of_the_text_change_no_answer_and_no_donor(engine, method, monkeypatch):
    if method == "suffix":
        pytest.importorskip("arctic_inference")
    cold, most = cold_answers(DONOR, MOVED, REPEATED), 48
    served = taught(engine(*WHOLE, speculative_config={"method": method, **DRAFTS}))
    [answer] = assert_cold(served, cold, MOVED)
    assert (answer.cached, served.offered) == (0, len(DOCUMENT))
    steps = watched(monkeypatch, served.core.scheduler, "update_from_output", lambda *_: 1)
    answered = served.ask(REPEATED, max_tokens=most)
    assert answered.tokens[:8] == cold(REPEATED).tokens
    assert len(steps) < most  # drafts were taken
    served.emptied()
    # The donor holds the answer too, but for what the last step may have added.
    again = [*REPEATED, *answered.tokens]
    served.ask([*again, *DONOR[:30]], max_tokens=1)
    assert served.offered >= len(again) - 1 - DRAFTS["num_speculative_tokens"]
