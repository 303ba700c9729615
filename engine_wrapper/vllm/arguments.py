"""An engine's arguments as vLLM's VllmConfig tells them, under the names of TensorRT-LLM's that the connector reads."""

from __future__ import annotations

import importlib
import logging
import math
import re
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from engine_wrapper.vllm.extra_config import settings_of, settings_off
from semblend_trt.config import load_settings
from semblend_trt.errors import ConfigurationError
from semblend_trt.namespace import unknown_value

logger = logging.getLogger(__name__)

# Formats whose loaders take the safetensors files of the model's own folder, as the digest of the weights does.
_OWN_WEIGHTS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
# What a model may be told beside its files, and the values that change nothing.
OVERRIDES = ("hf_overrides", "model_class_overrides", "hf_config_path", "config_format")
HARMLESS: tuple[Any, ...] = (None, "", {}, "auto", "hf")

_lock = threading.Lock()
_known: weakref.WeakValueDictionary[str, EngineArguments] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class EngineArguments:
    """One engine's arguments. Scheduler and worker half meet by this object, and the runtime ends with it.

    `settings` win over the environment; where they are wrong they turn reuse off, and `refusal` is settings_invalid.
    `layers` are vLLM's attention layers by name, from the time when the model is loaded. A size that is not known is
    None. `attn_backend` is missing: the pool that vLLM's connector registers is in our order with every backend.
    """

    model: str
    revision: str | None
    tokenizer: str | None
    tokenizer_revision: str | None
    dtype: str | None
    load_format: str
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    context_parallel_size: int | None
    max_num_tokens: int | None
    kv_cache_config: SimpleNamespace
    quant_config: SimpleNamespace | None
    speculative_config: object | None
    model_kwargs: dict[str, Any]
    checkpoint_loader: object | None
    engine: str
    layers: Mapping[str, Any] = field(repr=False)
    settings: dict[str, Any] = field(repr=False)  # an address may hold a password
    refusal: str | None = None
    # Blocks of an ended request are held until its save is told, as under that version of the contract.
    contract: str = "main"

    @property
    def backend_cache_layout(self) -> str:
        """vLLM's version, attention backend and order of the caches in memory; unknown until they are allocated."""
        found = {_backend_of(layer) for layer in self.layers.values() if hasattr(layer, "kv_cache")}
        backend = found.pop() if len(found) == 1 else None
        return unknown_value() if backend is None or not self.engine else f"{self.engine}/{backend}"


def arguments_of(vllm_config: Any) -> EngineArguments:
    """The arguments of the engine that `vllm_config`, or a copy of it, describes: the same object while it is held.

    Settings that cannot be used are told in one sentence and turn reuse off.
    """
    key, layers = str(vllm_config.kv_transfer_config.engine_id), _layers_of(vllm_config)
    with _lock:
        known = _known.get(key)
        # An engine that has ended may still wait for the garbage collector, under an id that its user chose for both.
        if known is None or (known.layers and layers and known.layers is not layers):
            known = _known[key] = _read(vllm_config, layers)
        return known


def vllm_version() -> tuple[int, int] | None:
    """The first two numbers of vLLM's version, None where it has no such version."""
    try:
        found = re.match(r"(\d+)\.(\d+)", str(importlib.import_module("vllm").__version__))
    except (ImportError, AttributeError):
        found = None
    return None if found is None else (int(found[1]), int(found[2]))


def _read(config: Any, layers: Mapping[str, Any]) -> EngineArguments:
    model, parallel, load = config.model_config, config.parallel_config, config.load_config
    settings, refusal = _settings(config.kv_transfer_config)
    load_format = str(getattr(load, "load_format", "")).lower()
    is_own = load_format in _OWN_WEIGHTS and not getattr(load, "model_loader_extra_config", None)
    method = getattr(model, "quantization", None)
    options = getattr(model, "quantization_config", None)
    version, implementation = vllm_version(), str(getattr(model, "model_impl", "auto"))
    suffix = "" if implementation in ("auto", "vllm") else f"-{implementation}"
    return EngineArguments(
        model=str(model.model),
        revision=getattr(model, "revision", None),
        tokenizer=getattr(model, "tokenizer", None) or None,
        tokenizer_revision=getattr(model, "tokenizer_revision", None),
        dtype=None if getattr(model, "dtype", None) is None else str(model.dtype),
        load_format=load_format,
        tensor_parallel_size=_size(parallel, "tensor_parallel_size"),
        pipeline_parallel_size=_size(parallel, "pipeline_parallel_size"),
        context_parallel_size=_size(parallel, "prefill_context_parallel_size", "decode_context_parallel_size"),
        max_num_tokens=_size(config.scheduler_config, "max_num_batched_tokens"),
        kv_cache_config=SimpleNamespace(dtype=getattr(config.cache_config, "cache_dtype", None)),
        quant_config=None if method is options is None else SimpleNamespace(quant_algo=method or "?", options=options),
        speculative_config=getattr(config, "speculative_config", None),
        model_kwargs={name: value for name in OVERRIDES if (value := getattr(model, name, None)) not in HARMLESS},
        checkpoint_loader=None if is_own else load,
        engine="" if version is None else f"vllm-{version[0]}.{version[1]}{suffix}",
        layers=layers,
        settings=settings,
        refusal=refusal,
    )


def _settings(transfer: Any) -> tuple[dict[str, Any], str | None]:
    try:
        settings = settings_of(getattr(transfer, "kv_connector_extra_config", None) or {})
        load_settings(**settings)
    except ConfigurationError as error:
        logger.error("KV reuse is off: %s", error)
        return settings_off(), "settings_invalid"
    return settings, None


def _layers_of(config: Any) -> Mapping[str, Any]:
    layers = getattr(getattr(config, "compilation_config", None), "static_forward_context", None)
    return layers if isinstance(layers, Mapping) else {}


def _size(config: Any, *names: str) -> int | None:
    """The product of sizes, of which a version may not have some; None where one is no whole number."""
    sizes = [value for name in names if (value := getattr(config, name, None)) is not None]
    return math.prod(sizes) if sizes and all(type(size) is int for size in sizes) else None


def _backend_of(layer: Any) -> str | None:
    """A layer's backend and the order of its cache's dimensions from the longest stride on, None before allocation."""
    cache, backend = layer.kv_cache, getattr(layer, "attn_backend", None)
    cache = cache[0] if isinstance(cache, (list, tuple)) and cache else cache
    if backend is None or not getattr(cache, "ndim", 0) or not cache.numel():
        return None
    order = sorted(range(cache.ndim), key=lambda dim: (-cache.stride(dim), dim))
    return f"{backend.get_name()}/{'.'.join(map(str, order))}"
