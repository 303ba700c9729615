"""kv_move written to be read: one token, one layer, one head at a time, in float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernels.kv_move import check_moves
from kernels.layout import ContiguousKv, Kv, LayeredPool, Move
from kernels.rope import RopeRotation, Rotation, rotary_planes, saturated

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def kv_move(moves: Sequence[Move], target: Kv, rotation: Rotation) -> None:
    """Do as `kernels.kv_move.kv_move`."""
    if not moves:
        return
    check_moves(moves, target, rotation)
    layers, kv_factor, kv_heads, _ = target.sizes
    for move in moves:
        for token in range(move.length):
            for layer in range(layers):
                own = rotation.of_layer(layer)
                for head in range(kv_heads):
                    source = (layer, head, move.source_start + token)
                    destination = (layer, head, move.target_start + token)
                    key = row_of(move.source, 0, *source)
                    is_copied = move.shift == 0 or own.is_still
                    moved = key if is_copied else saturated(rotated_key(key, move.shift, own), key.dtype)
                    row_of(target, 0, *destination).copy_(moved)
                    if kv_factor == 2:
                        row_of(target, 1, *destination).copy_(row_of(move.source, 1, *source))


def row_of(kv: Kv, kind: int, layer: int, head: int, position: int) -> torch.Tensor:
    """Return the view [head_dim] of K (kind 0) or V (kind 1) at one position."""
    if isinstance(kv, ContiguousKv):
        return kv.tensor[layer, kind, head, position]
    block, slot = int(kv.block_ids[position // kv.geometry.block_size]), position % kv.geometry.block_size
    if isinstance(kv.pool, LayeredPool):
        return kv.pool.kinds[kind][layer][block, head, slot]
    start = (head * kv.geometry.block_size + slot) * kv.geometry.head_dim
    return kv.pool[block, layer, kind, start : start + kv.geometry.head_dim]


def rotated_key(key: torch.Tensor, shift: int, rotation: RopeRotation) -> torch.Tensor:
    """Return `key` [head_dim] rotated by `shift` positions, in float32."""
    rotated = key.float().clone()
    first, second = rotary_planes(rotated, rotation)
    for plane, frequency in enumerate(rotation.inverse_frequencies):
        cos, sin = math.cos(shift * frequency), math.sin(shift * frequency)
        x, y = float(first[plane]), float(second[plane])
        first[plane], second[plane] = x * cos - y * sin, y * cos + x * sin
    return rotated
