"""The loop as a connector sees it, and what must not change an answer."""

import pytest
import torch

from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.errors import ConfigurationError, SemBlendError
from tests.builders.engine import text, token_ids, unfinished
from tests.engine_wrapper.embedded.conftest import BLOCK, SIX, TWO


def test_a_transfer_that_never_ends_is_named(make_recorded_llm):
    llm, _ = make_recorded_llm(transfer_timeout=0.01, cache={"max_tokens": 4 * BLOCK})
    llm.connector_scheduler.request_finished = lambda *_: True
    llm.generate([text(0, 20)], TWO)
    with pytest.raises(SemBlendError, match="transfers of requests 1 within"):
        llm.settle()
    with pytest.raises(SemBlendError, match="transfers of requests 1 within"):
        llm.generate([text(1, 20)], TWO)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("no.such.module", "A", "B"), "cannot be imported"),
        (("json", "NoScheduler", "JSONDecoder"), "has no class NoScheduler"),
        (("semblend_trt.connector.contract", "KvCacheConnectorScheduler", "KvCacheConnectorWorker"), "lacks"),
    ],
)
def test_a_connector_that_cannot_be_built_is_one_sentence(make_llm, names, message):
    fields = ("connector_module", "connector_scheduler_class", "connector_worker_class")
    with pytest.raises(ConfigurationError, match=message):
        make_llm(kv_connector_config=dict(zip(fields, names, strict=True)))


@pytest.mark.promise("reuse", "Blocks, leases and requests all return,...")
def test_an_aborted_request_frees_its_blocks_and_tells_the_connector(make_recorded_llm):
    llm, calls = make_recorded_llm(max_num_tokens=16)
    free = llm.block_manager.num_free_blocks
    running, chunked = llm.generate_async(text(0, 20), SIX), llm.generate_async(text(1, 40), SIX)
    next(running)
    waiting = llm.generate_async(text(2, 9), SIX)
    assert [llm.abort(stream.request_id) for stream in (running, chunked, waiting)] == [True] * 3
    assert llm.block_manager.num_free_blocks == free
    assert [request.request_id for request, _ in calls.of("request_finished")] == [1, 2]
    assert [next(stream).outputs[0].finish_reason for stream in (running, chunked, waiting)] == ["cancelled"] * 3
    assert [llm.abort(request_id) for request_id in (running.request_id, 999)] == [False] * 2
    assert unfinished(llm.executor) == 0


def test_one_failing_request_leaves_the_others_alone(tiny_qwen2_path, make_llm):
    poisoned = ModelRunner(tiny_qwen2_path, device="cpu")
    with torch.no_grad():
        poisoned.model.model.embed_tokens.weight[7] = float("nan")
    llm = make_llm(cache={"max_tokens": 9 * BLOCK})
    clean = [token for token in text(0, 30) if token != 7]
    (cold,) = llm.generate([clean], SIX)
    llm = type(llm)(model=tiny_qwen2_path, runner=poisoned, kv_cache_config=llm.llm_args.kv_cache_config.model_copy())
    free = llm.block_manager.num_free_blocks
    poisoned_prompt = [7, *clean[:20]]
    bad, good = llm.generate([poisoned_prompt, clean], SIX)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == ("error", [])
    assert "request 1 failed" in bad.error
    assert "not finite" in bad.error
    assert (token_ids(good), llm.block_manager.num_free_blocks) == (token_ids(cold), free)
    assert llm.generate([poisoned_prompt], SIX)[0].cached_tokens == 0
    for seed in range(4):  # the poisoned block comes round again
        again = [token for token in text(seed, 30 + seed) if token != 7]
        assert llm.generate([again], SIX)[0].outputs[0].finish_reason == "length"
    llm.shutdown()


@pytest.mark.promise("donors", "In the embedded engine a document waits while a request waits or runs")
def test_a_document_waits_while_a_request_waits_or_runs(make_llm):
    llm = make_llm(max_batch_size=2)
    document = llm.generate_async(text(0, 9), TWO, priority=1)
    another = llm.generate_async(text(1, 9), TWO, priority=1)
    requests = [llm.generate_async(text(seed, 9), SIX, streaming=False) for seed in (2, 3, 4)]
    llm.run_until(document.has_news)
    assert all(each.has_news() for each in requests)
    llm.executor.step()
    assert another.has_news()
