"""One span's move, and the checks that every path makes on the host before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from kernels.layout import SUPPORTED_DTYPES, ContiguousKv, PagedKv, check_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.rope import RopeRotation


@dataclass(frozen=True, slots=True)
class Move:
    """`length` tokens of `source`, from position `source_start`, go to the target's position `target_start`."""

    source: PagedKv | ContiguousKv
    source_start: int
    target_start: int
    length: int

    @property
    def shift(self) -> int:
        """Positions by which K is rotated."""
        return self.target_start - self.source_start


def check_moves(moves: Sequence[Move], target: PagedKv | ContiguousKv, rotation: RopeRotation) -> None:
    """Raises ValueError, naming the tensor and its bound, unless every move can be made."""
    _check_kv(target, "target")
    layers, kv_heads, head_dim = _sizes(target)
    if rotation.rotary_dim > head_dim:
        raise ValueError(f"rotation.rotary_dim is {rotation.rotary_dim}, above the target's head_dim {head_dim}")
    checked: set[int] = set()
    for index, move in enumerate(moves):
        name = f"moves[{index}].source"
        if id(move.source) not in checked:
            _check_kv(move.source, name)
            checked.add(id(move.source))
        if _sizes(move.source) != (layers, kv_heads, head_dim):
            raise ValueError(
                f"{name} has (layers, kv_heads, head_dim) {_sizes(move.source)}; the target has "
                f"{(layers, kv_heads, head_dim)}"
            )
        source, destination = tensor_of(move.source), tensor_of(target)
        if source.dtype != destination.dtype:
            raise ValueError(f"{name} is {source.dtype}; the target is {destination.dtype}")
        if isinstance(move.source, PagedKv) and source.device != destination.device:
            raise ValueError(f"{name}.pool is on {source.device}; the target is on {destination.device}")
        _check_range(f"{name} from source_start", move.source_start, move.length, move.source.capacity)
        _check_range(f"target of moves[{index}] from target_start", move.target_start, move.length, target.capacity)
    _check_disjoint(moves, target)


def tensor_of(kv: PagedKv | ContiguousKv) -> torch.Tensor:
    """The memory behind `kv`."""
    return kv.pool if isinstance(kv, PagedKv) else kv.tensor


def _sizes(kv: PagedKv | ContiguousKv) -> tuple[int, int, int]:
    if isinstance(kv, PagedKv):
        return kv.geometry.num_layers, kv.geometry.kv_heads, kv.geometry.head_dim
    layers, _, kv_heads, _, head_dim = kv.tensor.shape
    return layers, kv_heads, head_dim


def _check_kv(kv: PagedKv | ContiguousKv, name: str) -> None:
    if isinstance(kv, ContiguousKv):
        if kv.tensor.ndim != 5 or kv.tensor.shape[1] != 2:
            raise ValueError(
                f"{name}.tensor has shape {list(kv.tensor.shape)}; [layers, 2, kv_heads, tokens, head_dim] is needed"
            )
        if kv.tensor.dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"{name}.tensor is {kv.tensor.dtype}; supported are float32, bfloat16 and float16")
        return
    check_pool(kv.pool, kv.geometry, f"{name}.pool")
    check_block_ids(kv.block_ids, kv.pool.shape[0], f"{name}.block_ids")


def check_block_ids(block_ids: torch.Tensor, num_blocks: int, name: str) -> None:
    """Raises ValueError unless `block_ids` is a vector of int64 in 0..num_blocks-1."""
    if block_ids.dtype != torch.int64 or block_ids.ndim != 1:
        raise ValueError(f"{name} is {block_ids.dtype} of shape {list(block_ids.shape)}; an int64 vector is needed")
    if block_ids.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in block_ids.aminmax())
    if lowest < 0 or highest >= num_blocks:
        raise ValueError(f"{name} spans {lowest}..{highest}, outside 0..{num_blocks - 1}, the blocks of the pool")


def _check_range(what: str, start: int, length: int, capacity: int) -> None:
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
    for index, move in enumerate(moves):
        if move.length and _overlaps(move, target, ranges):
            raise ValueError(f"moves[{index}].source is written by the same call; source and target must not overlap")


def _overlaps(move: Move, target: PagedKv | ContiguousKv, written: Sequence[tuple[int, int]]) -> bool:
    source_memory, target_memory = tensor_of(move.source), tensor_of(target)
    if source_memory.untyped_storage().data_ptr() != target_memory.untyped_storage().data_ptr():
        return False
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
