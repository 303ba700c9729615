"""vLLM's own modes around plans: answers are those of cold runs, and in none is anything approximate published."""

import pytest
from torch.cuda import is_available
from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from semblend_trt.outcome import Scope, advice
from tests.engine_wrapper.vllm import conftest
from tests.engine_wrapper.vllm.conftest import DONOR, MOVED, NEW, SHORT, WHOLE, assert_cold, both_modes, taught

HEAD, BLOCK = 70, 32


def sampled(served, prompt, **options):
    params = SamplingParams(detokenize=False, **{"max_tokens": 8, "temperature": 0, **options})
    return served.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]


def assert_planned(served, cold):
    assert_cold(served, cold, MOVED)
    assert served.offered > 400


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 16},
        {"block_size": 128},
        {"enable_prefix_caching": False},
        {"enforce_eager": False},
        {"max_num_batched_tokens": 96, "max_num_seqs": 16},  # prompts come in chunks, plans in parts
    ],
    ids=str,
)
def test_answers_are_cold_ones(engine, cold, options):
    served = taught(engine(*WHOLE, **options))
    config = served.llm.llm_engine.vllm_config
    for name, value in options.items():
        holders = (config.cache_config, config.scheduler_config, config.model_config)
        assert [getattr(each, name) for each in holders if hasattr(each, name)] == [value]
    assert bool(served.worker._forward._graphs._batches) == (is_available() and "enforce_eager" in options)
    assert_planned(served, cold)
    beside = served.ask(NEW, MOVED, max_tokens=16)
    assert [each.tokens for each in beside] == [cold(NEW).tokens, cold(MOVED).tokens]


def test_priorities_change_no_answer(engine, cold):
    served = taught(engine(*WHOLE, scheduling_policy="priority"))
    params = SamplingParams(max_tokens=16, temperature=0, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in (NEW, MOVED)]
    found = served.llm.generate(asked, params, use_tqdm=False, priority=[5, 0])
    assert [list(each.outputs[0].token_ids) for each in found] == [cold(NEW).tokens, cold(MOVED).tokens]
    assert sum(served.offered_of(2)) > 400


def test_several_samples_of_one_prompt_are_those_of_a_cold_run(engine):
    options = {"n": 3, "seed": 5, "temperature": 0.8, "max_tokens": 12}
    alone = sampled(engine(None, enable_prefix_caching=False), MOVED, **options)
    served = taught(engine(*WHOLE))
    found = sampled(served, MOVED, **options)
    assert [each.token_ids for each in found.outputs] == [each.token_ids for each in alone.outputs]
    assert len({tuple(each.token_ids) for each in found.outputs}) == 3
    settled = [served.scheduler.outcomes.of(served.last - i) for i in range(3)]
    assert sum(each.offered_tokens for each in settled) > 400


@both_modes
def test_an_answer_that_stops_early_is_cold_and_a_donor(engine, cold, is_async):
    served = taught(engine(*WHOLE))
    stop = cold(MOVED).tokens[5]
    until = cold(MOVED).tokens.index(stop) + 1
    found = sampled(served, MOVED, stop_token_ids=[stop], max_tokens=16)
    assert served.offered > 400
    assert (found.outputs[0].token_ids, found.outputs[0].stop_reason) == (cold(MOVED).tokens[:until], stop)
    served.settle()
    served.forget()
    # With async scheduling a step ran behind the stop; the donor that is left holds nothing of it.
    assert_planned(served, cold)


@both_modes
def test_answers_are_cold_ones_in_either_scheduling(engine, cold, is_async):
    served = taught(engine(*WHOLE, max_num_seqs=2))
    assert (served.core.batch_queue is not None) == is_async
    assert_planned(served, cold)
    for _ in range(2):
        answers = served.ask(NEW, MOVED, MOVED[: HEAD + 480], MOVED, max_tokens=16)
        assert answers[0].tokens == cold(NEW).tokens
        assert answers[1].tokens == answers[3].tokens == cold(MOVED).tokens
        served.forget()


@pytest.mark.parametrize("steps", [2, 5])
@both_modes
def test_an_aborted_request_leaves_what_was_computed(engine, cold, is_async, steps):
    # One part of the prompt a step: the abort comes within the prompt, or while it decodes.
    served = engine("position_fix", max_num_batched_tokens=256)
    llm_engine, pool = served.llm.llm_engine, served.core.scheduler.kv_cache_manager.block_pool
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


