"""An engine that may not reuse says why once; building its scheduler never raises."""

from types import SimpleNamespace

import pytest

from engine_wrapper.embedded.llm_args import LlmArgs
from semblend_trt.config import load_settings
from semblend_trt.connector import standing, worker
from semblend_trt.connector.model_facts import model_facts
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


@pytest.mark.parametrize("half", [standing, worker])
def test_both_halves_read_the_configuration_of_the_revision_that_runs(monkeypatch, tiny_qwen2_path, half):
    read = []
    monkeypatch.setattr(half, "model_facts", lambda *asked: read.append(asked) or model_facts(tiny_qwen2_path))
    llm_args = LlmArgs(model="some-org/some-model", revision="v2")
    if half is standing:
        facts_or_refusal(llm_args, load_settings())
    else:
        worker.SemBlendKvConnectorWorker(llm_args)
    assert read == [("some-org/some-model", "v2")]
