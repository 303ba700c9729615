"""write_rows in Triton: one launch writes K and V of all rows of a batch into their slots."""

# Triton decorates untyped functions, and names compile-time constants in capitals.
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.sparse_prefill.tiles import batch_index, row_tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kernels.layout import KvGeometry
    from kernels.sparse_prefill.rows import SequenceRows

ROWS_PER_TILE = 16


@triton.jit(do_not_specialize=["tiles_ptr", "positions_ptr", "block_ids_ptr", "layer"])
def write_kernel(
    k_ptr,
    v_ptr,
    pool_ptr,
    tiles_ptr,
    positions_ptr,
    block_ids_ptr,
    layer,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    pool_block_stride,
    pool_layer_stride,
    pool_kind_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """K and V of one tile of rows and one KV head."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first_row = tl.load(tiles_ptr + tile * 4)
    begin = tl.load(tiles_ptr + tile * 4 + 1)
    end = tl.load(tiles_ptr + tile * 4 + 2)
    first_block = tl.load(tiles_ptr + tile * 4 + 3)
    own = begin + tl.arange(0, ROWS)
    rows = (first_row + own).to(tl.int64)
    positions = tl.load(positions_ptr + rows, mask=own < end, other=0)
    blocks = tl.load(block_ids_ptr + first_block + positions // BLOCK_SIZE, mask=own < end, other=0)
    channels = tl.arange(0, BLOCK_D)
    mask = (own < end)[:, None] & (channels[None, :] < HEAD_DIM)
    k = tl.load(k_ptr + (rows * k_row_stride + head * k_head_stride)[:, None] + channels[None, :], mask=mask)
    v = tl.load(v_ptr + (rows * v_row_stride + head * v_head_stride)[:, None] + channels[None, :], mask=mask)
    slots = blocks * pool_block_stride + positions % BLOCK_SIZE * HEAD_DIM
    offset = tl.cast(layer, tl.int64) * pool_layer_stride + head * (BLOCK_SIZE * HEAD_DIM)
    pointers = pool_ptr + offset + slots[:, None] + channels[None, :]
    tl.store(pointers, k, mask=mask)
    tl.store(pointers + pool_kind_stride, v, mask=mask)


def write_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    sequences: Sequence[SequenceRows],
    geometry: KvGeometry,
) -> None:
    """As `kernels.sparse_prefill.write_rows`; the arguments were checked."""
    sequences = tuple(sequences)
    tiles, index = row_tiles(sequences, ROWS_PER_TILE), batch_index(sequences)
    k = k if k.stride(2) == 1 else k.contiguous()
    v = v if v.stride(2) == 1 else v.contiguous()
    write_kernel[(tiles.shape[0], geometry.kv_heads)](
        k,
        v,
        pool,
        tiles,
        index.positions,
        index.block_ids,
        layer,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        HEAD_DIM=geometry.head_dim,
        BLOCK_D=triton.next_power_of_2(geometry.head_dim),
        BLOCK_SIZE=geometry.block_size,
        ROWS=ROWS_PER_TILE,
        num_warps=4,
    )
