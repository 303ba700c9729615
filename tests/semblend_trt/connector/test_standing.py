"""An engine that may not reuse says why once; building its scheduler never raises."""

from types import SimpleNamespace

import pytest

from semblend_trt.config import load_settings
from semblend_trt.connector.standing import facts_or_refusal


def test_supported_model(tiny_qwen2_path):
    facts, refusal = facts_or_refusal(SimpleNamespace(model=str(tiny_qwen2_path)), load_settings())
    assert (facts.num_layers, refusal) == (3, None)


@pytest.mark.parametrize(
    ("arguments", "overrides", "reason"),
    [
        ({"speculative_config": object()}, {}, "speculative_decoding"),
        ({"model": "/nowhere/at/all"}, {}, "configuration"),
        ({"model": 7}, {}, None),
        ({}, {"policy": "off"}, "policy_off"),
        ({}, {"policy": "boundary", "recompute_boundary_layer": 9}, "configuration"),
    ],
)
def test_refusals(tiny_qwen2_path, arguments, overrides, reason):
    llm_args = SimpleNamespace(**{"model": str(tiny_qwen2_path), **arguments})
    facts, refusal = facts_or_refusal(llm_args, load_settings(**overrides))
    assert facts is None
    assert refusal is not None if reason is None else refusal == reason
