"""TensorRT-LLM's connector contract: its data, its versions, and the one place that imports its base classes.

Without tensorrt_llm our connector derives from the classes below, which have what it does not define itself. Facts:
NVIDIA/TensorRT-LLM, under `_torch/pyexecutor/`: `kv_cache_connector.py` (1.1, 1.2) and
`connectors/kv_cache_connector.py` (1.3 release candidates, and main, which becomes 1.4)."""

from __future__ import annotations

import importlib
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

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
        def call(self: Any, *arguments: Any) -> Any:
            try:
                return method(self, *arguments)
            except Exception:
                logger.exception("%s failed; the engine is answered as if there were nothing to reuse", method.__name__)
                self._runtime.faults[method.__name__] += 1
                return answer()

        return call  # type: ignore[return-value]

    return decorate
