"""The connector contract: what each of its versions calls, and the one place that imports TensorRT-LLM's base classes.

Where tensorrt_llm can be imported (from either module path it has used) our connector derives from its classes,
elsewhere from the classes below, which have the same abstract methods. The embedded engine takes its rules from the
versions, so that the connector is tested with each. Facts: NVIDIA/TensorRT-LLM, under `_torch/pyexecutor/`:
`kv_cache_connector.py` (1.1, 1.2) and `connectors/kv_cache_connector.py` (1.3 release candidates and main).
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import torch

logger = logging.getLogger(__name__)

OLD_MODULE = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
NEW_MODULE = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"


@dataclass(slots=True)
class RequestDataV11:
    """One scheduled request, as 1.1 and 1.2 tell it: new requests in full, cached ones as deltas."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass(slots=True)
class RequestDataV13(RequestDataV11):
    """As the 1.3 release candidates tell it: with retention priorities, and the salt as a number."""

    priorities: list[int] | None = None
    cache_salt_id: int | None = None


@dataclass(slots=True)
class RequestData(RequestDataV11):
    """As main tells it. `block_hashes` name blocks as KV events do: a store keyed by them would publish KV again.

    `new_block_ids_by_layer_group` has one list a layer group under the V2 cache manager, and none under V1; with more
    than one group `new_block_ids` is empty. -1 in it stands for a block without a page.
    """

    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutputV11:
    """What one iteration runs, up to 1.3: requests seen for the first time, and requests seen before."""

    new_requests: list[RequestDataV11] = field(default_factory=list)
    cached_requests: list[RequestDataV11] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """As main tells it: with the owner of the block ids under attention data parallelism."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None


SCHEDULER_METHODS = frozenset(
    {"get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "request_finished"}
)
WORKER_METHODS = frozenset(
    {
        "bind_connector_meta",
        "register_kv_caches",
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_finished",
    }
)
GROUPED_SCHEDULER_METHODS = frozenset({"update_state_after_alloc_by_layer_group", "request_finished_by_layer_group"})

# Bound by nanobind; what V1 hands to the query has these and nothing else.
_BOUND_ATTRIBUTES = (
    "request_id get_tokens get_token get_num_tokens prompt_len orig_prompt_len max_new_tokens state "
    "context_current_position context_chunk_size context_remaining_length is_first_context_chunk "
    "is_last_context_chunk prepopulated_prompt_len lora_task_id multimodal_hashes sampling_config "
    "is_context_only_request is_generation_only_request is_dummy_request client_id"
)
BOUND_ATTRIBUTES = frozenset(_BOUND_ATTRIBUTES.split())


@dataclass(frozen=True, slots=True)
class ContractVersion:
    """One version of the contract.

    `scheduler_methods` and `worker_methods` are those that the engine may call. `request_attributes` are what the query
    can read of a request under the V1 cache manager, which hands it another object than the later calls. The rest:

    - `floors_local_match`: V1 tells the query of whole shared blocks only.
    - `tells_cut_short`: `request_finished` is called for a request that fails or is cancelled; otherwise it just
      disappears.
    - `survives_failed_forward`: an error in a forward ends all running requests with an error, and the engine lives on.
    - `defers_cancel`: the blocks of a cancelled request are held while a load into them is under way.
    - `pins_with_transceiver`: saved requests are pinned in a disaggregated set-up, too.
    - `unpins_every_save`: all requests that one `get_finished` names are unpinned; otherwise the first one is, and the
      others' blocks are lost.
    - `keeps_windowed_kv`: a layer with a window writes each token's KV to a place of its own, as other layers do, where
      `max_attention_window` is not set. Before upstream's pull request 6768 it wrote around, in the window's tokens.
    - `asks_without_reuse`: with block reuse off, V1 asks for tokens all the same, and applies none of the offer.
    - `flashinfer_layout`: the order of heads and tokens in a block of the attention backend FLASHINFER.
    - `allows_v2`: whether a connector may be attached to the V2 cache manager; otherwise the engine takes V1.
    """

    name: str
    module_path: str
    request_data: type[RequestDataV11]
    scheduler_output: type[SchedulerOutputV11] | type[SchedulerOutput]
    scheduler_methods: frozenset[str]
    worker_methods: frozenset[str]
    request_attributes: frozenset[str]
    floors_local_match: bool
    tells_cut_short: bool
    survives_failed_forward: bool
    defers_cancel: bool
    pins_with_transceiver: bool
    unpins_every_save: bool
    keeps_windowed_kv: bool
    asks_without_reuse: bool
    flashinfer_layout: str
    allows_v2: bool

    @property
    def request_fields(self) -> tuple[str, ...]:
        """The fields of RequestData, in order."""
        return tuple(each.name for each in fields(self.request_data))


V11 = ContractVersion(
    name="1.1",
    module_path=OLD_MODULE,
    request_data=RequestDataV11,
    scheduler_output=SchedulerOutputV11,
    scheduler_methods=SCHEDULER_METHODS,
    worker_methods=WORKER_METHODS,
    request_attributes=BOUND_ATTRIBUTES | {"cache_salt_id"},
    floors_local_match=False,
    tells_cut_short=True,
    survives_failed_forward=True,
    defers_cancel=False,
    pins_with_transceiver=False,
    unpins_every_save=False,
    keeps_windowed_kv=False,
    asks_without_reuse=False,
    flashinfer_layout="NHD",
    allows_v2=False,
)
V12 = replace(
    V11,
    name="1.2",
    worker_methods=WORKER_METHODS | {"register_forward_pass_callable"},
    tells_cut_short=False,
    pins_with_transceiver=True,
    unpins_every_save=True,
    keeps_windowed_kv=True,
)
V13 = replace(
    V12,
    name="1.3rc",
    module_path=NEW_MODULE,
    request_data=RequestDataV13,
    scheduler_methods=SCHEDULER_METHODS | {"wait_for_initialization"},
    flashinfer_layout="HND",
)
MAIN = replace(
    V13,
    name="main",
    request_data=RequestData,
    scheduler_output=SchedulerOutput,
    scheduler_methods=V13.scheduler_methods | GROUPED_SCHEDULER_METHODS,
    worker_methods=V12.worker_methods | {"register_kv_cache_layout"},
    request_attributes=BOUND_ATTRIBUTES | {"cache_salt", "kv_cache_retention_config"},
    floors_local_match=True,
    defers_cancel=True,
    asks_without_reuse=True,
    allows_v2=True,
)
# What the embedded engine does when no version is asked for: main, which tells parts of blocks as 1.3 does, tells every
# end as 1.1 does, hands over prompts as arrays, which are faster to read, and tells which requests are to be exact.
EMBEDDED = replace(
    MAIN,
    name="embedded",
    request_attributes=MAIN.request_attributes | {"cache_salt_id", "token_array", "exact_only", "cold"},
    floors_local_match=False,
    tells_cut_short=True,
    survives_failed_forward=False,
    asks_without_reuse=False,
)

VERSIONS = {version.name: version for version in (V11, V12, V13, MAIN, EMBEDDED)}


def contract_version(name: str) -> ContractVersion:
    """The version of this name. Raises ConfigurationError for any other."""
    version = VERSIONS.get(name)
    if version is None:
        raise ConfigurationError(f"contract is {name!r}; it must be one of {', '.join(VERSIONS)}")
    return version


def match_of(module: ModuleType) -> tuple[ContractVersion, tuple[str, ...]]:
    """The known version from which `module`, TensorRT-LLM's connector module, differs in the fewest places.

    Compared are its path, the fields of RequestData and the methods of the base classes: releases are told apart by
    what they have, not by their number. Of versions that are as near the oldest is taken, which promises least.
    """
    matches = [(version, _differences(module, version)) for version in (V11, V12, V13, MAIN)]
    return min(matches, key=lambda match: len(match[1]))


def _differences(module: Any, version: ContractVersion) -> tuple[str, ...]:
    found = [] if module.__name__ == version.module_path else [f"module {module.__name__}"]
    has = {each.name for each in fields(module.RequestData)}
    found += _compared("field RequestData", has, set(version.request_fields))
    for base, ours, known in (
        ("KvCacheConnectorScheduler", version.scheduler_methods, MAIN.scheduler_methods),
        ("KvCacheConnectorWorker", version.worker_methods, MAIN.worker_methods),
    ):
        kind = getattr(module, base)
        has = {name for name in known if hasattr(kind, name)} | set(getattr(kind, "__abstractmethods__", ()))
        found += _compared(f"method {base}", has, set(ours))
    return tuple(found)


def _compared(what: str, has: set[str], expected: set[str]) -> list[str]:
    missing = [f"{what}.{name} is missing" for name in sorted(expected - has)]
    return missing + [f"{what}.{name} is there too" for name in sorted(has - expected)]


MODULE_PATHS = (NEW_MODULE, OLD_MODULE)
_FLASHINFER_PATHS = (
    "tensorrt_llm._torch.attention.backends.flashinfer",
    "tensorrt_llm._torch.attention_backend.flashinfer",
)


class _SchedulerBase(ABC):
    """Rank 0 only. `request` arguments have the attributes of TensorRT-LLM's LlmRequest."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> object: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[list[int]]) -> None:
        """Called in place of the flat form under the V2 cache manager; forwards a single group to it."""
        self.update_state_after_alloc(request, _only_group(self, block_ids_by_layer_group))

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[list[int]]) -> bool:
        """Called in place of the flat form under the V2 cache manager; forwards a single group to it."""
        return self.request_finished(request, _only_group(self, cache_block_ids_by_layer_group))

    def wait_for_initialization(self) -> None:  # noqa: B027 - optional in the contract
        """Called once after the caches are registered."""


