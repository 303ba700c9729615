"""Which of vLLM's engines and requests may take part at all, judged from VllmConfig, KVCacheConfig and Request.

A field that a version does not have is off there; a value of no known kind is refused like one that is on."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from engine_wrapper.kv_scales import E4M3
from engine_wrapper.vllm.engine_spec import ABSENT, value_at, vllm_version

OLDEST = (0, 28)
# Backends whose metadata takes any number of sequences and outlives the next stage's. FLASHINFER copies from pinned
# memory that it writes again. FLASHINFER and FLEX_ATTENTION size tables by sequences times blocks.
LATENT_BACKENDS = ("FLASH_ATTN_MLA", "TRITON_MLA", "CPU_MLA")
BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN", *LATENT_BACKENDS)
# They reserve memory for a decode of each sequence, times the most parts that keys are read in.
RESERVING_BACKENDS = ("TRITON_MLA",)
# What computes longer runs of a latent attention: on a card, and on a CPU from vLLM 0.32 on.
PREFILL_BACKENDS = ("FLASH_ATTN", "CPU_SDPA_MLA")
# Methods of speculation that draft from the text alone.
TEXT_DRAFTS = ("ngram", "suffix")
_OFF = (ABSENT, None, False)
_UNSET: tuple[Any, ...] = (*_OFF, "", [], (), {})
# In the last two, full graphs replay steps that decode alone.
_GRAPHS = "NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"
# The allowed values of each reason, and the fields, separated by blanks.
_Rules = dict[str, tuple[tuple[Any, ...], str]]
_ENGINE: _Rules = {
    "other_connector": (_OFF, "cache_config.kv_offloading_size"),
    "encoder_connector": (_OFF, "ec_transfer_config"),
    "kv_role": (("kv_both",), "kv_transfer_config.kv_role"),
    "load_failure_policy": (("recompute",), "kv_transfer_config.kv_load_failure_policy"),
    "pipeline_parallel": ((1,), "parallel_config.pipeline_parallel_size"),
    "data_parallel": ((1,), "parallel_config.data_parallel_size"),
    "context_parallel": (
        (ABSENT, 1),
        "parallel_config.prefill_context_parallel_size parallel_config.decode_context_parallel_size",
    ),
    "executor": (("uni", "mp"), "parallel_config.distributed_executor_backend"),
    "ubatching": ((*_OFF, 0, 1), "parallel_config.enable_dbo parallel_config.ubatch_size"),
    "pooling": (("generate",), "model_config.runner_type"),
    "encoder_decoder": (_OFF, "model_config.is_encoder_decoder"),
    "hybrid_model": (_OFF, "model_config.is_hybrid model_config.is_attention_free"),
    "diffusion": (_OFF, "model_config.is_diffusion"),
    "non_causal": (_OFF, "attention_config.use_non_causal"),
    "attention_backend": ((*_OFF, *BACKENDS), "attention_config.backend"),
    # The window of all layers; one of some layers is their own, and their cache holds all tokens.
    "sliding_window": (_OFF, "cache_config.sliding_window model_config.rswa_window"),
    "prompt_embeds": (_OFF, "model_config.enable_prompt_embeds"),
    "routed_experts": (_OFF, "model_config.enable_return_routed_experts"),
    "model_kwargs": (
        (*_UNSET, "auto", "hf"),
        "model_config.hf_overrides model_config.model_class_overrides model_config.hf_config_path "
        "model_config.config_format",
    ),
    # Drafts from the text itself need no KV of a drafter. vLLM schedules them in turn, not ahead.
    "speculative_decoding": ((ABSENT, *TEXT_DRAFTS), "speculative_config.method"),
    "weight_transfer": (_OFF, "weight_transfer_config"),
    "sleep_mode": (_OFF, "model_config.enable_sleep_mode model_config.enable_cumem_allocator"),
    "sequence_parallel": (_OFF, "compilation_config.pass_config.enable_sp"),
    "full_cuda_graphs": (_GRAPHS, "compilation_config.cudagraph_mode"),
    "kv_cache_dtype": (("auto", *E4M3), "cache_config.cache_dtype"),
    "kv_scales": (_UNSET, "cache_config.calculate_kv_scales cache_config.kv_cache_dtype_skip_layers"),
    "kv_sharing_fast_prefill": (_OFF, "cache_config.kv_sharing_fast_prefill"),
}
# Unless vLLM takes no images (--language-model-only).
_WITH_IMAGES: _Rules = {"multimodal": (_OFF, "model_config.is_multimodal_model")} | _ENGINE
_CACHE: _Rules = {"non_causal": (_OFF, "non_causal")}
# What SemBlend's kernel, which computes a check's sample, does not know in a layer's attention.
_SAMPLE: _Rules = {
    "alibi": (_OFF, "impl.alibi_slopes"),
    "logits_soft_cap": ((*_OFF, 0, 0.0), "impl.logits_soft_cap"),
    "chunk_lookback": ((*_OFF, -1), "impl.chunk_lookback"),
    "kv_sharing": (_OFF, "impl.kv_sharing_target_layer_name"),
    "non_causal": (("DECODER", "decoder"), "impl.attn_type"),
    "query_quantisation": (_OFF, "query_quant"),
    "kv_cache_update": ((False,), "attn_backend.forward_includes_kv_cache_update"),
}
# prompt_logprobs has vLLM skip its prefix cache, too.
_REQUEST: _Rules = {
    "pooling": (_OFF, "pooling_params"),
    "multimodal": (_UNSET, "mm_features"),
    "prompt_embeds": (_OFF, "prompt_embeds"),
    "prompt_logprobs": (_OFF, "sampling_params.prompt_logprobs"),
    "skip_reading_prefix_cache": (_OFF, "skip_reading_prefix_cache"),
    "streamed_prompt": (_OFF, "resumable"),
    "resumed_with_output": ((0,), "num_output_tokens"),
}


def engine_refusal_of(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return why nothing is reused in this engine, or None; never raises. Before it runs `kv_cache_config` is None."""
    version = vllm_version()
    if version is None or version < OLDEST:
        return "vllm_version"
    if value_at(vllm_config, "kv_transfer_config.kv_connector") == "MultiConnector":
        return "other_connector"
    is_text_only = value_at(vllm_config, "model_config.multimodal_config.language_model_only") is True
    if type(size := value_at(vllm_config, "parallel_config.tensor_parallel_size")) is not int or size < 1:
        return "tensor_parallel"
    refusal = _first(vllm_config, _ENGINE if is_text_only else _WITH_IMAGES)
    refusal = refusal or ("executor" if size == 1 and are_workers_apart(vllm_config) else None)
    return refusal or (None if kv_cache_config is None else _cache_refusal(kv_cache_config))


