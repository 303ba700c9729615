"""A default engine of 1.4, as far as it can be played: V2, overlap, decode graphs, our connector and our wrapper."""

import os
import random
from collections import defaultdict

import pytest

from engine_wrapper.embedded.llm import SamplingParams
from semblend_trt.plan import EngineMode
from semblend_trt.transfer.save import DonorSaver
from tests.builders.engine import drop_batch, evict_prefixes, published_nodes, text
from tests.engine_wrapper.trtllm.stand_ins import TrtllmRunner, engine_of
from tests.engine_wrapper.watching import watched

SIX = SamplingParams(max_tokens=6, ignore_eos=True, return_generation_logits=True)
DOCUMENT = text(1, 90)
STEPS = int(os.environ.get("STATEFUL_STEPS", "3000")) // 25


@pytest.fixture(scope="module")
def runner(tiny_qwen2_path):
    return TrtllmRunner(tiny_qwen2_path, device="cpu")


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    # Every layer computes every token: answers are a cold run's, to rounding.
    monkeypatch.setenv("SEMBLEND_POLICY", "boundary")
    monkeypatch.setenv("SEMBLEND_RECOMPUTE_BOUNDARY_LAYER", "3")
    monkeypatch.setenv("SEMBLEND_MIN_SPAN", "32")
    monkeypatch.setenv("SEMBLEND_EMBEDDER", "off")


@pytest.fixture
def cold(tiny_qwen2_path, runner, monkeypatch):
    def outputs(prompts, params=SIX):
        with monkeypatch.context() as patches:
            patches.setenv("SEMBLEND_ENABLED", "0")
            with engine_of(tiny_qwen2_path, runner) as llm:
                return [llm.generate([each], params)[0].outputs[0] for each in prompts]

    return outputs


@pytest.fixture(params=[False, True], ids=["in-step", "overlap"])
def llm(request, tiny_qwen2_path, runner):
    with engine_of(tiny_qwen2_path, runner, overlap=request.param) as llm:
        yield llm


@pytest.mark.promise(
    "engines",
    "On a default engine of 1.4, as far as it is played, a moved document is reused while decode steps are "
    "replayed, and no function of ours runs in these beyond one look-up",
)
def test_a_moved_document_is_reused_while_decode_steps_are_replayed(llm, cold, record_property):
    llm.generate([[*text(3, 10), *DOCUMENT, *text(4, 5)]], SIX)
    llm.settle()
    attachment, runtime = llm.connector_worker.attachment, llm.connector_worker._runtime
    assert (attachment.guard_refusal, attachment.execution_refusal) == (None, None)
    assert runtime.mode is EngineMode.WRAPPER, "the first prompt has proven it"
    published = len(list(published_nodes(llm.block_manager)))
    moved = [*text(5, 21), *DOCUMENT, *text(7, 9)]
    (output,) = llm.generate([moved], SIX)
    (expected,) = cold([moved])
    assert output.outputs[0].token_ids == expected.token_ids
    difference = float((output.outputs[0].generation_logits - expected.generation_logits).abs().max())
    assert difference <= 1e-4
    record_property("logit_difference", difference)
    assert llm.connector_scheduler.reuse_of(output.request_id).offered_tokens == 90
    llm.settle()
    assert len(list(published_nodes(llm.block_manager))) == published, "approximate KV stays out of the tree"
    runner = llm.executor.model_runner
    assert (runner.kinds["replayed"] > 0, runner.hook_calls) == (True, 0)
    assert not runtime.faults


@pytest.mark.promise("engines", "Every plan leaves two tokens there, since a context of one may run as a decode step")
def test_an_exact_prompt_leaves_two_tokens_and_runs_beside_decode_steps(llm, cold):
    prompt = text(3, 80)
    llm.generate([prompt], SIX)
    llm.settle()
    evict_prefixes(llm)
    (output,) = llm.generate([prompt], SIX)
    assert (output.outputs[0].token_ids, output.reused_tokens) == (cold([prompt])[0].token_ids, 78)
    assert not llm.connector_worker._runtime.faults


