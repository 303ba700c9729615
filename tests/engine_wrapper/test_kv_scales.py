"""Scales of an fp8 cache: one number above 0 for K and for V of each layer, and another namespace for others."""

import math
from types import SimpleNamespace

import pytest
import torch

from engine_wrapper.kv_scales import are_of_heads, head_scales
from engine_wrapper.self_check import LayoutError
from engine_wrapper.vllm.engine_spec import described_dtype, scales_of
from semblend_trt.namespace import is_unknown


def attention(k=1.0, v=1.0, **changes):
    held = {"_k_scale": torch.tensor(k), "_k_scale_float": k, "_v_scale": torch.tensor(v), "_v_scale_float": v}
    return SimpleNamespace(layer_name="model.layers.0", kv_cache=torch.zeros(1), **{**held, **changes})


def of_heads(*k, **changes):
    """As compressed-tensors leaves two heads."""
    return attention(**{"_k_scale": torch.tensor(k), "_k_scale_float": max(k), "num_kv_heads": 2, **changes})


def test_each_head_may_have_a_scale():
    pairs = [scales_of(of_heads(0.5, 2.0)), scales_of(attention(0.5))]
    assert pairs == [((0.5, 2.0), 1.0), (0.5, 1.0)]
    found = torch.stack([head_scales(each, 2) for each in pairs])
    assert torch.equal(found, torch.tensor([[[0.5, 2.0], [1.0, 1.0]], [[0.5, 0.5], [1.0, 1.0]]]))
    assert (are_of_heads(pairs), are_of_heads(pairs[1:])) == (True, False)
    told = [described_dtype("fp8", {"model.layers.0": each}) for each in (of_heads(0.5, 2.0), attention(2.0))]
    assert told[0] != told[1]


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e4m3"])
def test_kv_of_other_scales_is_of_another_namespace(cache_dtype):
    layers = {"model.layers.0": attention(0.5, 2.0), "model.layers.1": attention(0.25)}
    told = described_dtype(cache_dtype, layers)
    assert told.startswith("fp8_e4m3+")
    assert told == described_dtype("fp8", {name: layers[name] for name in sorted(layers, reverse=True)})
    assert told != described_dtype(cache_dtype, {**layers, "model.layers.1": attention(0.25, 1.5)})
    # An expert holds no cache, and before the model is loaded no layer is known.
    assert told == described_dtype(cache_dtype, {**layers, "model.layers.0.experts": SimpleNamespace()})
    assert (described_dtype(cache_dtype, {}), described_dtype("auto", layers)) == ("fp8_e4m3", "auto")


@pytest.mark.promise("engines", "In vLLM KV in e4m3 is...")
@pytest.mark.parametrize(
    ("held", "told"),
    [
        (attention(_k_scale=None), "no k_scale for its fp8 cache, but None"),
        (attention(_v_scale_float=None), "v_scale of 1.0, and None on the host"),
        (attention(_k_scale=torch.ones(8)), "8 values of k_scale"),
        (of_heads(1.0, 2.0, 0.0), "3 values of k_scale"),
        (of_heads(0.0, 2.0), "k_scale of 0.0, 2.0"),
        (of_heads(0.5, 2.0, _k_scale_float=1.0), "k_scale of 0.5, 2.0, and 1.0 on the host"),
        (attention(v=0.0), "v_scale of 0.0"),
        (attention(k=-1.0), "k_scale of -1.0"),
        (attention(k=math.inf), "k_scale of inf"),
        (attention(v=math.nan), "v_scale of nan"),
        (attention(_k_scale=torch.tensor(0.5)), "k_scale of 0.5, and 1.0 on the host"),
    ],
)
def test_a_scale_that_is_none_is_refused_with_its_value(held, told):
    with pytest.raises(LayoutError, match=told) as refusal:
        scales_of(held)
    assert refusal.value.reason == "kv_scales"
    assert is_unknown(str(described_dtype("fp8", {"model.layers.0": held})).partition("+")[2])
