"""Engines, models and requests whose KV may not be shared are refused by name."""

from types import SimpleNamespace

import pytest

from engine_wrapper.embedded.llm_args import KvCacheConnectorConfig, LlmArgs
from semblend_trt.config import load_settings
from semblend_trt.connector import worker
from semblend_trt.connector.contract import from_llm_args
from semblend_trt.connector.eligibility import decoder_refusal, engine_refusal, facts_or_refusal
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.runtime import runtime_for
from tests.semblend_trt.engine_specs import engine

TRTLLM, FLASHINFER = {"attn_backend": "TRTLLM"}, {"attn_backend": "FLASHINFER"}
MAINS = ("VANILLA", "FLASHINFER_STAR_ATTENTION")
MAY_BE_ON = ["torch_compile_config", "lora_config", "speculative_config"]
FREE = dict.fromkeys(MAY_BE_ON) | TRTLLM


@pytest.mark.promise("engines", "Engines whose blocks cannot be trusted are refused by name")
@pytest.mark.known_defect(25)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        *((each, None) for each in ({}, {"model_kwargs": {}}, {"cache_transceiver_config": None} | TRTLLM)),
        ({"pipeline_parallel_size": None, "context_parallel_size": 1}, None),
        ({"kv_cache_config": SimpleNamespace(host_cache_size=0, max_attention_window=None)}, None),
        ({"kv_cache_config": SimpleNamespace(host_cache_size=1 << 30)}, "host_offload"),
        ({"kv_cache_config": SimpleNamespace(max_attention_window=[4096])}, "attention_window"),
        ({"kv_cache_config": SimpleNamespace(max_attention_window=[4096, 8192]), "max_seq_len": 4096}, None),
        ({"speculative_config": object()}, "speculative_decoding"),
        ({"enable_attention_dp": True}, "attention_dp"),
        ({"model_kwargs": {"rms_norm_eps": 0.05}}, "model_kwargs"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel"),
        ({"context_parallel_size": 4}, "context_parallel"),
        ({"cache_transceiver_config": SimpleNamespace(backend="UCX")}, "disaggregated"),
        *((FLASHINFER | each, "attention_backend") for each in ({}, {"flashinfer_layout": "NHD"})),
        ({"attn_backend": "flashinfer", "flashinfer_layout": "HND"}, None),
        *(({"attn_backend": each, "contract": "1.4"}, "attention_backend") for each in MAINS),
    ],
)
def test_engines_whose_blocks_cannot_be_trusted(arguments, reason):
    assert engine_refusal(engine(**arguments)) == reason


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"attn_backend": "trtllm", "sparse_attention_config": None, "pipeline_parallel_size": 1}, None),
        ({"prefill_cuda_graph_backend": "piecewise"}, "prefill_graphs"),
        ({"torch_compile_config": {}}, "compiled_prefill"),
        *((each, "lora") for each in ({"lora_config": {}}, {"enable_lora": True})),
        ({"speculative_config": {}}, "speculative_decoding"),
        ({"sparse_attention_config": {}}, "sparse_attention"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel"),
        ({"context_parallel_size": 2}, "context_parallel"),
        *((each, "attention_backend") for each in (FLASHINFER, {"attn_backend": None})),
        *(({name: ...}, "settings_unknown") for name in MAY_BE_ON),  # it is not named, and may be on
    ],
)
def test_what_stands_in_the_way_has_a_name(settings, reason):
    named = {name: value for name, value in (FREE | settings).items() if value is not ...}
    assert decoder_refusal(engine(**named)) == reason


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
def test_an_engine_of_which_nothing_may_be_reused(tiny_qwen2_path, arguments, overrides, reason):
    described = engine(**{"model": tiny_qwen2_path, **arguments})
    facts, refusal = facts_or_refusal(described, load_settings(**overrides))
    assert facts is None
    assert refusal is not None if reason is None else refusal == reason


class Arguments(SimpleNamespace):
    """Those of TensorRT-LLM, as far as they are read; a runtime is found by them."""


@pytest.mark.promise(
    "engines", "What TensorRT-LLM computes otherwise than Transformers is refused there, and served elsewhere"
)
@pytest.mark.parametrize(
    ("family", "contract", "policy", "reason", "told"),
    [
        ("gpt_oss", "1.1", "exact", "sliding_window", "with a sliding window, and TensorRT-LLM 1.1 writes"),
        ("gpt_oss", "1.2", "position_fix", "rope_unknown", "no key can be moved there as policy position_fix asks"),
        ("gpt_oss", "1.2", "exact", None, ""),
        ("gpt_oss", "1.4", "verified", None, ""),
        ("gemma3_text", "1.1", "exact", "sliding_window", "gemma3_text has layers with a sliding window"),
        ("gemma3_text", "1.2", "position_fix", None, ""),
        ("gemma3_text", "1.4", "verified", None, ""),
    ],
)
def test_what_tensorrt_llm_computes_otherwise_is_refused_there_alone(
    tiny_model_paths, monkeypatch, family, contract, policy, reason, told, caplog
):
    monkeypatch.setenv("SEMBLEND_POLICY", policy)
    path = str(tiny_model_paths[family])
    served = model_facts(path), None
    assert facts_or_refusal(from_llm_args(LlmArgs(model=path)), load_settings()) == served
    args = Arguments(model=path, contract=contract)
    assert facts_or_refusal(from_llm_args(args), load_settings()) == (served if reason is None else (None, reason))
    assert told in caplog.text
    worker.SemBlendKvConnectorWorker(args)
    assert runtime_for(args).refusal == reason


@pytest.mark.parametrize(
    ("kind", "module", "is_told"),
    [
        (Arguments, "semblend_trt.connector", False),
        (Arguments, "engine_wrapper.connector", True),
        (LlmArgs, "engine_wrapper.connector", False),
    ],
)
def test_the_scales_of_an_fp8_cache_are_told_where_they_can_be_read(kind, module, is_told):
    args = kind(model="any", kv_connector_config=KvCacheConnectorConfig.ours(module))
    assert from_llm_args(args).tells_kv_scales == is_told