def are_workers_apart(vllm_config: Any) -> bool:
    """Return whether the workers run in processes of their own."""
    return bool(value_at(vllm_config, "parallel_config.distributed_executor_backend") != "uni")


def sample_refusal(attention: Any) -> str | None:
    """Return why checks in the layer of this vLLM Attention have no sample, or None; never raises."""
    if value_at(attention, "kv_lora_rank") is not ABSENT:
        return "latent_attention"
    # Chunks are sequences of their own.
    is_known = type(attention).__name__ in ("Attention", "ChunkedLocalAttention")
    return _first(attention, _SAMPLE) or (None if is_known else "attention")


def request_refusal(request: Any) -> str | None:
    """Return why this vllm.v1.request.Request is served as stock, or None; never raises."""
    tokens = value_at(request, "prompt_token_ids")
    return _first(request, _REQUEST) or (None if isinstance(tokens, Sized) and len(tokens) else "prompt_ids_missing")


def _first(holder: Any, rules: _Rules) -> str | None:
    """The first reason of a field with a value that is not allowed. 1 is not True here, nor 0 False."""
    for reason, (allowed, paths) in rules.items():
        for value in (value_at(holder, path) for path in paths.split()):
            if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
                return reason
    return None


def _cache_refusal(kv_cache_config: Any) -> str | None:
    groups = value_at(kv_cache_config, "kv_cache_groups")
    if not isinstance(groups, (list, tuple)) or len(groups) != 1:
        return "cache_groups"
    spec = value_at(groups[0], "kv_cache_spec")
    kind = type(spec).__name__
    if kind == "SlidingWindowSpec":
        return "sliding_window"
    return _first(spec, _CACHE) or (None if kind in ("FullAttentionSpec", "MLAAttentionSpec") else "cache_spec")
