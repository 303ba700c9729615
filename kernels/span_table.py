"""A plan's spans for Triton kernels: one table of int64 words, uploaded in one copy, and the functions that read it.

The table holds all that changes with a plan, so no plan compiles a kernel again. Layout, in words:

- two target records, then one span record a span, `RECORD_WORDS` each;
- `tiles`: two words each, the span's index and the first token of the tile within the span;
- `factors`: cos and sin of each distinct shift, float32 [shifts, 2, rotary_dim / 2], or [kinds, ...] if layers differ;
- if layers differ, the row of factors of each shift and layer, [shifts, layers], -1 for a layer without RoPE;
- addresses, of each layer K and V (kv_factor 1: the latent row), and block ids.

A record says where a position's row lies: the word of its first address; strides of block, head and token; tokens of a
block; the word of its first block id. A contiguous tensor is one block. A span record continues with the source's first
position, the target's, the length, the row of factors (or the word of its layers' rows; -1: K is copied) and the first
output column.

Addresses and strides count units of `unit_bytes`; addresses count from the tensor that the kernel gets as an argument.
So Triton sees an aligned pointer plus a multiple of a constant and moves 16 bytes at a time."""

# Triton decorates untyped functions, and names compile-time constants in capitals.
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.layout import ContiguousKv, Kv, LayeredPool, Move
from kernels.rope import LayerRotations

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kernels.rope import RopeRotation, Rotation

RECORD_WORDS = 16
SPANS_AT = 2 * RECORD_WORDS
_RECORD_WORDS, _SPANS_AT = tl.constexpr(RECORD_WORDS), tl.constexpr(SPANS_AT)
_VECTOR_BYTES = 16
_TILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Memory:
    """Rows addressed by layer, kind, head and position; all in bytes.

    `address`: of layer 0's K; `strides`: of block, layer, kind, head and token. `planes`, int64 [layers, kv_factor]:
    where each layer's kinds begin, if layers lie apart."""

    address: int
    strides: tuple[int, int, int, int, int]
    block_size: int
    block_ids: npt.NDArray[np.int64]
    planes: npt.NDArray[np.int64] | None = None

    def is_aligned(self) -> bool:
        """Return whether every row begins at a multiple of 16 bytes."""
        aligned = math.gcd(self.address, *self.strides) % _VECTOR_BYTES == 0
        return aligned and (self.planes is None or not (self.planes % _VECTOR_BYTES).any())


@dataclass(frozen=True, slots=True)
class SpanTable:
    """The table on the device. `unit_bytes`: what its addresses and strides count, 16, or an element's bytes."""

    words: torch.Tensor
    tiles_at: int
    factors_at: int
    num_tiles: int
    unit_bytes: int


def memory_of(kv: Kv) -> Memory:
    """Return the rows of `kv`; its channels must be next to one another, and its layers `lie_alike`."""
    tensor = kv.memory
    if isinstance(kv, ContiguousKv):
        return memory_at(tensor, (0, *tensor.stride()[:4]), max(1, kv.capacity), np.zeros(1, np.int64))
    size, block_ids = kv.geometry.block_size, kv.block_ids.cpu().numpy()
    if isinstance(kv.pool, LayeredPool):
        planes = np.array([[each.data_ptr() for each in kind] for kind in kv.pool.kinds], np.int64).T
        block, head, token, _ = tensor.stride()
        return memory_at(tensor, (block, 0, 0, head, token), size, block_ids, planes)
    head_dim = kv.geometry.head_dim
    return memory_at(tensor, (*tensor.stride()[:3], size * head_dim, head_dim), size, block_ids)


def memory_at(
    tensor: torch.Tensor,
    strides: tuple[int, ...],
    block_size: int,
    block_ids: npt.NDArray[np.int64],
    planes: npt.NDArray[np.int64] | None = None,
) -> Memory:
    """Return `Memory` from `tensor` on; `strides` are in elements."""
    block, layer, kind, head, token = (stride * tensor.element_size() for stride in strides)
    return Memory(tensor.data_ptr(), (block, layer, kind, head, token), block_size, block_ids, planes)


