"""Spans of KV that are moved or compared, and the checks that every path makes on the host before it does either."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from kernels.layout import ContiguousKv, LayeredPool, PagedKv, check_dtype, check_pool
from kernels.rope import LayerRotations, RopeRotation, Rotation, check_head_dim

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Move:
    """`length` tokens of `source`, from index `source_start`, go to the target's index `target_start`.

    An index is a position, unless `turn` says by how many positions K rotates: a staged copy begins anywhere.
    """

    source: PagedKv | ContiguousKv
    source_start: int
    target_start: int
    length: int
    turn: int | None = None

    @property
    def shift(self) -> int:
        """Positions by which K is rotated."""
        return self.target_start - self.source_start if self.turn is None else self.turn


@dataclass(frozen=True, slots=True)
class FreshRows:
    """K (rotated) and V of one layer from a forward; row i is of position `first_position + i`.

    `k`, `v`: [tokens, kv_heads, head_dim], any strides. `v` is None with kv_factor 1 (MLA).
    """

    k: torch.Tensor
    v: torch.Tensor | None
    first_position: int = 0


Fresh = PagedKv | ContiguousKv | FreshRows


def check_moves(moves: Sequence[Move], target: PagedKv | ContiguousKv, rotation: Rotation) -> None:
    """Raises ValueError, naming the tensor and its bound, unless every move can be made."""
    check_kv(target, "target")
    check_head_dim(sizes_of(target)[3], rotation, "target")
    check_layers(moves, target, rotation)
    check_sources(moves, "moves", "target", sizes_of(target), tensor_of(target))
    for index, move in enumerate(moves):
        check_range(f"target of moves[{index}] from target_start", move.target_start, move.length, target.capacity)
    _check_disjoint(moves, target)


def check_layers(moves: Sequence[Move], target: PagedKv | ContiguousKv, rotation: Rotation) -> None:
    """Raises ValueError where keys would turn by rotations of other layers than the target's."""
    if not isinstance(rotation, LayerRotations) or not any(move.shift for move in moves):
        return
    layers, known = sizes_of(target)[0], len(rotation.kind_of_layer)
    if layers != known:
        raise ValueError(f"target has {layers} layers, but the rotation is that of {known}; each layer needs its own")


def check_sources(
    moves: Sequence[Move], name: str, other: str, sizes: tuple[int, int, int, int], memory: torch.Tensor
) -> None:
    """Raises ValueError unless every source holds its range and has `sizes` and the dtype of `memory`, called `other`.

    A PagedKv source must be on `memory`'s device. `sizes`: layers, kv_factor, kv_heads, head_dim.
    """
    checked: set[int] = set()
    for index, move in enumerate(moves):
        source = f"{name}[{index}].source"
        if id(move.source) not in checked:
            checked.add(id(move.source))
            check_kv(move.source, source)
            if sizes_of(move.source) != sizes:
                raise ValueError(
                    f"{source} has (layers, kv_factor, kv_heads, head_dim) {sizes_of(move.source)}; the {other} has "
                    f"{sizes}"
                )
            tensor = tensor_of(move.source)
            if tensor.dtype != memory.dtype:
                raise ValueError(f"{source} is {tensor.dtype}; the {other} is {memory.dtype}")
            if isinstance(move.source, PagedKv) and tensor.device != memory.device:
                raise ValueError(f"{source}.pool is on {tensor.device}; the {other} is on {memory.device}")
        check_range(f"{source} from source_start", move.source_start, move.length, move.source.capacity)


def tensor_of(kv: PagedKv | ContiguousKv) -> torch.Tensor:
    """The memory behind `kv`; K of the lowest layer where the layers lie apart."""
    if isinstance(kv, ContiguousKv):
        return kv.tensor
    return kv.pool.keys[0] if isinstance(kv.pool, LayeredPool) else kv.pool


def planes_of(kv: PagedKv | ContiguousKv) -> tuple[torch.Tensor, ...]:
    """All the memory behind `kv`: K (or the latent) of each layer and V of each where the layers lie apart, else one
    tensor."""
    if isinstance(kv, PagedKv) and isinstance(kv.pool, LayeredPool):
        return tuple(plane for kind in kv.pool.kinds for plane in kind)
    return (tensor_of(kv),)


def lie_alike(*each: PagedKv | ContiguousKv) -> bool:
    """Whether K and V of all layers have the same strides, in each by itself: the Triton kernels know one set."""
    return all(len({plane.stride() for plane in planes_of(kv)}) == 1 for kv in each)


def sizes_of(kv: PagedKv | ContiguousKv) -> tuple[int, int, int, int]:
    """Layers, kv_factor, kv_heads and head_dim."""
    if isinstance(kv, PagedKv):
        geometry = kv.geometry
        return geometry.num_layers, geometry.kv_factor, geometry.kv_heads, geometry.head_dim
    layers, kv_factor, kv_heads, _, head_dim = kv.tensor.shape
    return layers, kv_factor, kv_heads, head_dim


