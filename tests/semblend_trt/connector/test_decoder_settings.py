"""Settings under which TensorRT-LLM's decoder executes no plan have names, and one that is not there counts as on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from semblend_trt.connector.decoder_settings import decoder_refusal

FREE: dict[str, Any] = {
    "torch_compile_config": None,
    "cuda_graph_config": None,
    "lora_config": None,
    "speculative_config": None,
    "attn_backend": "TRTLLM",
}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"attn_backend": "trtllm", "sparse_attention_config": None, "pipeline_parallel_size": 1}, None),
        ({"cuda_graph_config": {}}, "cuda_graphs"),
        ({"torch_compile_config": {}}, "compiled_prefill"),
        ({"lora_config": {}}, "lora"),
        ({"enable_lora": True}, "lora"),
        ({"speculative_config": {}}, "speculative_decoding"),
        ({"sparse_attention_config": {}}, "sparse_attention"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel"),
        ({"context_parallel_size": 2}, "context_parallel"),
        ({"attn_backend": "FLASHINFER"}, "attention_backend"),
        ({"attn_backend": None}, "attention_backend"),
    ],
)
def test_what_stands_in_the_way_has_a_name(settings: dict[str, Any], reason: str | None) -> None:
    assert decoder_refusal(SimpleNamespace(**(FREE | settings))) == reason


@pytest.mark.parametrize("name", ["torch_compile_config", "cuda_graph_config", "lora_config", "speculative_config"])
def test_what_cannot_be_read_may_be_on(name: str) -> None:
    assert decoder_refusal(SimpleNamespace(**{key: FREE[key] for key in FREE if key != name})) == "settings_unknown"
