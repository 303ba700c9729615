"""Which settings of an engine keep plans out of its decoder, judged from TensorRT-LLM's `llmapi/llm_args.py`."""

from __future__ import annotations

from typing import Any

_MISSING = object()
# Settings that must be off, each with the name of its refusal. One that is missing is not known to be off.
_OFF = {
    "torch_compile_config": "compiled_prefill",
    "cuda_graph_config": "cuda_graphs",
    "lora_config": "lora",
    "speculative_config": "speculative_decoding",
    "sparse_attention_config": "sparse_attention",
}
# Settings that older versions do not have.
_OPTIONAL = ("sparse_attention_config",)


def decoder_refusal(llm_args: Any) -> str | None:
    """Why no plan can be executed under these settings, None when they do not stand in the way."""
    for name, reason in _OFF.items():
        value = getattr(llm_args, name, None if name in _OPTIONAL else _MISSING)
        if value is _MISSING:
            return "settings_unknown"
        if value is not None:
            return reason
    if getattr(llm_args, "enable_lora", False):
        return "lora"
    for name in ("context_parallel", "pipeline_parallel"):
        if int(getattr(llm_args, f"{name}_size", None) or 1) > 1:
            return name
    # FlashInfer's pages are laid out in another way, and the plain backend has one page for all tokens.
    return None if str(getattr(llm_args, "attn_backend", None)).upper() == "TRTLLM" else "attention_backend"
