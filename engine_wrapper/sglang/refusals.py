"""Which of SGLang's engines and requests may take part at all, judged from ServerArgs, the model and the request.

Fields are read strictly: a version that lacks one is refused, and so is a value of no known kind."""

from __future__ import annotations

from array import array
from typing import Any

from engine_wrapper.sglang.engine_spec import sglang_version

# The seams of the prefix cache changed in each of the last releases.
VERSION = "0.5.23"
MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_OFF = (None, False)
_UNSET: tuple[Any, ...] = (*_OFF, "", [], (), {})
_MISSING = object()
# The allowed values of each reason, and the fields of ServerArgs, separated by blanks.
_Rules = dict[str, tuple[tuple[Any, ...], str]]
_ENGINE: _Rules = {
    "radix_disabled": ((False,), "disable_radix_cache"),
    "tensor_parallel": ((1,), "tp_size"),
    "pipeline_parallel": ((1,), "pp_size"),
    "data_parallel": ((1,), "dp_size nnodes"),
    "context_parallel": ((1,), "attn_cp_size dcp_size"),
    "hierarchical_cache": (
        _OFF,
        "enable_hierarchical_cache enable_lmcache enable_flexkv enable_unified_cache_external_linker "
        "disaggregation_decode_enable_offload_kvcache",
    ),
    "disaggregated": (("null",), "disaggregation_mode"),
    "speculative_decoding": ((None,), "speculative_algorithm"),
    "lora": (_UNSET, "enable_lora lora_paths uno_lora_path"),
    "sessions": (_OFF, "enable_streaming_session enable_session_radix_cache"),
    "pooling": ((False,), "is_embedding"),
    "multimodal": (_OFF, "enable_multimodal"),
    "kv_cache_dtype": (("auto",), "kv_cache_dtype"),
    "quantized_attention": ((*_OFF, "auto"), "prefill_kv_cache_dequant_dtype"),
    "model_kwargs": ((None, "", "{}"), "json_model_override_args"),
    "diffusion": ((None,), "dllm_algorithm"),
    "split_prefill": (_OFF, "enable_pdmux enable_two_batch_overlap enable_single_batch_overlap"),
    "memory_layout": (
        _OFF,
        "enable_page_major_kv_layout enable_unified_memory enable_kv_cache_sharding enable_memory_saver "
        "enable_hisparse prefill_only_disable_kv_cache",
    ),
    "compiled_prefill": (_OFF, "enable_torch_compile"),
    "stripped_answers": (_OFF, "strip_thinking_cache"),
}
_ATTENTION: _Rules = {
    "sliding_window": ((-1, None), "sliding_window_size"),
    "attention_layout": ((False, 0, 0.0, None, -1), "is_cross_attention use_irope logit_cap xai_temperature_len"),
    "kv_scales": ((None,), "k_scale v_scale"),
}
# A request for log-probabilities of its prompt has every token computed.
_REQUEST: _Rules = {
    "lora": (_UNSET, "lora_id"),
    "multimodal": (_UNSET, "multimodal_inputs"),
    "prompt_embeds": (_UNSET, "input_embeds positional_embed_overrides"),
    "sessions": (_UNSET, "session"),
    "beam_search": (_UNSET, "beam_group"),
    "resumed_with_output": (_UNSET, "output_ids"),
}


def engine_refusal_of(arguments: Any) -> str | None:
    """Return why nothing is reused in an SGLang with these ServerArgs, or None; never raises."""
    return "sglang_version" if sglang_version() != VERSION else _first(arguments, _ENGINE)


def model_refusal_of(runner: Any) -> str | None:
    """Return why nothing is reused over the model and the caches of this ModelRunner, or None; never raises."""
    try:
        if type(runner.model).__name__ not in MODELS:
            return "unknown_architecture"
        pool = runner.token_to_kv_pool
        if type(pool).__name__ != "MHATokenToKVPool" or pool.kv_cache_layout != "nhd":
            return "pool_layout"
        attention = [each.self_attn.attn for each in runner.model.model.layers]
        return next(filter(None, (_first(each, _ATTENTION) for each in attention)), None)
    except Exception:
        return "model_layout"


def request_refusal(request: Any) -> str | None:
    """Return why this Req is served as stock, or None; never raises."""
    start, last = getattr(request, "logprob_start_len", 0), len(getattr(request, "origin_input_ids", ())) - 1
    if getattr(request, "return_logprob", True) is not False and 0 <= start < last:
        return "prompt_logprobs"
    return _first(request, _REQUEST)


def _first(holder: Any, rules: _Rules) -> str | None:
    """The first reason of a field with a value that is not allowed. 1 is not True here, nor 0 False."""
    for reason, (allowed, names) in rules.items():
        for name in names.split():
            value: Any = getattr(holder, name, _MISSING)
            value = list(value) if isinstance(value, array) else value
            if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
                return reason
    return None
