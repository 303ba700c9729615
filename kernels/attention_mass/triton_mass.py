"""Attention of few rows by token, in Triton: K is read once for the log-sum-exp of the rows and once for the sums.

A tile of the first kernel is a piece of one sequence's tokens and a tile of its rows; partial results are joined by
their log-sum-exp (Dao et al. 2023, flash-decoding). A program of the second one owns a tile of tokens and one KV head,
and walks over all rows of the sequence: nothing is added atomically, so equal inputs give equal bits."""

# Triton decorates untyped functions, and names compile-time constants in capitals.
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.device import launch
from kernels.layout import to_device
from kernels.sparse_prefill.tiles import batch_index
from kernels.sparse_prefill.triton_attention import LOG2_E, LOG2_E_IN_KERNELS, memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import PoolLayer, SequenceRows

# Tokens of K that one program of the first kernel reads.
PIECE = 1024
# Rows times heads and tokens of a tile, warps and stages: the fastest of 30 on an H100 with 64 rows over 24k tokens.
_LSE, _MASS, _EXACT = (128, 64, 8, 2), (64, 128, 4, 3), (16, 16, 4, 2)


def row_lse(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Serve `kernels.attention_mass.row_lse`; the arguments were checked."""
    sequences = tuple(sequences)
    rows, heads, _ = q.shape
    group, tile = heads // kv.geometry.kv_heads, _EXACT if q.dtype == torch.float32 else _LSE
    items = _items(sequences, ("lse", group, tile), lambda: _lse_items(sequences, group, tile[0]))
    pieces = -(-max(each.last_position + 1 for each in sequences) // PIECE)
    partial = torch.full((pieces, rows, heads), -torch.inf, device=q.device)
    q = q if q.stride(2) == 1 else q.contiguous()
    grid = len(items), kv.geometry.kv_heads
    _launch(lse_kernel, grid, q, kv, sequences, items, [partial], scale, window, tile)
    lse = torch.logsumexp(partial, 0)
    return lse if sinks is None else torch.logaddexp(lse, sinks.float())


def attention_mass(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None,
    lse: torch.Tensor,
    into: torch.Tensor,
) -> torch.Tensor:
    """Serve `kernels.attention_mass.attention_mass`; the arguments were checked."""
    sequences = tuple(sequences)
    tile = _EXACT if q.dtype == torch.float32 else _MASS
    items = _items(sequences, ("mass", tile), lambda: _mass_items(sequences, tile[1]))
    q = q if q.stride(2) == 1 else q.contiguous()
    grid = len(items), kv.geometry.kv_heads
    _launch(mass_kernel, grid, q, kv, sequences, items, [lse.contiguous(), into], scale, window, tile)
    return into


def _items(sequences: tuple[SequenceRows, ...], key: tuple[object, ...], cut: Any) -> torch.Tensor:
    """Return the programs' records, cut once for all layers."""
    first, name = sequences[0], ("attention_mass", sequences[1:], *key)
    if name not in first.memo:
        first.memo[name] = to_device(torch.from_numpy(cut()), first.positions.device)
    items: torch.Tensor = first.memo[name]
    return items


def _lse_items(sequences: tuple[SequenceRows, ...], group: int, block_m: int) -> np.ndarray:
    """Cut rows and tokens; a record: first row, first and end packed row, first block, first and end token,
    and the piece of tokens, int32 [programs, 7]."""
    found, first_block = [], 0
    for each in sequences:
        for begin in range(0, each.count * group, block_m):
            end = min(begin + block_m, each.count * group)
            reach = int(each.host_positions[(end - 1) // group]) + 1
            for piece, start in enumerate(range(0, reach, PIECE)):
                found.append((each.first_row, begin, end, first_block, start, min(start + PIECE, reach), piece))
        first_block += len(each.block_ids)
    return np.array(found, dtype=np.int32)


def _mass_items(sequences: tuple[SequenceRows, ...], block_n: int) -> np.ndarray:
    """Cut the tokens; a record: first row, rows, first block, first and end token, first column of the sequence, int32
    [programs, 6]."""
    found, first_block, column = [], 0, 0
    for each in sequences:
        tokens = each.last_position + 1
        for start in range(0, tokens, block_n):
            found.append((each.first_row, each.count, first_block, start, min(start + block_n, tokens), column))
        first_block += len(each.block_ids)
        column += tokens
    return np.array(found, dtype=np.int32)


def _launch(
    kernel: Any,
    grid: tuple[int, int],
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: tuple[SequenceRows, ...],
    items: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    scale: float,
    window: int | None,
    tile: tuple[int, int, int, int],
) -> None:
    memory, layer, (block, apart, _), constants = memory_of(kv)
    index, geometry = batch_index(sequences), kv.geometry
    # The interpreter cannot multiply bf16.
    exact = q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and q.device.type == "cpu")
    launch(
        kernel,
        grid,
        q,
        q,
        memory,
        *outputs,
        items,
        index.positions,
        index.block_ids,
        layer,
        outputs[-1].stride(0),
        window or 0,
        scale * LOG2_E,
        *q.stride()[:2],
        block,
        apart,
        **constants,
        KV_HEADS=geometry.kv_heads,
        GROUP=q.shape[1] // geometry.kv_heads,
        HEAD_DIM=geometry.head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(geometry.head_dim)),
        BLOCK_SIZE=geometry.block_size,
        BLOCK_M=tile[0],
        BLOCK_N=tile[1],
        WINDOWED=window is not None,
        MATH=tl.float32 if exact else tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16,
        PRECISION="ieee" if exact else None,
        num_warps=tile[2],
        num_stages=tile[3],
    )


@triton.jit
def _queries(
    q_ptr, positions_ptr, first_row, packed, last_packed, kv_head, q_row_stride, q_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Return packed rows' queries, [block_m, block_d], and their positions. Rows beyond the last one repeat it."""
    readable = tl.minimum(packed, last_packed)
    rows = (first_row + readable // GROUP).to(tl.int64)
    heads = kv_head * GROUP + readable % GROUP
    channels = tl.arange(0, BLOCK_D)
    pointers = q_ptr + (rows * q_row_stride + heads * q_head_stride)[:, None] + channels[None, :]
    q = tl.load(pointers, mask=channels[None, :] < HEAD_DIM, other=0.0)
    return q.to(MATH), tl.load(positions_ptr + rows).to(tl.int32)


@triton.jit
def _keys(
    keys, table, tokens, end, block_stride,
    SLOT_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """Return K of a tile of tokens below `end`, [block_d, block_n]."""
    held = tokens < end
    channels = tl.arange(0, BLOCK_D)
    ids = tl.load(table + tokens // BLOCK_SIZE, mask=held, other=0)
    offsets = ids * block_stride + tokens % BLOCK_SIZE * SLOT_STRIDE
    mask = held[None, :] & (channels[:, None] < HEAD_DIM)
    return tl.load(keys + offsets[None, :] + channels[:, None], mask=mask, other=0.0).to(MATH)


@triton.jit
def _seen(scores, tokens, row_positions, end, window, WINDOWED: tl.constexpr):
    """Return the scores, [block_m, block_n], -inf for what a row does not see: that may be NaN."""
    seen = (tokens < end)[None, :] & (tokens[None, :] <= row_positions[:, None])
    if WINDOWED:
        seen = seen & (tokens[None, :] > row_positions[:, None] - window)
    return tl.where(seen, scores, float("-inf"))


@triton.jit(do_not_specialize=["items_ptr", "positions_ptr", "block_ids_ptr", "layer", "into_stride", "window"])
def lse_kernel(
    q_ptr, pool_ptr, into_ptr, items_ptr, positions_ptr, block_ids_ptr, layer, into_stride, window, scale,
    q_row_stride, q_head_stride, pool_block_stride, pool_layer_stride,
    HEAD_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, MATH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the logarithm of a tile of rows' sums over one piece of tokens, for one KV head."""
    record = items_ptr + tl.program_id(0) * 7
    kv_head = tl.program_id(1)
    first_row = tl.load(record)
    packed = tl.load(record + 1) + tl.arange(0, BLOCK_M)
    packed_end = tl.load(record + 2)
    table = block_ids_ptr + tl.load(record + 3)
    begin = tl.load(record + 4)
    end = tl.load(record + 5)
    piece = tl.load(record + 6).to(tl.int64)
    keys = pool_ptr + tl.cast(layer, tl.int64) * pool_layer_stride + kv_head * HEAD_STRIDE
    q, row_positions = _queries(
        q_ptr, positions_ptr, first_row, packed, packed_end - 1, kv_head, q_row_stride, q_head_stride, GROUP, HEAD_DIM,
        BLOCK_D, MATH,
    )  # fmt: skip
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        k = _keys(keys, table, tokens, end, pool_block_stride, SLOT_STRIDE, HEAD_DIM, BLOCK_D, BLOCK_SIZE, MATH)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        scores = _seen(scores, tokens, row_positions, end, window, WINDOWED)
        highest = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen no token yet has no finite maximum.
        subtracted = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.math.exp2(maximum - subtracted) + tl.sum(tl.math.exp2(scores - subtracted[:, None]), 1)
        maximum = highest
    lse = (maximum + tl.math.log2(tl.where(total == 0.0, 1.0, total))) / LOG2_E_IN_KERNELS
    lanes = (first_row + packed // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + packed % GROUP
    tl.store(into_ptr + piece * into_stride + lanes, lse, mask=packed < packed_end)


@triton.jit(do_not_specialize=["items_ptr", "positions_ptr", "block_ids_ptr", "layer", "into_stride", "window"])
def mass_kernel(
    q_ptr, pool_ptr, given_ptr, into_ptr, items_ptr, positions_ptr, block_ids_ptr, layer, into_stride, window, scale,
    q_row_stride, q_head_stride, pool_block_stride, pool_layer_stride,
    HEAD_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, MATH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the attention of all rows of a sequence to one tile of its tokens, for one KV head."""
    record = items_ptr + tl.program_id(0) * 6
    kv_head = tl.program_id(1)
    first_row = tl.load(record)
    packed_end = tl.load(record + 1) * GROUP
    table = block_ids_ptr + tl.load(record + 2)
    tokens = tl.load(record + 3) + tl.arange(0, BLOCK_N)
    end = tl.load(record + 4)
    column = tl.load(record + 5)
    keys = pool_ptr + tl.cast(layer, tl.int64) * pool_layer_stride + kv_head * HEAD_STRIDE
    k = _keys(keys, table, tokens, end, pool_block_stride, SLOT_STRIDE, HEAD_DIM, BLOCK_D, BLOCK_SIZE, MATH)
    mass = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, packed_end, BLOCK_M):
        packed = first + tl.arange(0, BLOCK_M)
        q, row_positions = _queries(
            q_ptr, positions_ptr, first_row, packed, packed_end - 1, kv_head, q_row_stride, q_head_stride, GROUP,
            HEAD_DIM, BLOCK_D, MATH,
        )  # fmt: skip
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        scores = _seen(scores, tokens, row_positions, end, window, WINDOWED)
        lanes = (first_row + packed // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + packed % GROUP
        lse = tl.load(given_ptr + lanes, mask=packed < packed_end, other=float("inf"))
        mass += tl.sum(tl.math.exp2(scores - lse[:, None] * LOG2_E_IN_KERNELS), 0)
    places = into_ptr + tl.cast(kv_head, tl.int64) * into_stride + column + tokens
    tl.store(places, tl.load(places, mask=tokens < end, other=0.0) + mass, mask=tokens < end)
