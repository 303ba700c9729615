"""A default engine of 1.4, as far as it can be played: V2, overlap, decode graphs, our connector and our wrapper."""

import pytest
import torch

from engine_wrapper.embedded.llm import SamplingParams
from semblend_trt.plan import EngineMode
from tests.engine_wrapper.embedded_llm import published_nodes
from tests.engine_wrapper.serving import text
from tests.engine_wrapper.trtllm.v2_engine import engine_of, runner_of

SIX = SamplingParams(max_tokens=6, ignore_eos=True, return_generation_logits=True)
DOCUMENT = text(1, 90)


@pytest.fixture(scope="module")
def runner(tiny_qwen2_path):
    return runner_of(tiny_qwen2_path)


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


def test_a_moved_document_is_reused_while_decode_steps_are_replayed(llm, cold):
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
    torch.testing.assert_close(output.outputs[0].generation_logits, expected.generation_logits, atol=1e-4, rtol=0)
    assert llm.connector_scheduler.reuse_of(output.request_id).offered_tokens == 90
    llm.settle()
    assert len(list(published_nodes(llm.block_manager))) == published, "approximate KV stays out of the tree"
    runner = llm.executor.model_runner
    assert (runner.kinds["replayed"] > 0, runner.hook_calls) == (True, 0)
    assert not runtime.faults
