"""kv_move in vectorised torch: one gather, one rotation and one scatter a span for all layers at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.kv_move.move import Move, tensor_of
from kernels.layout import ContiguousKv, LayeredPool, PagedKv, indexable, layer_view, pool_view
from kernels.rope import RopeRotation, Rotation, rotate_keys

if TYPE_CHECKING:
    from collections.abc import Sequence


def kv_move(moves: Sequence[Move], target: PagedKv | ContiguousKv, rotation: Rotation) -> None:
    """As `kernels.kv_move.kv_move`; the moves were checked."""
    device = tensor_of(target).device
    for move in moves:
        if not move.length:
            continue
        # rows has shape [layers, kv_factor, kv_heads, length, head_dim]
        rows = _gather(move.source, move.source_start, move.length).to(device, non_blocking=True)
        _scatter(target, move.target_start, 0, _rotated(rows[:, 0], move.shift, rotation))
        if rows.shape[1] == 2:
            _scatter(target, move.target_start, 1, rows[:, 1])


def _rotated(keys: torch.Tensor, shift: int, rotation: Rotation) -> torch.Tensor:
    """`keys` [layers, kv_heads, length, head_dim], each layer by its own rotation."""
    if isinstance(rotation, RopeRotation) or shift == 0:
        return rotate_keys(keys, shift, rotation.of_layer(0))
    rotated = torch.empty_like(keys)
    for layer, own in enumerate(keys):
        rotated[layer] = rotate_keys(own, shift, rotation.of_layer(layer))
    return rotated


def _gather(source: PagedKv | ContiguousKv, start: int, length: int) -> torch.Tensor:
    if isinstance(source, ContiguousKv):
        return source.tensor[:, :, :, start : start + length]
    block_size = source.geometry.block_size
    first_block = start // block_size
    blocks = source.block_ids[first_block : -(-(start + length) // block_size)].to(source.pool.device)
    # Whole blocks in the donor's order: [layers, kv_factor, kv_heads, blocks, block_size, head_dim]
    gathered = _gather_blocks(source, blocks)
    offset = start - first_block * block_size
    return gathered.flatten(3, 4)[:, :, :, offset : offset + length]


def _gather_blocks(source: PagedKv, blocks: torch.Tensor) -> torch.Tensor:
    pool, geometry = source.pool, source.geometry
    if isinstance(pool, LayeredPool):
        planes = [each for layer in zip(*pool.kinds, strict=True) for each in layer]
        found = torch.stack([indexable(each).index_select(0, blocks).transpose(0, 1) for each in planes])
        rows: torch.Tensor = found.view(pool.dtype).unflatten(0, (geometry.num_layers, geometry.kv_factor))
        return rows
    paged = indexable(pool_view(pool, geometry)).permute(1, 2, 3, 0, 4, 5)
    return paged.index_select(3, blocks).view(pool.dtype)


def _scatter(target: PagedKv | ContiguousKv, start: int, kind: int, rows: torch.Tensor) -> None:
    """`rows`: [layers, kv_heads, length, head_dim], of K (kind 0) or V (kind 1)."""
    length = rows.shape[2]
    if isinstance(target, ContiguousKv):
        target.tensor[:, kind, :, start : start + length] = rows
        return
    blocks, slots = target.places(start, length)
    if isinstance(target.pool, LayeredPool):
        for layer in range(target.geometry.num_layers):
            one = indexable(layer_view(target.pool, target.geometry, layer, kind)).transpose(0, 1)
            one[:, blocks, slots] = indexable(rows[layer])
        return
    # paged has shape [layers, kv_heads, blocks, block_size, head_dim]
    paged = indexable(pool_view(target.pool, target.geometry))[:, :, kind].permute(1, 2, 0, 3, 4)
    paged[:, :, blocks, slots] = indexable(rows)
