"""Weights that TensorRT-LLM loads into a running engine: nothing that others computed is used afterwards."""

import pytest
import torch

from semblend_trt.outcome import Outcome
from tests.builders.engine import text
from tests.engine_wrapper.test_connector import Service, on_two_ranks
from tests.engine_wrapper.trtllm.stand_ins import LlmRequest

DOCUMENT = text(1, 90)


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setenv("SEMBLEND_POLICY", "exact")
    monkeypatch.setenv("SEMBLEND_MIN_SPAN_TOKENS", "32")


def load(service, factor):
    """As `update_weights` of TensorRT-LLM's worker extension: loads, then empties the reuse tree."""
    model = service.executor.model_engine.model
    model.load_weights({name: each.detach() * factor for name, each in model.named_parameters()})
    service.manager.reset_reuse_state()


def reused(service, request_id):
    report = service.report(request_id)
    return report.reused_tokens if report.outcome == Outcome.BACKEND_MATERIALIZED_REUSE else 0


@pytest.mark.promise("donors", "Once the weights of a running...")
@pytest.mark.parametrize("ranks_that_load", [(0, 1), (1,)])
def test_ranks_drop_what_is_stale_in_one_step(tiny_qwen2_path, ranks_that_load):
    prompts = [[*DOCUMENT, *text(each, 5)] for each in range(5)]

    def serve(service):
        found = []
        for request_id, prompt in enumerate(prompts, 1):
            if request_id == 3 and service.ranks.rank in ranks_that_load:
                load(service, 1.1)
            request = LlmRequest(request_id, prompt)
            is_right = torch.allclose(service.serve(request), service.cold(request), atol=1e-3, rtol=0)
            found.append((reused(service, request_id), is_right))
        assert service.worker._runtime.weights_changes == 1
        return found

    first, second = on_two_ranks(tiny_qwen2_path, serve)
    assert first == second
    assert all(is_right for _, is_right in first)
    tokens = [tokens for tokens, _ in first]
    assert (tokens[1], tokens[2], tokens[4]) == (90, 0, 90)


@pytest.mark.parametrize("are_readable", [True, False])
def test_new_scales_of_an_fp8_cache_end_reuse(tiny_qwen2_path, monkeypatch, are_readable):
    service = Service(tiny_qwen2_path, kv_dtype=torch.float8_e4m3fn)
    service.serve(LlmRequest(1, [*DOCUMENT, *text(1, 5)]))
    load(service, 1.1)
    service.serve(LlmRequest(2, [*DOCUMENT, *text(2, 5)]))
    assert service.report(2).reason != "kv_scales"
    backend = service.executor.model_engine.model.model.layers[1].self_attn.attn
    backend.kv_scale_quant_orig.mul_(2)
    backend.kv_scale_orig_quant.div_(2)
    if not are_readable:
        monkeypatch.setattr(service.worker, "_kv_scales", lambda: 1 / 0)
    load(service, 1.1)
    for request_id in (3, 4):
        service.serve(LlmRequest(request_id, [*DOCUMENT, *text(request_id, 5)]))
        assert reused(service, request_id) == 0
    assert service.report(4).reason == "kv_scales"
    service.close()