class _WorkerBase(ABC):
    """Every rank."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object | None = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object | None:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None: ...

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Called in place of `register_kv_caches` under the V2 cache manager; forwards a single pool to it."""
        tensor = layout.as_single_pool_tensor()
        if tensor is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no register_kv_cache_layout, and a cache of {len(layout.groups)} layer "
                "groups is no single pool tensor; implement it"
            )
        self.register_kv_caches(tensor)

    @abstractmethod
    def start_load_kv(self, stream: torch.cuda.Stream | None) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: torch.cuda.Stream | None) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: torch.cuda.Stream | None) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: torch.cuda.Stream | None) -> None: ...

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...

    def register_forward_pass_callable(self) -> Any:
        """Returns a callable to run after each forward, or None."""
        return None


def _only_group(connector: object, block_ids_by_layer_group: list[list[int]]) -> list[int]:
    if len(block_ids_by_layer_group) != 1:
        raise NotImplementedError(
            f"{type(connector).__name__} has flat methods only, and a cache of {len(block_ids_by_layer_group)} layer "
            "groups has no flat block ids; implement the forms by layer group"
        )
    return block_ids_by_layer_group[0]


def _first_of(paths: tuple[str, ...]) -> ModuleType | None:
    """The first module that there is."""
    for path in paths:
        try:
            return importlib.import_module(path)
        except ImportError:
            continue
    return None


