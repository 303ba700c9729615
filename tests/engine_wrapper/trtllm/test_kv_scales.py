"""The scales of TensorRT-LLM's fp8 cache are read from its attention, or the cache is refused by name."""

import math
from types import SimpleNamespace

import pytest
import torch

from engine_wrapper.connector import SemBlendKvConnectorWorker
from engine_wrapper.self_check import LayoutError
from engine_wrapper.trtllm.attachment import scales_of
from semblend_trt.runtime import runtime_for
from tests.engine_wrapper.trtllm.stand_ins import LlmArgs, executor_of


def decoder(*scales):
    layers = [
        SimpleNamespace(attn=SimpleNamespace(kv_scale_quant_orig=scale, kv_scale_orig_quant=1 / scale))
        for scale in map(torch.tensor, scales)
    ]
    return SimpleNamespace(layers=[SimpleNamespace(self_attn=each) for each in layers])


def with_scales(**changes):
    found = decoder(1.0, 0.5)
    vars(found.layers[1].self_attn.attn).update(changes)
    return found


def without_attention():
    found = decoder(1.0, 0.5)
    found.layers[1] = SimpleNamespace()
    return found


def test_each_layer_has_its_own():
    assert scales_of(decoder(1.0, 0.5, 0.25)) == (1.0, 0.5, 0.25)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (None, "decoder, NoneType, has no layers"),
        (SimpleNamespace(layers=[]), "has no layers"),
        (without_attention(), "layer 1 has no kv_scale_quant_orig"),
        (with_scales(kv_scale_orig_quant=None), "layer 1 has no kv_scale_orig_quant"),
        (with_scales(kv_scale_quant_orig=torch.ones(3)), "3 values of kv_scale_quant_orig"),
        (with_scales(kv_scale_quant_orig=torch.tensor(math.nan)), "kv_scale_quant_orig of nan"),
        (with_scales(kv_scale_orig_quant=torch.tensor(0.0)), "kv_scale_orig_quant of 0.0"),
        (with_scales(kv_scale_orig_quant=torch.tensor(1.0)), "times 1.0 and reads it times 0.5"),
    ],
)
def test_a_scale_that_is_none_is_refused_with_its_value(found, told):
    with pytest.raises(LayoutError, match=told) as refusal:
        scales_of(found)
    assert refusal.value.reason == "kv_scales"


def test_an_fp8_cache_without_scales_is_refused_by_name(tiny_qwen2_path, caplog):
    args = LlmArgs(tiny_qwen2_path)
    executor = executor_of(tiny_qwen2_path, SemBlendKvConnectorWorker(args), kv_dtype=torch.float8_e4m3fn)
    del executor.model_engine.model.model.layers[1].self_attn.attn.kv_scale_orig_quant
    executor._maybe_init_kv_connector_manager()
    assert (runtime_for(args).pool, runtime_for(args).refusal) == (None, "kv_scales")
    assert "layer 1 has no kv_scale_orig_quant" in caplog.text
