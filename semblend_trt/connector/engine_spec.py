"""EngineSpec: what the connector knows of an engine, whichever it is.

Only a constructor reads an engine's own objects: `from_llm_args` those of TensorRT-LLM and of the embedded engine.
Facts: NVIDIA/TensorRT-LLM, `llmapi/llm_args.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semblend_trt.connector.contract import flashinfer_layout, version_of
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# The module of the connector that also attaches to its engine.
WRAPPER_MODULE = "engine_wrapper.connector"
_MISSING = object()


@dataclass(frozen=True, slots=True)
class AskedQuantization:
    """The quantisation that an engine was asked for; None for what is not known. `options`: all of them as text."""

    algorithm: str | None
    options: str | None


@dataclass(frozen=True, slots=True)
class Caches:
    """An engine's KV caches; None for what is not known.

    `dtype`: as asked, with a digest of the scales if known. `layout`: engine, attention backend and order in memory,
    because backends may round, or order, the same KV in different ways."""

    dtype: str | None
    layout: str | None


@dataclass(frozen=True, eq=False)  # no slots: halves of a connector hold it weakly
class EngineSpec:
    """One engine. None means that the engine does not say it, which is never taken for off.

    Sizes of parallelism that are None are the engine's default of 1, but unknown to a namespace.

    - `kv_dtype`: of K and V in the caches, as torch names it.
    - `read_caches`: some engines know their caches only after these are registered.
    - `has_model_overrides`: something other than the model's files changes its configuration.
    - `attention_windows`: the windows that the engine was asked to keep KV for.
    - `orders_blocks_by_head`: a block is known to hold [heads, tokens, head_dim], which the pool's shape does not show.
    - `compiles_prefill` to `sparse_attention`: with these TensorRT-LLM executes no plan.
    - `contract`: TensorRT-LLM's version, whose own code computes the model. None: windows and RoPE are computed as
      Transformers does, with the KV of all tokens in one pool.
    - `halved_model_types`: model types whose channels the engine reorders, so that halves of a head rotate.
    - `holds_saved_blocks`: an ended request's blocks are held until `get_finished` names it.
    - `tells_whole_prefix`: a request's local match counts all tokens of its prefix that the engine reuses.
    - `settings`: of the connector; they win over the environment.
    - `refusal`: why nothing is reused, if its constructor has found a reason."""

    name: str
    model: str | Path
    revision: str | None
    tokenizer: str | Path | None
    tokenizer_revision: str | None
    dtype: str | None
    read_caches: Callable[[], Caches] = field(repr=False)
    quantization: AskedQuantization | None
    reads_own_weights: bool
    has_model_overrides: bool
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    context_parallel_size: int | None
    max_num_tokens: int | None
    speculates: bool | None
    orders_blocks_by_head: bool
    contract: str | None
    tells_kv_scales: bool
    holds_saved_blocks: bool
    kv_dtype: str | None = None
    max_seq_len: int | None = None
    attention_windows: tuple[int | None, ...] = ()
    attention_dp: bool = False
    offloads_to_host: bool = False
    is_disaggregated: bool = False
    attn_backend: str | None = None
    compiles_prefill: bool | None = None
    prefill_graphs: bool = False
    lora: bool | None = None
    sparse_attention: bool = False
    lora_dirs: tuple[str, ...] = ()
    halved_model_types: tuple[str, ...] = ()
    tells_whole_prefix: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)  # an address may hold a password
    refusal: str | None = None

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size or 1


def from_llm_args(llm_args: Any) -> EngineSpec:
    """Describe the engine of TensorRT-LLM's LlmArgs, or of an object with its field names; keep an EngineSpec as it is.

    Raises ConfigurationError for a size of parallelism that is no number."""
    if isinstance(llm_args, EngineSpec):
        return llm_args

    def given(name: str, default: Any = None) -> Any:
        return getattr(llm_args, name, default)

    cache, model = given("kv_cache_config"), given("model", "")
    engine, backend = type(llm_args).__module__.split(".", 1)[0], given("attn_backend")
    layout = f"{engine}/{backend or 'default'}/blocks.layers.kv.heads.tokens.channels"
    caches = Caches(text_of(getattr(cache, "dtype", None)), layout)
    has_wrapper = getattr(given("kv_connector_config"), "connector_module", None) == WRAPPER_MODULE
    is_dummy = "dummy" in str(given("load_format", "")).lower()
    return EngineSpec(
        name=engine,
        model=model,
        revision=given("revision"),
        tokenizer=tokenizer_source(given("tokenizer"), model),
        tokenizer_revision=given("tokenizer_revision"),
        dtype=text_of(given("dtype")),
        read_caches=lambda: caches,
        quantization=_asked_quantization(given("quant_config")),
        # A loader of the user's own may read other files.
        reads_own_weights=not is_dummy and given("checkpoint_loader") is None,
        has_model_overrides=bool(given("model_kwargs")),
        tensor_parallel_size=_size("tensor_parallel_size", given("tensor_parallel_size")),
        pipeline_parallel_size=_size("pipeline_parallel_size", given("pipeline_parallel_size")),
        context_parallel_size=_size("context_parallel_size", given("context_parallel_size")),
        max_num_tokens=given("max_num_tokens"),
        orders_blocks_by_head=_orders_blocks_by_head(str(backend or "TRTLLM").upper(), given("flashinfer_layout")),
        contract=None if given("follows_transformers", False) else version_of(given("contract")),
        # The wrapper reads TensorRT-LLM's after the caches are registered.
        tells_kv_scales=bool(given("tells_kv_scales", has_wrapper)),
        # In TensorRT-LLM only the V2 cache manager does, which its layout shows; the embedded engine says it.
        holds_saved_blocks=bool(given("holds_saved_blocks", False)),
        max_seq_len=given("max_seq_len"),
        attention_windows=tuple(getattr(cache, "max_attention_window", None) or ()),
        attention_dp=bool(given("enable_attention_dp")),
        offloads_to_host=bool(getattr(cache, "host_cache_size", None)),
        is_disaggregated=given("cache_transceiver_config") is not None,
        attn_backend=None if backend is None else str(backend).upper(),
        # Main's V1 counts whole blocks of its prefix alone, without the part of a block that it copies.
        tells_whole_prefix=getattr(cache, "enable_partial_reuse", None) is False,
        settings=given("settings", {}),
        **_features(llm_args),
    )


def _features(llm_args: Any) -> dict[str, Any]:
    """Return the fields of features that change how a step is computed; None for one that the engine does not name."""

    def is_on(name: str) -> bool | None:
        option = getattr(llm_args, name, _MISSING)
        return None if option is _MISSING else option is not None

    lora, prefill = (getattr(llm_args, name, None) for name in ("lora_config", "prefill_cuda_graph_backend"))
    return {
        "speculates": is_on("speculative_config"),
        "compiles_prefill": is_on("torch_compile_config"),
        # Older versions have none but those of compiled prefill.
        "prefill_graphs": str(getattr(prefill, "value", prefill)).lower() not in ("none", "disabled"),
        "lora": True if getattr(llm_args, "enable_lora", None) else is_on("lora_config"),
        "sparse_attention": bool(is_on("sparse_attention_config")),  # older versions have none
        "lora_dirs": tuple(map(str, getattr(lora, "lora_dir", None) or ())),
    }


def _size(name: str, value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name} is {value!r}; give a whole number from 1 on") from None


def _asked_quantization(asked: Any) -> AskedQuantization | None:
    # An engine that quantises nothing may have a quantisation that names no algorithm.
    algorithm, of_cache = (getattr(asked, name, None) for name in ("quant_algo", "kv_cache_quant_algo"))
    if algorithm is None and of_cache is None:
        return None
    return AskedQuantization(text_of(algorithm), options_text(asked))


def _orders_blocks_by_head(backend: str, layout: str | None) -> bool:
    """`layout`: that of FLASHINFER, if the engine says it."""
    return backend == "TRTLLM" or (backend == "FLASHINFER" and (layout or flashinfer_layout()) == "HND")


def tokenizer_source(tokenizer: Any, model: str | Path) -> str | Path | None:
    """Return the path or hub id of an engine's tokenizer, by default its model's; None if an object names no source."""
    source = model if tokenizer is None else tokenizer
    if not isinstance(source, (str, Path)):
        source = getattr(source, "name_or_path", None)
    return source if isinstance(source, (str, Path)) and str(source) else None


def text_of(value: object) -> str | None:
    """Return a dtype's name, as an engine or torch gives it."""
    return None if value is None else str(value).removeprefix("torch.")


def options_text(options: Any) -> str | None:
    """Return an object's options as text, the same for equal ones; None if they cannot be written."""
    dump = getattr(options, "model_dump", None)
    values = dump(mode="json") if callable(dump) else getattr(options, "__dict__", options)
    try:
        return json.dumps(values, sort_keys=True)
    except (TypeError, ValueError):
        return None