def test_what_is_asked_for_about_the_prompt_is_served_as_stock(engine, cold):
    options = {"prompt_logprobs": 1, "logprobs": 1}
    alone = sampled(engine(None, enable_prefix_caching=False), MOVED, **options)
    served = taught(engine("position_fix"))
    found = sampled(served, MOVED, **options)
    assert (found.num_cached_tokens, found.prompt_logprobs) == (0, alone.prompt_logprobs)
    assert found.outputs[0].token_ids == alone.outputs[0].token_ids
    assert served.scheduler.outcomes.of(served.last).reason == "prompt_logprobs"
    found = sampled(served, MOVED, max_tokens=16, skip_reading_prefix_cache=True)
    assert (found.num_cached_tokens, found.outputs[0].token_ids) == (0, cold(MOVED).tokens)
    assert served.scheduler.outcomes.of(served.last).reason == "skip_reading_prefix_cache"
    counted = served.scheduler.outcomes.reasons()
    assert (counted["prompt_logprobs"], counted["skip_reading_prefix_cache"]) == (1, 1)
    assert sampled(served, MOVED).num_cached_tokens >= len(MOVED) - BLOCK
    assert served.runtime.refusal is None


@pytest.mark.parametrize(
    ("reason", "changes"),
    [("load_failure_policy", {"kv_load_failure_policy": "fail"}), ("kv_role", {"kv_role": "kv_producer"})],
)
def test_a_refused_engine_serves_as_stock(engine, cold, reason, changes, caplog):
    extra = {**SHORT, "policy": "position_fix"}
    served = engine(
        None, kv_transfer_config=KVTransferConfig(**{**conftest.TRANSFER, **changes}, kv_connector_extra_config=extra)
    )
    served.ask(DONOR)
    answer = served.ask(MOVED, max_tokens=16)
    assert served.refusal == reason
    assert f"({reason}); vLLM serves as without us. {advice(reason, Scope.VLLM)}" in caplog.text
    assert (answer.tokens, answer.logprobs, answer.cached) == (cold(MOVED).tokens, cold(MOVED).logprobs, 0)
    assert served.scheduler.outcomes.reasons() == {reason: 2}


class Published:
    """What a subscriber to vLLM's KV events is told: the hashes of all blocks that were ever stored."""

    def __init__(self):
        self.hashes = set()

    def publish(self, batch):
        for event in batch.events:
            self.hashes.update(getattr(event, "block_hashes", ()) if type(event).__name__ == "BlockStored" else ())

    def shutdown(self):
        """Ends with its engine."""


class Watched:
    """Runs one request step by step, and looks at vLLM's prefix cache and events behind each of them."""

    def __init__(self, served, told):
        self._served, self._told = served, told
        self.pool = served.core.scheduler.kv_cache_manager.block_pool
        self.exact = []
        self.approximate = []

    def run(self, prompt, exact_tokens, max_tokens):
        """Steps that were looked at while the request had approximate blocks."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        self._served.settle()
        llm_engine, scheduler = self._served.llm.llm_engine, self._served.core.scheduler
        llm_engine.add_request("watched", {"prompt_token_ids": prompt}, params)
        *_, request = scheduler.requests.values()
        looked, whole = 0, exact_tokens // BLOCK
        while llm_engine.has_unfinished_requests():
            llm_engine.step()
            blocks = scheduler.kv_cache_manager.coordinator.get_blocks(request.request_id)[0]
            self.exact, self.approximate = request.block_hashes[:whole], request.block_hashes[whole:]
            assert all(block.block_hash is None for block in blocks[whole:])
            self.assert_clean()
            looked += len(blocks) > whole
        return looked

    def assert_clean(self):
        assert not any(self.pool.get_cached_block(each, [0]) for each in self.approximate)
        assert not self._told.hashes & self._as_told(self.approximate)

    def assert_exact_told(self):
        assert self._told.hashes >= self._as_told(self.exact)
        assert self.exact

    @staticmethod
    def _as_told(hashes):
        return {maybe_convert_block_hash(each) for each in hashes}


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 64}], ids=str)
@both_modes
def test_approximate_blocks_are_never_published(engine, cold, is_async, options):
    # Room for two prompts: what is held is given to others while they are asked again and again.
    room = {"num_gpu_blocks_override": 44, "max_model_len": 1024}
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    served = engine("position_fix", kv_events_config=events, **room, **options)
    told = served.core.scheduler.kv_event_publisher = Published()
    for each in (NEW, DONOR):
        served.ask(each, max_tokens=1)
    watched, some = Watched(served, told), conftest.random_tokens(2)
    assert watched.run(MOVED, HEAD, max_tokens=100) > 90
    assert served.scheduler.outcomes.of(served.last).reused_tokens > 400
    assert len(watched.approximate) == len([*MOVED, *range(100)]) // BLOCK - HEAD // BLOCK
    watched.assert_exact_told()
    for _ in range(3):
        served.ask(some(600), some(600), max_tokens=40, ignore_eos=True)
        watched.assert_clean()
    assert watched.run(MOVED, HEAD, max_tokens=40) > 30
    assert served.scheduler.outcomes.of(served.last).reused_tokens > 400
    served.runtime.refusal = "test"
    answer = served.ask(MOVED, max_tokens=16)
    assert (answer.cached <= HEAD, answer.tokens) == (True, cold(MOVED).tokens)
    assert served.ask(MOVED, max_tokens=16).cached >= len(MOVED) - BLOCK
