"""The EngineSpec of SGLang, from its ServerArgs and ModelConfig. Facts: SGLang 0.5.23, `srt/server_args.py`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from semblend_trt.connector.engine_spec import AskedQuantization, Caches, EngineSpec, options_text, text_of

# Formats whose loaders take the safetensors files of the model's own folder, as the weights' digest does.
_OWN_WEIGHTS = ("auto", "safetensors")


def sglang_version() -> str | None:
    """Return SGLang's version as it names it, or None."""
    try:
        return str(importlib.import_module("sglang.version").__version__)
    except (ImportError, AttributeError):
        return None


def from_server_args(arguments: Any, model_config: Any, backend: Callable[[], str | None]) -> EngineSpec:
    """Return the engine that SGLang describes; `backend` names its attention backend once that is there.

    Settings come from the environment alone: SGLang has no place for a cache's own."""
    name, model, method = f"sglang-{sglang_version()}", str(arguments.model_path), arguments.quantization
    dtype, chunk = text_of(model_config.dtype), arguments.chunked_prefill_size or 0
    asked = None if method is None else AskedQuantization(str(method), options_text({"quant_algo": method}))
    return EngineSpec(
        name=name,
        model=model,
        revision=arguments.revision,
        tokenizer=str(arguments.tokenizer_path or model),
        tokenizer_revision=None,
        dtype=dtype,
        kv_dtype=dtype,
        read_caches=lambda: Caches(
            str(arguments.kv_cache_dtype), None if (found := backend()) is None else f"{name}/{found}/slots"
        ),
        quantization=asked,
        reads_own_weights=str(arguments.load_format).lower() in _OWN_WEIGHTS,
        has_model_overrides=False,  # refused by name
        tensor_parallel_size=int(arguments.tp_size),
        pipeline_parallel_size=int(arguments.pp_size),
        context_parallel_size=int(arguments.attn_cp_size),
        # The rows of a chunk, or of a prefill without chunks.
        max_num_tokens=int(chunk if chunk > 0 else arguments.max_prefill_tokens),
        speculates=arguments.speculative_algorithm is not None,
        orders_blocks_by_head=True,
        contract=None,
        tells_kv_scales=True,
        # An ended request's slots go back at once, so a save copies them first.
        holds_saved_blocks=False,
        # Prefixes end at whole pages, and blocks here are single slots.
        tells_whole_prefix=True,
    )
