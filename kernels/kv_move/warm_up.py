"""Compiles the kernels of moves before anybody waits for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.kv_move.layer_moves import LayerMoves
from kernels.kv_move.move import Move
from kernels.layout import ContiguousKv, PagedKv

if TYPE_CHECKING:
    from kernels.layout import KvGeometry
    from kernels.rope import RopeRotation


def warm_up(geometry: KvGeometry, dtype: torch.dtype, device: torch.device, rotation: RopeRotation) -> None:
    """Has what moves between pools of this geometry and dtype, and from and to contiguous KV, compiled for `device`.

    It moves a token of scratch memory both ways, on the current stream. On the CPU nothing is compiled.
    """
    pool = torch.zeros(1, geometry.num_layers, geometry.kv_factor, geometry.row_elements, dtype=dtype, device=device)
    token = (geometry.num_layers, geometry.kv_factor, geometry.kv_heads, 1, geometry.head_dim)
    paged, held = PagedKv(pool, torch.zeros(1, dtype=torch.int64), geometry), ContiguousKv(pool.new_zeros(token))
    for source, target in ((paged, held), (held, paged)):
        LayerMoves([Move(source, 0, 0, 1)], target, rotation).make(range(geometry.num_layers))
