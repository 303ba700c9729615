"""The EngineSpec of vLLM, from its VllmConfig, and the connector's settings in it."""

from __future__ import annotations

import difflib
import importlib
import json
import logging
import math
import re
import threading
import weakref
from enum import Enum
from typing import TYPE_CHECKING, Any

from engine_wrapper.kv_scales import E4M3, Scale, digest_of, scales_in
from semblend_trt.config import Settings, load_settings, variables_of, why_ignored
from semblend_trt.connector.attention_layout import LLAMA4
from semblend_trt.connector.engine_spec import (
    AskedQuantization,
    Caches,
    EngineSpec,
    options_text,
    text_of,
    tokenizer_source,
)
from semblend_trt.errors import ConfigurationError, LayoutError
from semblend_trt.namespace import unknown_value

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

# Formats whose loaders take the safetensors files of the model's own folder, as the weights' digest does.
_OWN_WEIGHTS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
# What `value_at` gives for a field that a version lacks, and for one that fails.
ABSENT, UNREADABLE = object(), object()

_lock = threading.Lock()
_known: weakref.WeakValueDictionary[str, EngineSpec] = weakref.WeakValueDictionary()
# vLLM's attention layers by name, which it adds as it loads the model; and the caches of workers in other processes.
_parts: weakref.WeakKeyDictionary[EngineSpec, tuple[Mapping[str, Any], list[Caches]]] = weakref.WeakKeyDictionary()


def from_vllm_config(vllm_config: Any) -> EngineSpec:
    """Return the engine that `vllm_config`, or a copy of it, describes: the same object while it is held.

    Scheduler and worker half meet by this object, and the runtime ends with it. Settings that cannot be used are logged
    in one sentence and turn reuse off: `refusal` is settings_invalid then."""
    key = str(vllm_config.kv_transfer_config.engine_id)
    layers = vllm_config.compilation_config.static_forward_context
    with _lock:
        known = _known.get(key)
        # An ended engine may wait for the garbage collector under the same id, which its user chose.
        if known is None or (_parts[known][0] and layers and _parts[known][0] is not layers):
            reported: list[Caches] = []
            known = _known[key] = _read(vllm_config, layers, reported)
            _parts[known] = layers, reported
        return known


def learn_caches(engine: EngineSpec, caches: Caches) -> None:
    """Have the engine's spec name the caches that a worker in another process has."""
    _parts[engine][1][:] = [caches]


def value_at(holder: Any, path: str) -> Any:
    """Return the value of a dotted path, an enum's by its name; ABSENT or UNREADABLE where it has none."""
    for name in path.split("."):
        try:
            holder = getattr(holder, name)
        except AttributeError:
            # A property that fails is there.
            return UNREADABLE if hasattr(type(holder), name) else ABSENT
        except Exception:
            return UNREADABLE
    return holder.name if isinstance(holder, Enum) else holder


def vllm_version() -> tuple[int, int] | None:
    """Return the first two numbers of vLLM's version, or None."""
    try:
        found = re.match(r"(\d+)\.(\d+)", str(importlib.import_module("vllm").__version__))
    except (ImportError, AttributeError):
        found = None
    return None if found is None else (int(found[1]), int(found[2]))


def _read(config: Any, layers: Mapping[str, Any], reported: list[Caches]) -> EngineSpec:
    model, parallel, load = config.model_config, config.parallel_config, config.load_config
    refusal = None
    try:
        settings = settings_of(getattr(config.kv_transfer_config, "kv_connector_extra_config", None) or {})
        load_settings(**settings)
    except ConfigurationError as error:
        logger.error("KV reuse is off: %s", error)
        settings, refusal = settings_off(), "settings_invalid"
    load_format = str(getattr(load, "load_format", "")).lower()
    dtype, cache_dtype = text_of(getattr(model, "dtype", None)), getattr(config.cache_config, "cache_dtype", None)
    version, implementation = vllm_version(), str(getattr(model, "model_impl", "auto"))
    is_own_model = implementation in ("auto", "vllm")
    name = "" if version is None else f"vllm-{version[0]}.{version[1]}{'' if is_own_model else f'-{implementation}'}"
    method, options = getattr(model, "quantization", None), getattr(model, "quantization_config", None)
    asked = AskedQuantization(str(method or "?"), options_text({"quant_algo": method or "?", "options": options}))
    # vLLM scales queries by their position if it takes long prompts (`model_executor/models/llama4.py`).
    is_scaled = getattr(getattr(model, "hf_text_config", None), "attn_temperature_tuning", False)

    def read_caches() -> Caches:
        if reported:
            return reported[0]
        backend = _backend_of(layers)
        layout = None if backend is None or not name else f"{name}/{backend}{'/scaled' if is_scaled else ''}"
        return Caches(described_dtype(cache_dtype, layers), layout)

    return EngineSpec(
        name=name,
        model=str(model.model),
        revision=getattr(model, "revision", None),
        tokenizer=tokenizer_source(getattr(model, "tokenizer", None) or None, str(model.model)),
        tokenizer_revision=getattr(model, "tokenizer_revision", None),
        dtype=dtype,
        kv_dtype="float8_e4m3fn" if cache_dtype in E4M3 else dtype,
        read_caches=read_caches,
        quantization=None if method is None and options is None else asked,
        reads_own_weights=load_format in _OWN_WEIGHTS and not getattr(load, "model_loader_extra_config", None),
        has_model_overrides=False,  # refused by name
        tensor_parallel_size=_size(parallel, "tensor_parallel_size"),
        pipeline_parallel_size=_size(parallel, "pipeline_parallel_size"),
        context_parallel_size=_size(parallel, "prefill_context_parallel_size", "decode_context_parallel_size"),
        max_num_tokens=_size(config.scheduler_config, "max_num_batched_tokens"),
        speculates=False,  # refused by name where a drafter has layers
        # The connector registers a pool in this order with every backend.
        orders_blocks_by_head=True,
        contract=None,
        # Those of an fp8 cache are judged when the caches are registered.
        tells_kv_scales=True,
        holds_saved_blocks=True,
        # As it loads Llama 4, vLLM's own code puts the channels of Q and K into another order.
        halved_model_types=LLAMA4 if is_own_model else (),
        settings=settings,
        refusal=refusal,
    )


