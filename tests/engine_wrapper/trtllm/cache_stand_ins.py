"""Stand-ins for TensorRT-LLM's cache managers, with the signatures of NVIDIA/TensorRT-LLM; each names its file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kernels.layout import KvGeometry

BLOCK = 8


@dataclass
class LlmRequest:
    """`_torch/pyexecutor/llm_request.py`, LlmRequest (1.2 @3277953), and what it inherits from
    `cpp/tensorrt_llm/nanobind/batch_manager/bindings.cpp`."""

    py_request_id: int
    tokens: list[int]
    context_current_position: int = 0
    max_new_tokens: int = 4
    cache_salt: str | None = None
    blocks: list[int] = field(default_factory=list)
    _is_dummy: bool = field(default=False, init=False)

    @property
    def is_dummy_request(self) -> bool:
        return self._is_dummy

    @is_dummy_request.setter
    def is_dummy_request(self, value: bool) -> None:
        self._is_dummy = value

    @property
    def request_id(self) -> int:
        return self.py_request_id

    @property
    def prompt_len(self) -> int:
        return len(self.tokens)

    @property
    def context_remaining_length(self) -> int:
        return len(self.tokens) - self.context_current_position

    def get_tokens(self, beam: int) -> list[int]:
        return self.tokens


class CppManager:
    """`cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp` as bound by nanobind (1.2 @b35ac1b6): no attribute can be set
    on it, no argument may be None, dummies are not stored, and `tree` holds prefixes of whole blocks."""

    __slots__ = ("free", "held", "pinned", "tree")

    def __init__(self, blocks: int) -> None:
        self.free = list(range(blocks))
        self.held: dict[int, list[int]] = {}
        self.tree: set[tuple[int, ...]] = set()
        self.pinned: list[int] = []

    def store_context_blocks(self, request: LlmRequest) -> None:
        self._store(request, min(request.context_current_position, len(request.tokens) - 1))

    def remove_sequence(self, request_id: int, request: LlmRequest, pin_on_release: bool) -> None:
        if not isinstance(request, LlmRequest):
            raise TypeError("remove_sequence(): incompatible function arguments")
        self._store(request, len(request.tokens))
        self.free += self.held.pop(request_id)

    def store_blocks_for_reuse(self, request_id: int, request: LlmRequest, pin_blocks: bool) -> int:
        self._store(request, len(request.tokens))
        self.pinned.append(request_id)
        return self.held[request_id][-1]

    def unpin_blocks_by_id(self, block_id: int) -> None:
        if not isinstance(block_id, int):
            raise TypeError("unpin_blocks_by_id(): incompatible function arguments")
        self.pinned.pop()

    def _store(self, request: LlmRequest, tokens: int) -> None:
        if request.is_dummy_request:
            return
        self.tree.update(tuple(request.tokens[:end]) for end in range(BLOCK, tokens + 1, BLOCK))


class KVCacheManager:
    """`_torch/pyexecutor/resource_manager.py`, KVCacheManager (1.2 @3277953): the V1 manager."""

    is_vswa = False

    def __init__(self, pool: torch.Tensor, geometry: KvGeometry) -> None:
        self.impl = CppManager(pool.shape[0])
        self.layer_offsets = {index: index for index in range(geometry.num_layers)}
        self.pool, self.geometry = pool, geometry
        self.rewound: list[int] = []

    def get_unique_primary_pool(self) -> torch.Tensor:
        return self.pool

    def add_sequence(self, request: LlmRequest) -> None:
        needed = self.geometry.blocks_for(len(request.tokens) + request.max_new_tokens)
        request.blocks = [self.impl.free.pop() for _ in range(needed)]
        self.impl.held[request.py_request_id] = request.blocks

    def get_batch_cache_indices(self, request_ids: list[int], layer_idx: int | None = None) -> list[list[int]]:
        return [list(self.impl.held[request_id]) for request_id in request_ids]

    def update_resources(
        self, scheduled_batch: Any, attn_metadata: Any = None, kv_cache_dtype_byte_size: float | None = None
    ) -> None:
        for request in scheduled_batch.generation_requests:
            self.rewound.append(request.py_request_id)
        for request in scheduled_batch.context_requests:
            self.impl.store_context_blocks(request)

    def free_resources(self, request: LlmRequest, pin_on_release: bool = False) -> None:
        return self.impl.remove_sequence(request.py_request_id, request, pin_on_release)

    def store_blocks_for_reuse(self, request: LlmRequest, pin_blocks: bool = False) -> int:
        return self.impl.store_blocks_for_reuse(request.py_request_id, request, pin_blocks)

    def unpin_blocks_by_id(self, kv_cache_block_id: int) -> None:
        self.impl.unpin_blocks_by_id(kv_cache_block_id)


class KvCacheOfRequest:
    """`tensorrt_llm/runtime/kv_cache_manager_v2`, _KVCache (main @035ab91c)."""

    def __init__(self, tree: set[tuple[int, ...]]) -> None:
        self.tree, self.committed, self.history, self.is_committing = tree, [], 0, True
        self.is_active, self.is_open = True, True

    @property
    def num_committed_tokens(self) -> int:
        return len(self.committed)

    def commit(self, tokens: list[int]) -> None:
        if not self.is_committing:
            raise RuntimeError("Cannot commit tokens after stop_committing()")
        self.committed += tokens
        self.tree.update(tuple(self.committed[:end]) for end in range(BLOCK, len(self.committed) + 1, BLOCK))

    def stop_committing(self) -> None:
        self.is_committing = False

    def resize(self, capacity: int | None, history_length: int | None = None) -> bool:
        self.history = self.history if history_length is None else history_length
        return True

    def close(self) -> None:
        self.is_open = False


class KVCacheManagerV2:
    """`_torch/pyexecutor/kv_cache_manager_v2.py`, KVCacheManagerV2 (main @035ab91c)."""

    is_draft = False
    enable_block_reuse = True

    def __init__(self) -> None:
        self.kv_cache_map: dict[int, KvCacheOfRequest] = {}
        self.tree: set[tuple[int, ...]] = set()
        self.conversation_manager: Any = None

    def add(self, request: LlmRequest) -> KvCacheOfRequest:
        self.kv_cache_map[request.py_request_id] = KvCacheOfRequest(self.tree)
        return self.kv_cache_map[request.py_request_id]

    def try_commit_blocks(self, request: LlmRequest) -> None:
        kv_cache = self.kv_cache_map.get(request.py_request_id)
        if kv_cache is None:
            return
        if request.context_current_position > kv_cache.num_committed_tokens:
            tokens = request.get_tokens(0)
            kv_cache.commit(tokens[kv_cache.num_committed_tokens : request.context_current_position])
        if request.context_remaining_length == 0:
            kv_cache.stop_committing()

    def update_context_resources(self, scheduled_batch: Any) -> None:
        for request in scheduled_batch.context_requests:
            self.try_commit_blocks(request)

    def update_resources(self, scheduled_batch: Any, attn_metadata: Any = None, size: float | None = None) -> None:
        for request in scheduled_batch.generation_requests:
            self.kv_cache_map[request.py_request_id].resize(None, len(request.tokens))

    def free_resources(self, request: LlmRequest, pin_on_release: bool = False) -> None:
        kv_cache = self.kv_cache_map.pop(request.py_request_id, None)
        if kv_cache is not None:
            kv_cache.close()