_upstream = _first_of(MODULE_PATHS)
KvCacheConnectorScheduler: Any = _upstream.KvCacheConnectorScheduler if _upstream else _SchedulerBase
KvCacheConnectorWorker: Any = _upstream.KvCacheConnectorWorker if _upstream else _WorkerBase


def version_of(llm_args: Any) -> ContractVersion:
    """The version of the contract that the engine of `llm_args` keeps.

    The embedded engine names it in `contract`; TensorRT-LLM's follows from its module. Where nothing is known it is the
    oldest, which promises least.
    """
    named = VERSIONS.get(getattr(llm_args, "contract", ""))
    if named is not None:
        return named
    return V11 if _upstream is None else match_of(_upstream)[0]


def flashinfer_layout(llm_args: Any) -> str | None:
    """How the attention backend FLASHINFER orders a block, "HND" or "NHD"; None where that cannot be read.

    The embedded engine says so in `flashinfer_layout`; TensorRT-LLM's own module does.
    """
    if (stated := getattr(llm_args, "flashinfer_layout", None)) is not None:
        return str(stated)
    metadata = getattr(_first_of(_FLASHINFER_PATHS), "FlashInferAttentionMetadata", None)
    layout = getattr(metadata, "__dataclass_fields__", {}).get("kv_layout")
    return None if layout is None else str(layout.default)


Method = TypeVar("Method", bound="Callable[..., Any]")


def never_raises(answer: Callable[[], Any]) -> Callable[[Method], Method]:
    """Decorates a method to return `answer()` when it fails, and to count the failure under its name in the runtime's
    `faults`.

    An exception in a leader call would leave the other ranks waiting in the broadcast of its result.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *arguments: Any) -> Any:
            try:
                return method(self, *arguments)
            except Exception:
                logger.exception("%s failed; the engine is answered as if there were nothing to reuse", method.__name__)
                self._runtime.faults[method.__name__] += 1
                return answer()

        return call  # type: ignore[return-value]

    return decorate