@pytest.mark.promise("engines", "Blocks that V2 exchanges cost no donor, and a save reads the request's final ones")
def test_donors_whose_blocks_were_exchanged_are_saved_from_those_that_took_their_place(llm, cold, monkeypatch):
    prompts = [[*text(3, 70), *text(seed, 20)] for seed in (4, 5, 6)]
    exchanged = watched(monkeypatch, DonorSaver, "start", lambda *given: given[2].block_ids)
    llm.generate(prompts, SIX)
    llm.settle()
    assert sum(map(bool, exchanged)) == 2
    evict_prefixes(llm)
    moved = [[*text(7, 21), *prompt[40:], *text(8, 5)] for prompt in prompts]
    outputs = llm.generate(moved, SIX)
    assert [output.outputs[0].token_ids for output in outputs] == [each.token_ids for each in cold(moved)]
    assert all(llm.connector_scheduler.reuse_of(output.request_id).offered_tokens >= 48 for output in outputs)
    assert not llm.connector_worker._runtime.faults


@pytest.mark.promise(
    "engines", "Pauses, offers in part, dropped batches and cancels in both loops change no answer and lose nothing"
)
@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_random_lives_answer_as_cold_and_lose_nothing(tiny_qwen2_path, runner, cold, record_property, overlap):
    """Pauses, offers in part, dropped batches, cancels and evictions, under a pool for about three requests."""
    small = {"cache": {"max_tokens": 55 * 8}, "max_num_tokens": 96, "max_batch_size": 5}
    with engine_of(tiny_qwen2_path, runner, overlap=overlap, **small) as llm:
        life = Life(llm, random.Random(overlap))
        for _ in range(STEPS):
            life.step()
        llm.run_until(lambda: all(stream.has_news() for _, stream in life.live))
        life.take()
        llm.settle()
        runtime, reports = llm.connector_worker._runtime, llm.connector_scheduler.outcomes._reports.values()
        assert (runtime.mode, dict(runtime.faults), runtime.failed) == (EngineMode.WRAPPER, {}, set())
        assert (life.live, llm.block_manager.num_free_blocks) == ([], llm.block_manager.num_blocks)
        assert llm.connector_scheduler.donor_index.catalog.stats().leases == 0
        assert life.aborts * sum(each.outcome == "backend_materialized_reuse" for each in reports) > 0
    wanted = dict(zip(life.answers, cold(map(list, life.answers)), strict=True))
    assert all(tokens == wanted[prompt].token_ids for prompt, each in life.answers.items() for tokens in each)
    assert runner.hook_calls == 0
    figures = {"steps": STEPS, "hook_calls": 0, "decode_steps": runner.kinds["replayed"] + runner.kinds["eager decode"]}
    for name, value in figures.items():
        record_property(name, value)


class Life:
    """Random requests to one engine; `answers` by prompt."""

    def __init__(self, llm, drawn):
        self._llm, self._drawn, self.live, self.answers, self.aborts = llm, drawn, [], defaultdict(list), 0
        self._texts = [text(seed, 120) for seed in range(20, 24)]

    def step(self):
        executor, action = self._llm.executor, self._drawn.random()
        if action < 0.15 and len(self.live) < 6:
            prompt = self._prompt()
            self.live.append((prompt, self._llm.generate_async(prompt, SIX, streaming=False)))
        elif action < 0.18 and self.live:
            self.aborts += self._llm.abort(self._drawn.choice(self.live)[1].request_id)
        elif action < 0.22:
            drop_batch(executor)
        elif action < 0.25 and executor._active:
            executor._pause(self._drawn.choice(list(executor._active.values())))
        elif action < 0.30:
            evict_prefixes(self._llm)
        else:
            executor.step()
        self.take()

    def take(self):
        ended = [each for each in self.live if each[1].has_news()]
        self.live = [each for each in self.live if each not in ended]
        for prompt, stream in ended:
            answer = list(stream)[-1].outputs[0]
            assert answer.finish_reason in ("length", "cancelled"), answer.finish_reason
            if answer.finish_reason == "length":
                self.answers[tuple(prompt)].append(answer.token_ids)

    def _prompt(self):
        begin, end = (text(self._drawn.randrange(9), self._drawn.choice(sizes)) for sizes in ((0, 5, 17), (1, 2, 9)))
        start = self._drawn.randrange(40)
        return [*begin, *self._drawn.choice(self._texts)[start : start + 80], *end]
