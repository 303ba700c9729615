"""TensorRT-LLM's connector contract: its data, its versions, and the one place that imports its base classes.

Without tensorrt_llm our connector derives from the classes below, which have the same abstract methods. Facts:
NVIDIA/TensorRT-LLM, under `_torch/pyexecutor/`: `kv_cache_connector.py` (1.1, 1.2) and
`connectors/kv_cache_connector.py` (1.3 release candidates, and main, which becomes 1.4)."""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import torch

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound="Callable[..., Any]")

# Newest first.
MODULE_PATHS = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


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

    def wait_for_initialization(self) -> None:  # noqa: B027 - optional in the contract
        """Learn that the caches are registered: TensorRT-LLM calls it once, after the caches are registered."""


class _WorkerBase(ABC):
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
        """Return a callable to run after each forward, or None."""
        return None


def first_of(paths: tuple[str, ...]) -> ModuleType | None:
    """Return the first of these modules that can be imported; None without one."""
    for path in paths:
        with suppress(ImportError):
            return importlib.import_module(path)
    return None


upstream = first_of(MODULE_PATHS)
KvCacheConnectorScheduler: Any = upstream.KvCacheConnectorScheduler if upstream else _SchedulerBase
KvCacheConnectorWorker: Any = upstream.KvCacheConnectorWorker if upstream else _WorkerBase


def never_raises(answer: Callable[[], Any]) -> Callable[[Method], Method]:
    """Decorate a method to return `answer()` if it fails, and to count that by its name in the runtime's `faults`.

    An exception in a leader call would leave the other ranks waiting in the broadcast of its result."""

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