def span_table(
    moves: Sequence[Move],
    base: torch.Tensor,
    targets: tuple[Memory, Memory],
    rotation: Rotation,
    tokens: int,
    target_layers: int = 0,
) -> SpanTable:
    """Lay out and upload the table of the moves that have a length; all of them were checked.

    Addresses count from `base`. `targets`: two records that the kernel chooses between; they have `target_layers`, if
    those are more than the sources'. `tokens`: those of a tile. On CUDA the upload is queued on the current stream of
    `base`'s device and the host does not wait for it."""
    sources = {key: memory_of(source) for key, source in {id(move.source): move.source for move in moves}.items()}
    memories = list({id(memory): memory for memory in (*targets, *sources.values())}.values())
    layers, kinds = max(move.source.sizes[:2] for move in moves)
    layers = max(layers, target_layers)
    tiles = np.array([-(-move.length // tokens) for move in moves], np.int64)
    shifts = sorted({move.shift for move in moves} - {0})
    turning, rows = _factor_rows(len(shifts), rotation)

    tiles_at = SPANS_AT + RECORD_WORDS * len(moves)
    num_tiles = int(tiles.sum())
    factors_at = tiles_at + 2 * num_tiles
    rows_at = factors_at + 2 * math.ceil(len(shifts) * len(turning) * rotation.kinds[0].rotary_dim / 4)
    addresses_at = rows_at + rows.size
    end = addresses_at + sum(layers * kinds + len(memory.block_ids) for memory in memories)

    host = torch.empty(end, dtype=torch.int64, pin_memory=base.is_cuda)
    words = host.numpy()
    aligned = base.data_ptr() % _VECTOR_BYTES == 0 and all(memory.is_aligned() for memory in memories)
    unit_bytes = _VECTOR_BYTES if aligned else base.element_size()
    records = _write_memories(words, addresses_at, memories, (layers, kinds), base.data_ptr(), unit_bytes)
    for index, target in enumerate(targets):
        words[index * RECORD_WORDS : index * RECORD_WORDS + 6] = records[id(target)]
    known = shifts if turning else []
    factor_of = {shift: rows_at + at * rows.shape[1] if rows.size else at for at, shift in enumerate(known)}
    spans, lengths = words[SPANS_AT:tiles_at].reshape(-1, RECORD_WORDS), np.array([move.length for move in moves])
    spans[:, :8] = [(*records[id(sources[id(move.source)])], move.source_start, move.target_start) for move in moves]
    factors = [factor_of.get(move.shift, -1) for move in moves]
    spans[:, 8:11] = np.stack((lengths, factors, np.cumsum(lengths) - lengths), axis=1)
    # Of each tile its span, and its first token there.
    pairs = words[tiles_at:factors_at].reshape(-1, 2)
    pairs[:, 0] = np.repeat(np.arange(len(tiles)), tiles)
    pairs[:, 1] = (np.arange(num_tiles) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
    words[rows_at:addresses_at] = rows.reshape(-1)
    if known:
        # In float64: a shift times a frequency loses its fraction in float32.
        frequencies = np.array([each.inverse_frequencies for each in turning], np.float64)
        angles = np.array(known, np.float64)[:, None] * frequencies[:, None]
        turns = np.stack((np.cos(angles), np.sin(angles)), axis=2).astype(np.float32)
        words[factors_at:rows_at].view(np.float32)[: turns.size] = turns.reshape(-1)
    return SpanTable(host.to(base.device, non_blocking=True), tiles_at, factors_at, num_tiles, unit_bytes)


def _write_memories(
    words: npt.NDArray[np.int64],
    addresses_at: int,
    memories: Sequence[Memory],
    size: tuple[int, int],
    origin: int,
    unit_bytes: int,
) -> dict[int, tuple[int, ...]]:
    """Write addresses of `size` layers and kinds from `origin` on, and block ids; return records' beginnings by id."""
    (layers, kinds), num_addresses = size, size[0] * size[1]
    first, layer, kind = np.array([(each.address, *each.strides[1:3]) for each in memories]).T[:, :, None, None]
    # Where each layer's kinds begin, in bytes: int64 [memories, layers, kinds]. Missing layers are not read.
    addresses = first + layer * np.arange(layers)[:, None] + kind * np.arange(kinds) - origin
    for index, memory in enumerate(memories):
        if memory.planes is not None:
            addresses[index, : len(memory.planes)] = memory.planes - origin
    ids_at = addresses_at + addresses.size
    words[addresses_at:ids_at] = (addresses // unit_bytes).reshape(-1)
    records: dict[int, tuple[int, ...]] = {}
    for memory in memories:
        block, _, _, head, token = (stride // unit_bytes for stride in memory.strides)
        records[id(memory)] = (addresses_at, block, head, token, memory.block_size, ids_at)
        end = ids_at + len(memory.block_ids)
        words[ids_at:end] = memory.block_ids
        addresses_at, ids_at = addresses_at + num_addresses, end
    return records


def _factor_rows(shifts: int, rotation: Rotation) -> tuple[list[RopeRotation], npt.NDArray[np.int64]]:
    """Return the turning rotations, and int64 [shifts, layers] of their rows; empty if all layers have one rotation."""
    turning = [kind for kind in rotation.kinds if not kind.is_still]
    if not isinstance(rotation, LayerRotations):
        return turning, np.empty((0, 0), np.int64)
    first = [-1 if kind.is_still else turning.index(kind) * shifts for kind in rotation.kinds]
    layers = np.array(first, np.int64)[np.array(rotation.kind_of_layer, np.int64)]
    return turning, np.where(layers < 0, -1, layers + np.arange(shifts)[:, None])


def tile_tokens(head_dim: int, dtype: torch.dtype) -> int:
    """Return the tokens of a program's tile, a power of two."""
    return int(min(128, max(1, _TILE_BYTES // (triton.next_power_of_2(head_dim) * dtype.itemsize))))


def constants(table: SpanTable, dtype: torch.dtype, head_dim: int, rotation: Rotation) -> dict[str, Any]:
    """Return the compile-time arguments that the kernels share: they follow from the model, not from a plan."""
    planes = rotation.kinds[0]
    before, half, after = planes.first_channel, planes.rotary_dim // 2, head_dim - planes.end_channel
    return {
        "UNIT": table.unit_bytes // dtype.itemsize,
        "HEAD_DIM": head_dim,
        "FIRST": before,
        "HALF": half,
        "INTERLEAVED": planes.interleaved,
        "PAD_HEAD": triton.next_power_of_2(head_dim),
        "PAD_BEFORE": triton.next_power_of_2(before) if before else 0,
        "PAD_HALF": triton.next_power_of_2(half),
        "PAD_AFTER": triton.next_power_of_2(after) if after else 0,
    }


def keep_until_read(sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Keep pinned sources from being handed out again before a kernel that was just launched has read them.

    torch's allocator of pinned memory knows only of copies, so this copies one element of each after the kernel."""
    if not target.is_cuda:
        return
    for source in {id(source): source for source in sources if not source.is_cuda}.values():
        source.as_strided((1,), (1,)).to(target.device, non_blocking=True)


@triton.jit
def span_of_tile(table, tiles_at, tile):
    """Return the span record of a tile, and the tile's first token within the span."""
    pair = table + tiles_at + 2 * tile
    return table + _SPANS_AT + _RECORD_WORDS * tl.load(pair), tl.load(pair + 1)


@triton.jit
def rows_at(table, record, positions, live, UNIT: tl.constexpr):
    """Return the offsets in elements of the rows at `positions`, int64 [TOKENS]."""
    block_size = tl.load(record + 4).to(tl.int32)
    places = positions.to(tl.int32)
    blocks = tl.load(table + tl.load(record + 5) + places // block_size, mask=live, other=0)
    units = blocks * tl.load(record + 1) + (places % block_size) * tl.load(record + 3)
    return units * UNIT


@triton.jit
def plane_at(base, table, record, index, head, UNIT: tl.constexpr):
    """Return the pointer to channel 0 of a head of address `index`, layer * kinds + kind; `rows_at` counts from it."""
    address = tl.load(table + tl.load(record) + index)
    return base + (address + head * tl.load(record + 2)) * UNIT


@triton.jit
def factors_of(table, factors_at, factor, HALF: tl.constexpr, PAD_HALF: tl.constexpr):
    """Return cos and sin, each [1, PAD_HALF], of the factors' row `factor`."""
    factors = (table + factors_at).to(tl.pointer_type(tl.float32))
    planes = tl.arange(0, PAD_HALF)
    mask = planes < HALF
    row = factors + 2 * factor * HALF + planes
    cos = tl.load(row, mask=mask, other=0.0)
    sin = tl.load(row + HALF, mask=mask, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def load_part(base, rows, live, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Return channels FIRST .. FIRST + COUNT - 1 of the rows, [TOKENS, PADDED], 0 where there is nothing to read."""
    channels = tl.arange(0, PADDED)
    mask = live[:, None] & (channels < COUNT)[None, :]
    return tl.load(base + rows[:, None] + (FIRST + channels)[None, :], mask=mask, other=0.0)


@triton.jit
def store_part(base, rows, live, values, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Write what `load_part` reads."""
    channels = tl.arange(0, PADDED)
    mask = live[:, None] & (channels < COUNT)[None, :]
    tl.store(base + rows[:, None] + (FIRST + channels)[None, :], values, mask=mask)


@triton.jit
def as_element(values, ELEMENT: tl.constexpr):
    """Return values in the type they are stored in; float8_e4m3fn, which has no infinity, saturates."""
    if tl.float8e4nv == ELEMENT:
        values = tl.clamp(values.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return values.to(ELEMENT)


@triton.jit
def load_planes(
    base, rows, live, FIRST: tl.constexpr, HALF: tl.constexpr, PAD_HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Return the first and the second channel of each plane, float32 [TOKENS, PAD_HALF] each."""
    if INTERLEAVED:
        both = load_part(base, rows, live, FIRST, 2 * HALF, 2 * PAD_HALF).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (both.shape[0], PAD_HALF, 2)))
    else:
        first = load_part(base, rows, live, FIRST, HALF, PAD_HALF).to(tl.float32)
        second = load_part(base, rows, live, FIRST + HALF, HALF, PAD_HALF).to(tl.float32)
    return first, second
