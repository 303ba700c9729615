"""The blocks of a forward's requests, as rows of the pool, read from TensorRT-LLM's cache manager at every plan.

V1's `get_batch_cache_indices` gives rows. V2's gives a row times the number of layers, so V2 is asked by layer group.
V2 exchanges a request's block for an equal one as it commits it, so that rows it gave before may be another request's.

Facts: NVIDIA/TensorRT-LLM, `_torch/pyexecutor/resource_manager.py` (V1) and `kv_cache/kv_cache_manager_v2.py` (V2,
main): `get_page_indices_by_layer_group` reads the request's id alone, and gives -1 for a block without a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from semblend_trt.errors import LayoutError

# Returns the rows of each of these requests, by position.
BlockTable = Callable[[Sequence[int]], list[list[int]]]


def table_for(manager: Any) -> BlockTable | None:
    """Return the table of a cache manager; None for one that is neither V1 nor V2, or lacks the method."""
    found = _TABLES.get(type(manager).__name__)
    if found is None or not callable(getattr(manager, found[0], None)):
        return None
    return found[1](manager)


@dataclass(frozen=True, slots=True)
class _Named:
    """All that V2 reads of a request."""

    py_request_id: int


def _v1(manager: Any) -> BlockTable:
    return lambda request_ids: [list(map(int, ids)) for ids in manager.get_batch_cache_indices(list(request_ids))]


def _v2(manager: Any) -> BlockTable:
    def rows(request_id: int) -> list[int]:
        groups = manager.get_page_indices_by_layer_group(_Named(request_id))
        if len(groups) != 1:
            raise LayoutError("layer_groups", f"request {request_id} has blocks of {len(groups)} layer groups, not one")
        return list(map(int, groups[0]))

    return lambda request_ids: list(map(rows, request_ids))


_TABLES = {
    "KVCacheManager": ("get_batch_cache_indices", _v1),
    "KVCacheManagerV2": ("get_page_indices_by_layer_group", _v2),
}
