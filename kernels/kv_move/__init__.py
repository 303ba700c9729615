"""Moves a whole plan's KV, all layers and all spans, in one call: by one Triton launch, or in vectorised torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.device import triton_serves
from kernels.layout import (
    ContiguousKv,
    LayeredPool,
    Move,
    PagedKv,
    check_kv,
    check_range,
    check_sources,
    indexable,
    layer_view,
    lie_alike,
    pool_view,
)
from kernels.rope import LayerRotations, RopeRotation, Rotation, check_head_dim, rotate_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.layout import Kv, KvGeometry

__all__ = ["LayerMoves", "Move", "check_moves", "kv_move", "kv_move_by_torch", "prepared", "warm_up"]


def kv_move(moves: Sequence[Move], target: Kv, rotation: Rotation) -> None:
    """Write every move's tokens into `target`: K rotated by `target_start - source_start`, V copied, all layers.

    float32, bfloat16, float16 and float8_e4m3fn. A rotation that differs by layer has the layers of `target`. A shift
    of 0 copies K bit for bit, and so does a layer without RoPE. With kv_factor 1 (MLA) there is no V, and the latent
    ends at the rotation's `first_channel`. On CUDA one Triton launch on the current stream serves sources on the
    target's device or in pinned host memory; torch serves calls with any other, and the CPU. A ContiguousKv source may
    lie on another device than the target. Raises ValueError, naming the tensor and its bound, before anything is
    written."""
    check_moves(moves, target, rotation)
    prepared(moves, target, rotation)(range(target.sizes[0]), 0)


class LayerMoves:
    """The moves of `kv_move`, checked and laid out once; each call of `make` moves some layers."""

    def __init__(self, moves: Sequence[Move], target: Kv, rotation: Rotation) -> None:
        """Take sources and a target of any numbers of layers; a rotation that differs by layer has the target's.

        Raises ValueError, naming the tensor and its bound. Triton's table is uploaded on the current stream; `make` on
        another one has to be ordered after that."""
        self._room = target.sizes[0]
        self._layers = min((move.source.sizes[0] for move in moves), default=0)
        common = min(self._room, self._layers)
        _check_layers(moves, target, rotation)
        part = target.layers(0, common)
        check_moves([_of_layers(move, range(common)) for move in moves], part, rotation.layers(0, common))
        self._make = prepared(moves, target, rotation)

    def make(self, layers: range, first: int = 0) -> None:
        """Move the sources' `layers` to the target's layers from `first` on, on the current stream.

        Raises ValueError for layers that a source or the target does not have."""
        if layers.start < 0 or layers.stop > self._layers or first < 0 or first + len(layers) > self._room:
            raise ValueError(
                f"layers {layers.start}..{layers.stop - 1} cannot be moved to layers from {first} on: the sources have "
                f"{self._layers}, the target has {self._room}"
            )
        if len(layers):
            self._make(layers, first)


def warm_up(geometry: KvGeometry, dtype: torch.dtype, device: torch.device, rotation: Rotation) -> None:
    """Compile the kernel for moves between pools of this geometry and dtype and contiguous KV, on `device`.

    Moves a token of scratch memory both ways, on the current stream. On the CPU nothing is compiled."""
    pool = torch.zeros(1, geometry.num_layers, geometry.kv_factor, geometry.row_elements, dtype=dtype, device=device)
    held = ContiguousKv(pool.new_zeros(geometry.shape(1)))
    paged = PagedKv(pool, torch.zeros(1, dtype=torch.int64), geometry)
    for source, target in ((paged, held), (held, paged)):
        LayerMoves([Move(source, 0, 0, 1)], target, rotation).make(range(geometry.num_layers))


def prepared(moves: Sequence[Move], target: Kv, rotation: Rotation) -> Callable[[range, int], None]:
    """Return a function that makes moves of some layers, to the target's from a first one on.

    `check_moves` must have passed them. One Triton launch makes them, or torch if Triton cannot serve one of them."""
    moves = [move for move in moves if move.length]
    sources = {id(move.source): move.source for move in moves}.values()
    if moves and lie_alike(target, *sources) and triton_serves(target.memory, [source.memory for source in sources]):
        from kernels.kv_move import triton_move

        return triton_move.prepared(moves, target, rotation)

    def make(layers: range, first: int) -> None:
        own = rotation.layers(first, first + len(layers))
        kv_move_by_torch([_of_layers(move, layers) for move in moves], target.layers(first, first + len(layers)), own)

    return make


def _of_layers(move: Move, layers: range) -> Move:
    return replace(move, source=move.source.layers(layers.start, layers.stop))


def kv_move_by_torch(moves: Sequence[Move], target: Kv, rotation: Rotation) -> None:
    """Serve `kv_move`, of moves that were checked: one gather, rotation and scatter a span for all layers."""
    device = target.memory.device
    for move in moves:
        rows = gather(move.source, move.source_start, move.length).to(device, non_blocking=True)
        keys = rows[:, 0]
        if isinstance(rotation, RopeRotation) or move.shift == 0:
            keys = rotate_keys(keys, move.shift, rotation.of_layer(0))
        else:
            turned = (rotate_keys(own, move.shift, rotation.of_layer(layer)) for layer, own in enumerate(keys))
            keys = torch.stack(tuple(turned))
        _scatter(target, move.target_start, 0, keys)
        if rows.shape[1] == 2:
            _scatter(target, move.target_start, 1, rows[:, 1])


def gather(source: Kv, start: int, length: int) -> torch.Tensor:
    """Return some positions, [layers, kv_factor, kv_heads, length, head_dim], in the source's memory or as a copy."""
    if isinstance(source, ContiguousKv):
        return source.tensor[:, :, :, start : start + length]
    block_size = source.geometry.block_size
    first_block = start // block_size
    blocks = source.block_ids[first_block : -(-(start + length) // block_size)].to(source.pool.device)
    # Whole blocks in the donor's order: [layers, kv_factor, kv_heads, blocks, block_size, head_dim]
    if isinstance(source.pool, LayeredPool):
        planes = [each for layer in zip(*source.pool.kinds, strict=True) for each in layer]
        found = torch.stack([indexable(each).index_select(0, blocks).transpose(0, 1) for each in planes])
        gathered: torch.Tensor = found.unflatten(0, source.sizes[:2])
    else:
        gathered = indexable(pool_view(source.pool, source.geometry)).permute(1, 2, 3, 0, 4, 5).index_select(3, blocks)
    offset = start - first_block * block_size
    return gathered.view(source.pool.dtype).flatten(3, 4)[:, :, :, offset : offset + length]


def _scatter(target: Kv, start: int, kind: int, rows: torch.Tensor) -> None:
    """Write `rows`, [layers, kv_heads, length, head_dim], of K (kind 0) or V (kind 1)."""
    length = rows.shape[2]
    if isinstance(target, ContiguousKv):
        target.tensor[:, kind, :, start : start + length] = rows
        return
    places = target.places(torch.arange(start, start + length))
    blocks, slots = (each.to(target.pool.device, non_blocking=True) for each in places)
    if isinstance(target.pool, LayeredPool):
        for layer in range(target.geometry.num_layers):
            one = indexable(layer_view(target.pool, target.geometry, layer, kind)).transpose(0, 1)
            one[:, blocks, slots] = indexable(rows[layer])
        return
    # paged has shape [layers, kv_heads, blocks, block_size, head_dim]
    paged = indexable(pool_view(target.pool, target.geometry))[:, :, kind].permute(1, 2, 0, 3, 4)
    paged[:, :, blocks, slots] = indexable(rows)


def check_moves(moves: Sequence[Move], target: Kv, rotation: Rotation) -> None:
    """Raise ValueError, naming the tensor and its bound, unless every move can be made.

    The moves run in any order: no slot is written twice, and none is both read and written."""
    check_kv(target, "target")
    check_head_dim(target.sizes[3], rotation, "target")
    _check_layers(moves, target, rotation)
    check_sources(moves, "moves", "target", target.sizes, target.memory)
    for index, move in enumerate(moves):
        check_range(f"target of moves[{index}] from target_start", move.target_start, move.length, target.capacity)
    ranges = sorted((move.target_start, move.target_start + move.length) for move in moves if move.length)
    for (_, end), (start, _) in pairwise(ranges):
        if start < end:
            raise ValueError(f"two moves write target position {start}; target ranges must be disjoint")
    if isinstance(target, PagedKv) and len(target.block_ids) and np.bincount(target.block_ids.cpu().numpy()).max() > 1:
        raise ValueError("target.block_ids names a block twice; a block may hold one range of positions only")
    storages = _storages(target)
    for index, move in enumerate(moves):
        if not move.length or storages.isdisjoint(_storages(move.source)):
            continue
        own, memory = move.source.memory, target.memory
        is_same = own.data_ptr() == memory.data_ptr() and own.shape == memory.shape
        read = _slots(move.source, [(move.source_start, move.source_start + move.length)]) if is_same else None
        if read is None or bool(torch.isin(read, _slots(target, ranges)).any()):
            raise ValueError(f"moves[{index}].source is written by the same call; source and target must not overlap")


def _check_layers(moves: Sequence[Move], target: Kv, rotation: Rotation) -> None:
    """Raise ValueError where keys would turn by rotations of other layers than the target's."""
    if not isinstance(rotation, LayerRotations) or not any(move.shift for move in moves):
        return
    layers, known = target.sizes[0], len(rotation.kind_of_layer)
    if layers != known:
        raise ValueError(f"target has {layers} layers, but the rotation is that of {known}; each layer needs its own")


def _storages(kv: Kv) -> set[int]:
    if isinstance(kv, PagedKv) and isinstance(kv.pool, LayeredPool):
        return kv.pool.storages
    return {kv.memory.untyped_storage().data_ptr()}


def _slots(kv: Kv, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return slot numbers of the positions in `ranges`, int64."""
    positions = torch.cat([torch.arange(start, end) for start, end in ranges])
    if isinstance(kv, ContiguousKv):
        return positions
    blocks, slots = kv.places(positions)
    return blocks * kv.geometry.block_size + slots
