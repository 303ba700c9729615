"""The forms of the contract for caches that are described by layer group (the V2 cache manager)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semblend_trt.connector.guarded_calls import never_raises

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class LayerGroupForms:
    """Forwards the scheduler's forms by layer group to the flat ones.

    With several groups there are no flat ids. The worker has refused such a cache then, so that no plan and no save
    waits for them.
    """

    @never_raises(lambda: None)
    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: Sequence[Sequence[int]]
    ) -> None:
        flat: Any = self
        flat.update_state_after_alloc(request, _flat(block_ids_by_layer_group))

    @never_raises(lambda: False)
    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: Sequence[Sequence[int]]
    ) -> bool:
        flat: Any = self
        return bool(flat.request_finished(request, _flat(cache_block_ids_by_layer_group)))


def single_pool(layout: Any) -> torch.Tensor | None:
    """The layout as one pool tensor, [blocks, layers, 2, row]; None when it is several or cannot say."""
    as_tensor = getattr(layout, "as_single_pool_tensor", None)
    if len(layout.groups) != 1 or as_tensor is None:
        return None
    pool: torch.Tensor | None = as_tensor()
    return pool


def _flat(by_group: Sequence[Sequence[int]]) -> list[int] | None:
    """The ids of a single group, none of several; None for what cannot be read, which the flat form refuses."""
    try:
        return list(by_group[0]) if len(by_group) == 1 else []
    except TypeError:
        return None
