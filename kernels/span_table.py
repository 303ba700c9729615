"""What the Triton kernels read about a plan's spans: one table of int64 words, uploaded in one copy.

A kernel takes nothing else that changes with a plan, so no plan compiles it again. Layout, in words:

- two target records and then one span record a span, `RECORD_WORDS` each;
- `tiles`: two words each, the span's index and the first token of the tile within the span;
- `factors`: cos and sin of each distinct shift, float32 [shifts, 2, rotary_dim / 2];
- block ids.

A record says where a position's row lies: address; strides of block, layer, kind (K or V), head and token; tokens of a
block; the word of its first block id. A contiguous tensor is one block. In a span record follow the source's first
position, the target's, the length, the row of factors (-1: K is copied) and the first output column.

Address and strides are counted in units of `unit_bytes`, the address from the tensor that the kernel gets as an
argument: Triton sees that an aligned pointer plus a product with a constant is aligned, and moves 16 bytes at a time;
it sees nothing of the kind in a value that it loads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.layout import ContiguousKv, PagedKv

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kernels.kv_move.move import Move
    from kernels.rope import RopeRotation

RECORD_WORDS = 16
SPANS_AT = 2 * RECORD_WORDS
_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class Memory:
    """One tensor whose rows are addressed by layer, kind, head and position; strides in elements."""

    tensor: torch.Tensor
    strides: tuple[int, int, int, int, int]
    block_size: int
    block_ids: npt.NDArray[np.int64]

    def places(self, base: torch.Tensor) -> tuple[int, ...]:
        """Address, counted from `base`, and strides, in bytes."""
        size = self.tensor.element_size()
        return self.tensor.data_ptr() - base.data_ptr(), *(stride * size for stride in self.strides)


@dataclass(frozen=True, slots=True)
class SpanTable:
    """The table on the device. `unit_bytes`: what its addresses and strides count, 16, or an element's bytes."""

    words: torch.Tensor
    tiles_at: int
    factors_at: int
    num_tiles: int
    unit_bytes: int


def memory_of(kv: PagedKv | ContiguousKv) -> Memory:
    """The rows of `kv`; its channels must be next to one another."""
    if isinstance(kv, ContiguousKv):
        layer, kind, head, token, _ = kv.tensor.stride()
        return Memory(kv.tensor, (0, layer, kind, head, token), max(1, kv.capacity), np.zeros(1, np.int64))
    geometry = kv.geometry
    assert isinstance(kv.pool, torch.Tensor)
    block, layer, kind, _ = kv.pool.stride()
    strides = (block, layer, kind, geometry.block_size * geometry.head_dim, geometry.head_dim)
    return Memory(kv.pool, strides, geometry.block_size, kv.block_ids.cpu().numpy())


def span_table(
    moves: Sequence[Move],
    base: torch.Tensor,
    targets: tuple[Memory, Memory],
    target_position: int,
    rotation: RopeRotation,
    tile_tokens: int,
) -> SpanTable:
    """Lays out and uploads the table of the moves that have a length; all of them were checked.

    `base`: the tensor from which addresses count. `targets`: two records that the kernel chooses between; their first
    row stands at position `target_position`. On CUDA the upload is queued on the current stream of `base`'s device and
    the host does not wait for it.
    """
    sources = {id(move.source): memory_of(move.source) for move in moves}
    memories = {id(memory): memory for memory in (*targets, *sources.values())}
    lengths = np.array([move.length for move in moves], np.int64)
    tiles = -(-lengths // tile_tokens)
    shifts = sorted({move.shift for move in moves} - {0})
    planes = len(rotation.inverse_frequencies)

    tiles_at = SPANS_AT + RECORD_WORDS * len(moves)
    num_tiles = int(tiles.sum())
    factors_at = tiles_at + 2 * num_tiles
    at = factors_at + 2 * math.ceil(len(shifts) * planes / 2)
    ids_at: dict[int, int] = {}
    for key, memory in memories.items():
        ids_at[key] = at
        at += len(memory.block_ids)

    places = {key: memory.places(base) for key, memory in memories.items()}
    aligned = not any(place % _VECTOR_BYTES for each in places.values() for place in (base.data_ptr(), *each))
    unit_bytes = _VECTOR_BYTES if aligned else base.element_size()
    host = torch.empty(at, dtype=torch.int64, pin_memory=base.is_cuda)
    words = host.numpy()
    records = {
        key: (*(place // unit_bytes for place in places[key]), memory.block_size, ids_at[key])
        for key, memory in memories.items()
    }
    for index, target in enumerate(targets):
        words[index * RECORD_WORDS : index * RECORD_WORDS + 8] = records[id(target)]
    columns = np.cumsum(lengths) - lengths
    for index, move in enumerate(moves):
        factor = shifts.index(move.shift) if move.shift else -1
        span = (move.source_start, move.target_start - target_position, move.length, factor, columns[index])
        record = SPANS_AT + RECORD_WORDS * index
        words[record : record + 13] = (*records[id(sources[id(move.source)])], *span)
    _write_tiles(words[tiles_at:factors_at], tiles, tile_tokens)
    if shifts:
        _write_factors(words[factors_at:], shifts, rotation)
    for key, memory in memories.items():
        words[ids_at[key] : ids_at[key] + len(memory.block_ids)] = memory.block_ids
    return SpanTable(host.to(base.device, non_blocking=True), tiles_at, factors_at, num_tiles, unit_bytes)


def _write_tiles(words: npt.NDArray[np.int64], tiles: npt.NDArray[np.int64], tile_tokens: int) -> None:
    pairs = words.reshape(-1, 2)
    pairs[:, 0] = np.repeat(np.arange(len(tiles)), tiles)
    pairs[:, 1] = (np.arange(len(pairs)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_tokens


def _write_factors(words: npt.NDArray[np.int64], shifts: Sequence[int], rotation: RopeRotation) -> None:
    """Angles are taken in float64: a shift times a frequency loses its fraction in float32."""
    angles = np.outer(np.array(shifts, np.float64), np.array(rotation.inverse_frequencies, np.float64))
    factors = np.stack((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)
    words.view(np.float32)[: factors.size] = factors.reshape(-1)
