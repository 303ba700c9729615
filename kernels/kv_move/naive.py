"""kv_move written to be read: one token, one layer, one head at a time, in float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernels.kv_move.move import Move, check_moves
from kernels.layout import ContiguousKv, PagedKv

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kernels.rope import RopeRotation


def kv_move(moves: Sequence[Move], target: PagedKv | ContiguousKv, rotation: RopeRotation) -> None:
    """As `kernels.kv_move.kv_move`."""
    if not moves:
        return
    check_moves(moves, target, rotation)
    layers, kv_heads = _layers_and_heads(target)
    for move in moves:
        for token in range(move.length):
            for layer in range(layers):
                for head in range(kv_heads):
                    source = (layer, head, move.source_start + token)
                    destination = (layer, head, move.target_start + token)
                    key = _row(move.source, 0, *source)
                    _row(target, 0, *destination).copy_(_rotated(key, move.shift, rotation))
                    _row(target, 1, *destination).copy_(_row(move.source, 1, *source))


def _layers_and_heads(kv: PagedKv | ContiguousKv) -> tuple[int, int]:
    if isinstance(kv, PagedKv):
        return kv.geometry.num_layers, kv.geometry.kv_heads
    return kv.tensor.shape[0], kv.tensor.shape[2]


def _row(kv: PagedKv | ContiguousKv, kind: int, layer: int, head: int, position: int) -> torch.Tensor:
    """The view [head_dim] of K (kind 0) or V (kind 1) at one position."""
    if isinstance(kv, ContiguousKv):
        return kv.tensor[layer, kind, head, position]
    geometry = kv.geometry
    block = int(kv.block_ids[position // geometry.block_size])
    start = (head * geometry.block_size + position % geometry.block_size) * geometry.head_dim
    return kv.pool[block, layer, kind, start : start + geometry.head_dim]


def _rotated(key: torch.Tensor, shift: int, rotation: RopeRotation) -> torch.Tensor:
    if shift == 0:
        return key
    rotated = key.float().clone()
    for plane, frequency in enumerate(rotation.inverse_frequencies):
        if rotation.interleaved:
            first, second = 2 * plane, 2 * plane + 1
        else:
            first, second = plane, plane + rotation.rotary_dim // 2
        cos, sin = math.cos(shift * frequency), math.sin(shift * frequency)
        rotated[first] = key[first].float() * cos - key[second].float() * sin
        rotated[second] = key[second].float() * cos + key[first].float() * sin
    return rotated
