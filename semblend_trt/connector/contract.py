"""TensorRT-LLM as its connector meets it: versions, base classes, data, LlmArgs as an EngineSpec, and requests.

It lets requests reach a connector that would get wrong data. Examples are several beams, and equal placeholders for
different images. They are refused here, by name.

Without tensorrt_llm our connector derives from the classes below, which have what it does not define itself. Facts:
NVIDIA/TensorRT-LLM, `llmapi/llm_args.py` and, under `_torch/pyexecutor/`, `kv_cache_connector.py` (1.1, 1.2) and
`connectors/kv_cache_connector.py` (1.3 release candidates, and main, which becomes 1.4)."""

from __future__ import annotations

import importlib
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from semblend_trt.connector.engine_spec import (
    WRAPPER_MODULE,
    AskedQuantization,
    Caches,
    EngineRequest,
    EngineSpec,
    options_text,
    text_of,
    tokenizer_source,
)
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import numpy.typing as npt

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound="Callable[..., Any]")

# Newest first.
MODULE_PATHS = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
_FLASHINFER_PATHS = (
    "tensorrt_llm._torch.attention.backends.flashinfer",
    "tensorrt_llm._torch.attention_backend.flashinfer",
)
_MISSING = object()


@dataclass(slots=True)
class ScheduledRequest:
    """One scheduled request, as 1.1 and 1.2 describe it: new requests in full, cached ones as deltas."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass(slots=True)
class RequestData(ScheduledRequest):
    """As main describes it. `block_hashes` name blocks as KV events do: a store keyed by them would publish KV again.

    `new_block_ids_by_layer_group` has one list a layer group under the V2 cache manager, and none under V1. With more
    than one group `new_block_ids` is empty. -1 is a block without a page."""

    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """What one iteration runs, as main describes it; `attention_dp_rank` owns its block ids."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None


V11, V12, V13, V14 = "1.1", "1.2", "1.3rc", "1.4"


def match_of(module: ModuleType) -> str:
    """Return the version of TensorRT-LLM's connector module by what it has: its release number does not show it."""
    scheduler, worker = module.KvCacheConnectorScheduler, module.KvCacheConnectorWorker
    if hasattr(worker, "register_kv_cache_layout"):
        return V14
    if hasattr(scheduler, "wait_for_initialization"):
        return V13
    return V12 if hasattr(worker, "register_forward_pass_callable") else V11


class _Half:
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args


class _WorkerHalf(_Half):
    _metadata: object | None = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object | None:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None


def first_of(paths: tuple[str, ...]) -> ModuleType | None:
    """Return the first of these modules that can be imported; None without one."""
    for path in paths:
        with suppress(ImportError):
            return importlib.import_module(path)
    return None


upstream = first_of(MODULE_PATHS)
KvCacheConnectorScheduler: Any = upstream.KvCacheConnectorScheduler if upstream else _Half
KvCacheConnectorWorker: Any = upstream.KvCacheConnectorWorker if upstream else _WorkerHalf


def never_raises(answer: Callable[[], Any]) -> Callable[[Method], Method]:
    """Decorate a method to return `answer()` if it fails, and to count that by its name in the runtime's `faults`.

    An exception in a leader call would leave the other ranks waiting in the broadcast of its result."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return method(self, *arguments, **options)
            except Exception:
                logger.exception("%s failed; the engine is answered as if there were nothing to reuse", method.__name__)
                self._runtime.faults[method.__name__] += 1
                return answer()

        return call  # type: ignore[return-value]

    return decorate


def from_llm_args(llm_args: Any) -> EngineSpec:
    """Describe the engine of TensorRT-LLM's LlmArgs, or of an object with its field names.
    Raises ConfigurationError for a size of parallelism that is no number."""

    def given(name: str, default: Any = None) -> Any:
        return getattr(llm_args, name, default)

    def is_on(name: str) -> bool | None:  # None for a feature that the engine does not name
        return given(name) is not None if hasattr(llm_args, name) else None

    prefill = given("prefill_cuda_graph_backend")
    cache, model = given("kv_cache_config"), given("model", "")
    engine, backend = type(llm_args).__module__.split(".", 1)[0], given("attn_backend")
    layout = f"{engine}/{backend or 'default'}/blocks.layers.kv.heads.tokens.channels"
    caches = Caches(text_of(getattr(cache, "dtype", None)), layout)
    kind = str(backend or "TRTLLM").upper()
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
        # A block then holds [heads, tokens, channels]; an engine may say FLASHINFER's layout itself.
        orders_blocks_by_head=kind == "TRTLLM"
        or (kind == "FLASHINFER" and (given("flashinfer_layout") or flashinfer_layout()) == "HND"),
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
        speculates=is_on("speculative_config"),
        compiles_prefill=is_on("torch_compile_config"),
        # Older versions have none but those of compiled prefill.
        prefill_graphs=str(getattr(prefill, "value", prefill)).lower() not in ("none", "disabled"),
        lora=True if given("enable_lora") else is_on("lora_config"),
        sparse_attention=bool(is_on("sparse_attention_config")),  # older versions have none
        lora_dirs=tuple(map(str, getattr(given("lora_config"), "lora_dir", None) or ())),
    )


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


def version_of(name: str | None) -> str:
    """Return the version of this name, else TensorRT-LLM's here; without one the oldest, which promises least."""
    if name in (V11, V12, V13, V14):
        return name
    return V11 if upstream is None else match_of(upstream)


