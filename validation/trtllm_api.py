"""TensorRT-LLM's LLM API as the validation uses it: public arguments only. Untested on a real TensorRT-LLM.

It loads nothing that an environment with TensorRT-LLM and the connector lacks.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import ConfigurationError, SemBlendError
from validation.engines import environment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STOCK_CONNECTOR, WRAPPER = "semblend_trt.connector", "engine_wrapper.connector"
# The workers inherit only variables whose names begin with TRTLLM.
_PREFIX = "TRTLLM_"
# What is asked is whether answers are right, not whether the first lookup is quick.
_PATIENCE = {_PREFIX + "SEMBLEND_LOOKUP_DEADLINE_MS": "10000"}
# Saves end in another process, and only its audit log tells: so long without news is taken for the end.
QUIET_SECONDS = 0.25
_MAX_SETTLE_SECONDS = 20.0


def trtllm_api() -> Any:
    """The module `tensorrt_llm`. Raises ConfigurationError where it cannot be imported."""
    try:
        return import_module("tensorrt_llm")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"tensorrt_llm cannot be imported here ({error}); run this where TensorRT-LLM and an NVIDIA GPU are."
        ) from error


def open_llm(
    model: str,
    connector: str | None,
    variables: Mapping[str, str],
    *,
    cache: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """An LLM that can execute plans: eager, over the V1 cache manager, with chunked prefill.

    `connector` is the module of our classes, None without them, and `variables` are their settings, SEMBLEND_*.
    `cache` are fields of its KvCacheConfig, `options` further arguments. Raises SemBlendError when it does not start.
    """
    # Where both names are: `tensorrt_llm.llmapi` hands on KvCacheConfig only.
    api = import_module("tensorrt_llm.llmapi.llm_args")
    # Main has to be asked for V1.
    first = {name: False for name in ("use_kv_cache_manager_v2",) if name in api.KvCacheConfig.model_fields}
    fields = {**first, "enable_block_reuse": True, "free_gpu_memory_fraction": 0.6, **(cache or {})}
    inherited = {_PREFIX + name: value for name, value in variables.items()}
    try:
        with environment({**_PATIENCE, **inherited}):
            return trtllm_api().LLM(
                model=model,
                enable_chunked_prefill=True,
                cuda_graph_config=None,
                kv_cache_config=api.KvCacheConfig(**fields),
                kv_connector_config=None if connector is None else _connector_config(api, connector),
                **options,
            )
    except (RuntimeError, ValueError, TypeError) as error:
        raise SemBlendError(f"TensorRT-LLM does not start with model {model}: {error}") from error


def wait_for_quiet(audit_path: Path) -> None:
    """Waits until a connector in another process has written nothing for a while; not longer than some seconds."""
    deadline = time.monotonic() + _MAX_SETTLE_SECONDS
    size, since = -1, time.monotonic()
    while (now := time.monotonic()) < deadline and now - since <= QUIET_SECONDS:
        found = audit_path.stat().st_size if audit_path.is_file() else 0
        if found != size:
            size, since = found, now
        time.sleep(QUIET_SECONDS / 10)


def _connector_config(api: Any, module: str) -> Any:
    return api.KvCacheConnectorConfig.ours(module)