def check_kv(kv: PagedKv | ContiguousKv, name: str) -> None:
    """Raises ValueError unless `kv` is well formed in itself."""
    if isinstance(kv, ContiguousKv):
        if kv.tensor.ndim != 5 or kv.tensor.shape[1] not in (1, 2):
            raise ValueError(
                f"{name}.tensor has shape {list(kv.tensor.shape)}; [layers, 2 (1 in MLA), kv_heads, tokens, head_dim] "
                "is needed"
            )
        check_dtype(kv.tensor.dtype, f"{name}.tensor")
        return
    check_pool(kv.pool, kv.geometry, f"{name}.pool")
    check_block_ids(kv.block_ids, kv.pool.shape[0], f"{name}.block_ids")


def check_block_ids(block_ids: torch.Tensor, num_blocks: int, name: str) -> None:
    """Raises ValueError unless `block_ids` is a vector of int64 in 0..num_blocks-1."""
    if block_ids.dtype != torch.int64 or block_ids.ndim != 1:
        raise ValueError(f"{name} is {block_ids.dtype} of shape {list(block_ids.shape)}; an int64 vector is needed")
    if block_ids.numel() == 0:
        return
    held = block_ids.cpu().numpy()
    lowest, highest = int(held.min()), int(held.max())
    if lowest < 0 or highest >= num_blocks:
        raise ValueError(f"{name} spans {lowest}..{highest}, outside 0..{num_blocks - 1}, the blocks of the pool")


def check_range(what: str, start: int, length: int, capacity: int) -> None:
    """Raises ValueError unless `start .. start + length` lies in 0..capacity."""
    if start < 0 or length < 0 or start + length > capacity:
        raise ValueError(f"{what} {start} with length {length} leaves 0..{capacity}, the positions it holds")


def _check_disjoint(moves: Sequence[Move], target: PagedKv | ContiguousKv) -> None:
    """No slot is written twice, and none is both read and written: the moves run in any order."""
    ranges = sorted((move.target_start, move.target_start + move.length) for move in moves if move.length)
    for (_, end), (start, _) in pairwise(ranges):
        if start < end:
            raise ValueError(f"two moves write target position {start}; target ranges must be disjoint")
    if isinstance(target, PagedKv):
        blocks = target.block_ids.tolist()
        if len(set(blocks)) < len(blocks):
            raise ValueError("target.block_ids names a block twice; a block may hold one range of positions only")
    storages = _storages(target)
    for index, move in enumerate(moves):
        if not move.length or storages.isdisjoint(_storages(move.source)):
            continue
        if _overlaps(move, target, ranges):
            raise ValueError(f"moves[{index}].source is written by the same call; source and target must not overlap")


def _storages(kv: PagedKv | ContiguousKv) -> set[int]:
    """Addresses of the memory that `kv` is part of."""
    return {plane.untyped_storage().data_ptr() for plane in planes_of(kv)}


def _overlaps(move: Move, target: PagedKv | ContiguousKv, written: Sequence[tuple[int, int]]) -> bool:
    source_memory, target_memory = tensor_of(move.source), tensor_of(target)
    if source_memory.data_ptr() != target_memory.data_ptr() or source_memory.shape != target_memory.shape:
        return True
    read = _slots(move.source, [(move.source_start, move.source_start + move.length)])
    return bool(torch.isin(read, _slots(target, written)).any())


def _slots(kv: PagedKv | ContiguousKv, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Slot numbers of the positions in `ranges`, int64."""
    positions = torch.cat([torch.arange(start, end) for start, end in ranges])
    if isinstance(kv, ContiguousKv):
        return positions
    block_size = kv.geometry.block_size
    return kv.block_ids.cpu()[positions // block_size] * block_size + positions % block_size


def check_spans(spans: Sequence[Move], fresh: Fresh, layer: int, rotation: RopeRotation) -> None:
    """Raises ValueError, naming the tensor and its bound, unless every span can be compared."""
    if isinstance(fresh, FreshRows):
        _check_rows(fresh)
        layers = sizes_of(spans[0].source)[0]
        kv_factor = 1 if fresh.v is None else 2
        sizes, memory = (layers, kv_factor, *fresh.k.shape[1:]), fresh.k
        first, capacity = fresh.first_position, fresh.k.shape[0]
    else:
        check_kv(fresh, "fresh")
        sizes, memory = sizes_of(fresh), tensor_of(fresh)
        first, capacity = 0, fresh.capacity
    check_head_dim(sizes[3], rotation, "fresh")
    check_sources(spans, "spans", "fresh KV", sizes, memory)
    if not 0 <= layer < sizes[0]:
        raise ValueError(f"layer is {layer}, outside 0..{sizes[0] - 1}")
    for index, span in enumerate(spans):
        what = f"fresh of spans[{index}] from target_start minus first_position"
        check_range(what, span.target_start - first, span.length, capacity)


def _check_rows(rows: FreshRows) -> None:
    for name, tensor in (("k", rows.k), ("v", rows.k if rows.v is None else rows.v)):
        if tensor.ndim != 3 or tensor.shape != rows.k.shape:
            raise ValueError(
                f"fresh.{name} has shape {list(tensor.shape)}; [tokens, kv_heads, head_dim], the same for k and v, is "
                "needed"
            )
        check_dtype(tensor.dtype, f"fresh.{name}")
        if tensor.dtype != rows.k.dtype or tensor.device != rows.k.device:
            raise ValueError(
                f"fresh.{name} is {tensor.dtype} on {tensor.device}; fresh.k is {rows.k.dtype} on {rows.k.device}"
            )