def takes_v2(asked: Any) -> bool:
    """Return whether TensorRT-LLM may take the V2 cache manager beside a connector, by its `use_kv_cache_manager_v2`.

    Before 1.4 a connector makes it take V1. 1.4 takes V2 if nothing is asked for; an engine that is not here may."""
    return asked is not False and (upstream is None or match_of(upstream) == V14)


def flashinfer_layout() -> str | None:
    """Return how TensorRT-LLM's backend FLASHINFER orders a block, "HND" or "NHD"; None if that cannot be read."""
    metadata = getattr(first_of(_FLASHINFER_PATHS), "FlashInferAttentionMetadata", None)
    layout = getattr(metadata, "__dataclass_fields__", {}).get("kv_layout")
    return None if layout is None else str(layout.default)


class LlmRequestView(EngineRequest):
    """TensorRT-LLM's LlmRequest, or the embedded engine's; any name but its id may be missing."""

    def __init__(self, request: Any) -> None:
        self._request, self.request_id = request, int(request.request_id)
        self.prompt_len, self.max_new_tokens = self._said("prompt_len"), self._said("max_new_tokens") or 0
        self.lora_task, self.lora_path = self._said("lora_task_id"), self._said("py_lora_path")
        # What a request of the embedded engine may ask for.
        self.exact_only, self.cold = self._said("exact_only", False), self._said("cold", False)
        self.broken_profiles = self._said("broken_profiles", ())
        # The salt, and the type that it must have: text in main, an unsigned 64-bit number in 1.3rc.
        salts = ((self._said(name, _MISSING), kind) for name, kind in (("cache_salt", str), ("cache_salt_id", int)))
        given: tuple[Any, Any] = next((each for each in salts if each[0] is not _MISSING), (None, None))
        self._salt, self._kind = given
        self.cache_salt = str(self._salt) if isinstance(self._salt, (str, int)) else None
        # V2 allocates by chunks and says what it took; V1 sets that attribute on another object.
        said = self._said("py_num_connector_matched_tokens")
        self.taken_tokens = said if isinstance(said, int) else None

    @property
    def refusal(self) -> str | None:
        # These two come first: the engine's own requests need not have the rest in a form that can be read.
        if self._is("is_dummy_request"):
            return "dummy_request"
        if self._is("is_generation_only_request"):
            return "generation_only"
        if int(getattr(self._said("sampling_config"), "beam_width", 1) or 1) > 1:
            return "beam_search"
        if self._said("py_multimodal_data") or self._said("multimodal_hashes"):
            return "multimodal"
        if self._said("draft_tokens"):
            return "speculative_decoding"
        if self._is("py_return_context_logits"):
            return "context_logits"
        if self._kind is None:
            return "salt_unknown"  # isolation is unknown
        # The text of a salt of another type or size could equal another salt's.
        is_known = type(self._salt) is self._kind and (self._kind is str or 0 <= self._salt < 1 << 64)
        return None if self._salt is None or is_known else "salt_invalid"

    def token_array(self, count: int) -> npt.NDArray[np.int32]:
        return np.asarray(self._request.get_tokens(0), dtype=np.int32)[: max(0, count)]

    def _said(self, name: str, default: Any = None) -> Any:
        return getattr(self._request, name, default)

    def _is(self, name: str) -> bool:
        # `is_generation_only_request` is a property of the C++ binding and a method of the Python subclass.
        value = self._said(name, False)
        return bool(value() if callable(value) else value)


def request_of(request: Any) -> EngineRequest:
    """Return the view of a request: itself, where the engine's connector has made it, or else TensorRT-LLM's."""
    return request if isinstance(request, EngineRequest) else LlmRequestView(request)
