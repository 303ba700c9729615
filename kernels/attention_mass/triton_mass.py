"""Attention of few rows by token, in Triton: a program reads a tile of K once, and adds what all rows give to it.

A program owns a tile of tokens and one KV head, and walks over the sequence's rows and the query heads of that KV head.
Nothing is added atomically, so equal inputs give equal bits. Tokens are the rows of the matrix product: so a sum over
queries is one over registers. A tile that all rows see whole is compared with no position."""

# Triton decorates untyped functions, and names compile-time constants in capitals.
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.device import launch
from kernels.layout import once, to_device
from kernels.sparse_prefill.tiles import TileConfig, batch_index
from kernels.sparse_prefill.triton_attention import LOG2_E, LOG2_E_IN_KERNELS, math_of, memory_of

if TYPE_CHECKING:
    from kernels.layout import SequenceRows
    from kernels.sparse_prefill import Queries

# Rows of one query head and tokens of a tile, for heads of up to 128 channels and for wider ones.
TILE, WIDE = TileConfig(64, 128, 4, 2, 3, 168), TileConfig(64, 64, 4, 2)
EXACT = TileConfig(16, 16, 4, 2)


def attention_mass(asked: Queries, lse: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Serve `kernels.attention_mass.attention_mass`; the arguments were checked."""
    q, kv, _, scale, window, *_ = asked
    sequences, geometry = tuple(asked.sequences), kv.geometry
    memory, layer, (block, apart, _), constants = memory_of(kv)
    tile = EXACT if q.dtype == torch.float32 else TILE if geometry.head_dim <= 128 else WIDE
    q = q if q.stride(2) == 1 else q.contiguous()
    tokens = max(sequence.last_position for sequence in sequences) + 1
    launch(
        mass_kernel, (triton.cdiv(tokens, tile.block_n), geometry.kv_heads, len(sequences)), q, q, memory, lse, into,
        once(sequences, ("mass",), lambda: _records(sequences)), *batch_index(sequences), layer, into.stride(0),
        window or 0, scale * LOG2_E,
        *q.stride()[:2], block, apart, **constants, KV_HEADS=geometry.kv_heads, GROUP=q.shape[1] // geometry.kv_heads,
        HEAD_DIM=geometry.head_dim, BLOCK_D=max(16, triton.next_power_of_2(geometry.head_dim)),
        BLOCK_SIZE=geometry.block_size, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, WINDOWED=window is not None,
        **math_of(q), num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.max_registers,
    )  # fmt: skip
    return into


def _records(sequences: tuple[SequenceRows, ...]) -> torch.Tensor:
    """Return first row, rows, first block, first column, first and last position of each, int32 [sequences, 6]."""
    found, first_block, column = [], 0, 0
    for each in sequences:
        found.append([each.first_row, each.count, first_block, column, each.first_position, each.last_position])
        first_block += len(each.block_ids)
        column += each.last_position + 1
    return to_device(torch.tensor(found, dtype=torch.int32), sequences[0].positions.device)


@triton.jit
def _add_rows(
    mass, k, tokens, q_ptr, lse_ptr, positions_ptr, count, window, scale, q_row_stride, q_head_stride,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, MATH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `mass`, [block_n], and what the rows of a KV head's query heads give to `k`, [block_n, block_d]."""
    own = tl.arange(0, BLOCK_M)
    channels = tl.arange(0, BLOCK_D)
    offsets = (own * q_row_stride)[:, None] + channels[None, :]
    for start in range(0, count, BLOCK_M):
        live = own < count - start
        if MASKED:
            positions = tl.load(positions_ptr + start + own, mask=live, other=-1).to(tl.int32)
        for head in range(GROUP):
            # Rows beyond the last one weigh nothing.
            lse = tl.load(lse_ptr + start * HEADS + head + own * HEADS, mask=live, other=float("inf"))
            queries = q_ptr + tl.cast(start, tl.int64) * q_row_stride + head * q_head_stride
            q = tl.load(queries + offsets, mask=live[:, None] & (channels[None, :] < HEAD_DIM), other=0.0).to(MATH)
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :] * LOG2_E_IN_KERNELS
            if MASKED:
                seen = tokens[:, None] <= positions[None, :]
                if WINDOWED:
                    seen = seen & (tokens[:, None] > positions[None, :] - window)
                # What a row does not see may be NaN.
                scores = tl.where(seen, scores, float("-inf"))
            mass += tl.sum(tl.math.exp2(scores), 1)
    return mass


@triton.jit(
    do_not_specialize=["lse_ptr", "records_ptr", "positions_ptr", "block_ids_ptr", "layer", "into_stride", "window"]
)
def mass_kernel(
    q_ptr, pool_ptr, lse_ptr, into_ptr, records_ptr, positions_ptr, block_ids_ptr, layer, into_stride, window, scale,
    q_row_stride, q_head_stride, pool_block_stride, pool_layer_stride,
    HEAD_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, MATH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the attention of all rows of a sequence to one tile of its tokens, for one KV head."""
    begin = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    record = records_ptr + tl.program_id(2) * 6
    first_row = tl.load(record).to(tl.int64)
    count = tl.load(record + 1)
    lowest = tl.load(record + 4)
    highest = tl.load(record + 5)
    # Before `first_seen` no row sees a token, and from `open_begin` to the first row's position all do.
    first_seen = 0
    open_begin = 0
    if WINDOWED:
        first_seen = lowest - window + 1
        open_begin = highest - window + 1
    if (begin > highest) | (begin + BLOCK_N <= first_seen):
        return
    tokens = begin + tl.arange(0, BLOCK_N)
    channels = tl.arange(0, BLOCK_D)
    table = block_ids_ptr + tl.load(record + 2)
    ids = tl.load(table + tl.minimum(tokens, highest) // BLOCK_SIZE)
    keys = pool_ptr + tl.cast(layer, tl.int64) * pool_layer_stride + kv_head * HEAD_STRIDE
    offsets = ids * pool_block_stride + tokens % BLOCK_SIZE * SLOT_STRIDE
    k = tl.load(keys + offsets[:, None] + channels[None, :], mask=channels[None, :] < HEAD_DIM, other=0.0).to(MATH)
    places = into_ptr + tl.cast(kv_head, tl.int64) * into_stride + tl.load(record + 3) + tokens
    mass = tl.load(places, mask=tokens <= highest, other=0.0)
    queries = q_ptr + first_row * q_row_stride + kv_head * GROUP * q_head_stride
    sums = lse_ptr + first_row * (KV_HEADS * GROUP) + kv_head * GROUP
    if (begin >= open_begin) & (begin + BLOCK_N <= lowest + 1):
        mass = _add_rows(
            mass, k, tokens, queries, sums, positions_ptr + first_row, count, window, scale, q_row_stride,
            q_head_stride, False, WINDOWED, KV_HEADS * GROUP, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, MATH, PRECISION,
        )  # fmt: skip
    else:
        mass = _add_rows(
            mass, k, tokens, queries, sums, positions_ptr + first_row, count, window, scale, q_row_stride,
            q_head_stride, True, WINDOWED, KV_HEADS * GROUP, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, MATH, PRECISION,
        )  # fmt: skip
    tl.store(places, mass, mask=tokens <= highest)
