"""Whether plans can be executed in an engine's decoder: everything that is known to be needed, and to be in the way.

Facts: NVIDIA/TensorRT-LLM, `_torch/pyexecutor/model_engine.py` (1.1 to 1.3: the engine holds its graph runner) and
`_torch/pyexecutor/engine/runners/decoder/runner.py` (main: the engine holds a runner that holds it);
`_torch/modules/attention.py` (main: `_torch/attention/attention.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semblend_trt.connector.eligibility import decoder_refusal

if TYPE_CHECKING:
    from engine_wrapper.trtllm.executor_parts import ExecutorParts
    from semblend_trt.connector.model_facts import ModelFacts

_NORMAL_ROPE = ("default", "linear", "llama3")


def execution_refusal(parts: ExecutorParts, llm_args: Any, facts: ModelFacts) -> str | None:
    """Why no plan can be executed, None when nothing is known against it. Nothing is changed."""
    return (
        decoder_refusal(llm_args)
        or _refused_executor(parts)
        or _refused_engine(parts.model_engine)
        or _refused_model(parts, facts, int(getattr(llm_args, "tensor_parallel_size", None) or 1))
    )


def _refused_executor(parts: ExecutorParts) -> str | None:
    if type(parts.manager).__name__ != "KVCacheManager":
        return "cache_manager_v2"
    if not callable(getattr(parts.manager, "get_batch_cache_indices", None)):
        return "cache_manager_unknown"
    if getattr(parts.executor, "drafter", None) is not None:
        return "speculative_decoding"
    return None


def _refused_engine(model_engine: Any) -> str | None:
    holder = _graph_holder(model_engine)
    if holder is None:
        return "engine_layout"
    runner = getattr(holder, "cuda_graph_runner", None)
    # The one for prefill graphs is there only where they are on.
    has_prefill_graphs = getattr(holder, "breakable_cuda_graph_runner", None) is not None
    if has_prefill_graphs or (runner is not None and getattr(runner, "enabled", True)):
        return "cuda_graphs"
    compiled = getattr(model_engine, "_torch_compile_enabled", False)
    return "compiled_prefill" if compiled or getattr(holder, "_torch_compile_backend", None) else None


def _graph_holder(model_engine: Any) -> Any:
    """What holds the graph runner: the engine up to 1.3, a runner of the engine on main; None for another layout."""
    held = getattr(model_engine, "__dict__", None) or {}
    if "cuda_graph_runner" in held:
        return model_engine
    runners = [each for each in held.values() if "cuda_graph_runner" in (getattr(each, "__dict__", None) or {})]
    return runners[0] if len(runners) == 1 else None


def _refused_model(parts: ExecutorParts, facts: ModelFacts, ranks: int) -> str | None:
    decoder = parts.decoder
    layers = getattr(decoder, "layers", None)
    if layers is None or not callable(getattr(decoder, "forward", None)) or len(layers) != facts.num_layers:
        return "model_layout"
    if "forward" in vars(decoder):
        return "model_patched"
    if dict(getattr(parts.manager, "layer_offsets", {})) != {index: index for index in range(facts.num_layers)}:
        return "layer_offsets"
    for index, layer in enumerate(layers):
        refusal = _refused_attention(getattr(layer, "self_attn", None), index, facts, ranks)
        if refusal is not None:
            return refusal
    return None


def _refused_attention(attention: Any, index: int, facts: ModelFacts, ranks: int) -> str | None:
    if type(attention).__name__ == "MLA" or hasattr(attention, "kv_lora_rank"):
        return "mla"
    backend = getattr(attention, "attn", None)
    if not callable(getattr(backend, "forward", None)) or getattr(attention, "layer_idx", None) != index:
        return "model_layout"
    if "forward" in (getattr(backend, "__dict__", None) or {}):
        return "model_patched"
    sizes = tuple(getattr(attention, name, None) for name in ("head_dim", "q_size", "kv_size"))
    # A rank has its share of the heads, and at least one KV head.
    heads, kv_heads = facts.num_heads // ranks, max(1, facts.kv_heads // ranks)
    wanted = (facts.head_dim, heads * facts.head_dim, kv_heads * facts.head_dim)
    if sizes != wanted or not isinstance(getattr(attention, "rope_fusion", None), bool):
        return "model_layout"
    if getattr(attention, "has_quant_scale", False):
        return "quantized_attention"
    if getattr(attention, "attention_chunk_size", None) is not None:
        return "attention_chunks"
    if getattr(attention, "attn_output_gate", None) or getattr(attention, "q_scaling", None) not in (None, 1, 1.0):
        return "attention_scaling"
    # Other types also scale cos and sin, which the kernel here does not know.
    rope = facts.rope_parameters.get("rope_type", "default")
    return "rope_fused" if attention.rope_fusion and rope not in _NORMAL_ROPE else None