def _size(config: Any, *names: str) -> int | None:
    """The product of the sizes that this version has; None if one is no whole number."""
    sizes = [value for name in names if (value := getattr(config, name, None)) is not None]
    return math.prod(sizes) if sizes and all(type(size) is int for size in sizes) else None


def _backend_of(layers: Mapping[str, Any]) -> str | None:
    """The backend of all layers and the order of their caches' dimensions, from the longest stride on; None before the
    caches are allocated, and if layers differ."""
    found = set()
    for layer in layers.values():
        if not hasattr(layer, "kv_cache"):
            continue
        cache, backend = layer.kv_cache, getattr(layer, "attn_backend", None)
        if backend is None or not getattr(cache, "ndim", 0) or not cache.numel():
            return None
        order = sorted(range(cache.ndim), key=cache.stride, reverse=True)
        found.add(f"{backend.get_name()}/{'.'.join(map(str, order))}")
    return found.pop() if len(found) == 1 else None


# -- scales of an fp8 cache --------------------------------------------------------------------------------------------


def scales_of(attention: Any) -> tuple[Scale, Scale]:
    """Return the scales of K and V of one of vLLM's Attention modules; wait for the device. Raises as `scales_in`."""
    name = getattr(attention, "layer_name", "a layer")
    return _scale(attention, "k", name), _scale(attention, "v", name)


def _scale(attention: Any, kind: str, name: str) -> Scale:
    held, value = (getattr(attention, f"_{kind}_scale{each}", None) for each in ("", "_float"))
    found = scales_in(held, name, f"{kind}_scale", getattr(attention, "num_kv_heads", 1))
    if not isinstance(value, float) or not math.isclose(max(found), value, rel_tol=1e-6):
        shown = ", ".join(map(repr, found))
        raise LayoutError("kv_scales", f"{name} has a {kind}_scale of {shown}, and {value!r} on the host")
    return value if len(found) == 1 else found


def described_dtype(cache_dtype: str | None, layers: Mapping[str, Any]) -> str | None:
    """Return the cache's dtype, with its scales' digest once the model is loaded. `layers`: vLLM's, by name."""
    if cache_dtype not in E4M3:
        return cache_dtype
    held = [layers[name] for name in sorted(layers) if hasattr(layers[name], "kv_cache")]
    if not held:
        return E4M3[-1]
    try:
        return f"{E4M3[-1]}+{digest_of([scales_of(each) for each in held])}"
    except LayoutError:
        return f"{E4M3[-1]}+{unknown_value()}"


# -- settings, from `kv_connector_extra_config` ------------------------------------------------------------------------

# Keys of semblend-vllm-connector with the same meaning as a setting of another name.
_RENAMED = {"min_semantic_span": "min_span_tokens", "kv_storage_path": "disk_path"}
# Its modes that are settings here.
_MODES = {"discovery_only": ("discovery_only", "1"), "exact_prefix": ("policy", "exact")}


def settings_of(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that `extra` gives, by their fields; they win over the environment.

    A key is a variable's name with or without its prefix, or the setting's field, in any case; null and "" count as
    unset. One warning names removed keys, another one unknown keys. Raises ConfigurationError if two keys give one
    setting two values."""
    named = dict[str, str]()
    for field in Settings.model_fields:
        _, variable, *_ = names = variables_of(field)
        given = (field, f"semblend_{field}", variable.removeprefix("SEMBLEND_"), *names)
        named.update((name.lower(), field) for name in given)
    found, old = dict[str, Any](), dict[str, Any]()
    replaced, unknown = dict[str, str](), list[str]()
    for name, value in extra.items():
        key, text = str(name).lower(), value.strip() if isinstance(value, str) else value
        # A value of another type means what its text would mean in the variable.
        if isinstance(text, (bool, int, float)):
            text = json.dumps(text)
        if text in (None, ""):
            continue
        if key in named:
            setting = named[key]
            if found.setdefault(setting, text) != text:
                raise ConfigurationError(f"kv_connector_extra_config gives {setting} two values; keep one of them")
        elif key in _RENAMED:
            old[_RENAMED[key]] = text
        elif key == "mode" and text in _MODES:
            setting, text = _MODES[text]
            old[setting] = text
        elif (why := why_ignored(key)) is not None:
            replaced[key] = why
        else:
            close = difflib.get_close_matches(key, named, n=1, cutoff=0.8)
            unknown.append(repr(str(name)[:64]) + (f" (did you mean {close[0]}?)" if close else ""))
    if "disk_path" in old and "disk_bytes" not in found:
        replaced["kv_storage_path"] = "disk_path with disk_bytes, without which nothing is written"
    if replaced:
        told = "; ".join(f"{key}: {by}" for key, by in replaced.items())
        logger.warning("kv_connector_extra_config has keys that are not read any more: %s", told)
    if unknown:
        logger.warning("kv_connector_extra_config has keys that no setting has: %s", ", ".join(unknown))
    return {**old, **found}


def settings_off() -> dict[str, Any]:
    """Return the default settings, none of them read from the environment."""
    return {name: setting.default for name, setting in Settings.model_fields.items()}
