"""The connector contract, and the one place that imports TensorRT-LLM's base classes.

Where tensorrt_llm is importable (either module path it has used) our connector derives from its classes; elsewhere
from the classes below, which have the same abstract methods. Facts: NVIDIA/TensorRT-LLM, under `_torch/pyexecutor/`:
`kv_cache_connector.py` (1.1, 1.2) and `connectors/kv_cache_connector.py` (1.3, main).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from semblend_trt.connector.contract_versions import (
    NEW_MODULE,
    OLD_MODULE,
    V11,
    VERSIONS,
    RequestData,
    SchedulerOutput,
    match_of,
)

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from semblend_trt.connector.contract_versions import ContractVersion

__all__ = [
    "MODULE_PATHS",
    "KvCacheConnectorScheduler",
    "KvCacheConnectorWorker",
    "RequestData",
    "SchedulerOutput",
    "flashinfer_layout",
    "version_of",
]

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

    The embedded engine names it in `contract`. TensorRT-LLM's is told by what its module has; where nothing is known
    it is the oldest, which holds and tells least.
    """
    named = VERSIONS.get(getattr(llm_args, "contract", ""))
    if named is not None:
        return named
    return V11 if _upstream is None else match_of(_upstream).version


def flashinfer_layout(llm_args: Any) -> str | None:
    """How the attention backend FLASHINFER orders a block, "HND" or "NHD"; None where that cannot be read."""
    if _upstream is None:
        return version_of(llm_args).flashinfer_layout
    metadata = getattr(_first_of(_FLASHINFER_PATHS), "FlashInferAttentionMetadata", None)
    layout = getattr(metadata, "__dataclass_fields__", {}).get("kv_layout")
    return None if layout is None else str(layout.default)
