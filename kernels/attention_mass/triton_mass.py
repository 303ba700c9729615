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
from kernels.sparse_prefill.triton_attention import LOG2_E, memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import PoolLayer, SequenceRows

# Tokens of K that one program of the first kernel reads.
PIECE = 1024


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
    group, block_m, block_n = heads // kv.geometry.kv_heads, *_tile(q)
    items = _items(sequences, ("lse", group, block_m), lambda: _lse_items(sequences, group, block_m))
    pieces = -(-max(each.last_position + 1 for each in sequences) // PIECE)
    partial = torch.full((pieces, rows, heads), -torch.inf, device=q.device)
    q = q if q.stride(2) == 1 else q.contiguous()
    grid = len(items), kv.geometry.kv_heads
    _launch(lse_kernel, grid, q, kv, sequences, items, [partial], scale, window, block_m, block_n)
    lse = torch.logsumexp(partial / LOG2_E, 0)
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
    block_m, block_n = _tile(q)
    items = _items(sequences, ("mass", block_n), lambda: _mass_items(sequences, block_n))
    q = q if q.stride(2) == 1 else q.contiguous()
    grid = len(items), kv.geometry.kv_heads
    own = (lse * LOG2_E).contiguous()
    _launch(mass_kernel, grid, q, kv, sequences, items, [own, into], scale, window, block_m, block_n)
    return into


def _tile(q: torch.Tensor) -> tuple[int, int]:
    """Return rows times heads, and tokens, of a tile."""
    return (16, 16) if q.dtype == torch.float32 else (64, 64)


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
    block_m: int,
    block_n: int,
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
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        WINDOWED=window is not None,
        MATH=tl.float32 if exact else tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16,
        PRECISION="ieee" if exact else None,
        num_warps=4,
        num_stages=3,
    )


@triton.jit
def _scores(
    q_ptr, keys, positions_ptr, table, first_row, packed, last_packed, kv_head, start, end, window, scale,
    q_row_stride, q_head_stride, block_stride,
    SLOT_STRIDE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, MATH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return scores times log2(e) of packed rows for tokens start..end-1, -inf for what a row does not see.

    Packed rows beyond the last one repeat it."""
    readable = tl.minimum(packed, last_packed)
    rows = (first_row + readable // GROUP).to(tl.int64)
    heads = kv_head * GROUP + readable % GROUP
    channels = tl.arange(0, BLOCK_D)
    real = channels[None, :] < HEAD_DIM
    q = tl.load(
        q_ptr + (rows * q_row_stride + heads * q_head_stride)[:, None] + channels[None, :], mask=real, other=0.0
    )
    tokens = start + tl.arange(0, BLOCK_N)
    held = tokens < end
    ids = tl.load(table + tokens // BLOCK_SIZE, mask=held, other=0)
    offsets = ids * block_stride + tokens % BLOCK_SIZE * SLOT_STRIDE
    # k: [block_n, block_d]
    k = tl.load(keys + offsets[:, None] + channels[None, :], mask=held[:, None] & real, other=0.0)
    scores = tl.dot(q.to(MATH), tl.trans(k.to(MATH)), input_precision=PRECISION) * scale
    row_positions = tl.load(positions_ptr + rows).to(tl.int32)
    seen = held[None, :] & (tokens[None, :] <= row_positions[:, None])
    if WINDOWED:
        seen = seen & (tokens[None, :] > row_positions[:, None] - window)
    # A token that no row sees may hold NaN.
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
    """Write the base-2 logarithm of a tile of rows' sums over one piece of tokens, for one KV head."""
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
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_N):
        scores = _scores(
            q_ptr, keys, positions_ptr, table, first_row, packed, packed_end - 1, kv_head, start, end, window, scale,
            q_row_stride, q_head_stride, pool_block_stride, SLOT_STRIDE, GROUP, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N,
            WINDOWED, MATH, PRECISION,
        )  # fmt: skip
        highest = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen no token yet has no finite maximum.
        subtracted = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.math.exp2(maximum - subtracted) + tl.sum(tl.math.exp2(scores - subtracted[:, None]), 1)
        maximum = highest
    lse = tl.where(total == 0.0, float("-inf"), maximum + tl.math.log2(tl.where(total == 0.0, 1.0, total)))
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
    start = tl.load(record + 3)
    end = tl.load(record + 4)
    column = tl.load(record + 5)
    keys = pool_ptr + tl.cast(layer, tl.int64) * pool_layer_stride + kv_head * HEAD_STRIDE
    mass = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, packed_end, BLOCK_M):
        packed = first + tl.arange(0, BLOCK_M)
        scores = _scores(
            q_ptr, keys, positions_ptr, table, first_row, packed, packed_end - 1, kv_head, start, end, window, scale,
            q_row_stride, q_head_stride, pool_block_stride, SLOT_STRIDE, GROUP, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N,
            WINDOWED, MATH, PRECISION,
        )  # fmt: skip
        lanes = (first_row + packed // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + packed % GROUP
        lse = tl.load(given_ptr + lanes, mask=packed < packed_end, other=float("inf"))
        mass += tl.sum(tl.math.exp2(scores - lse[:, None]), 0)
    tokens = start + tl.arange(0, BLOCK_N)
    places = into_ptr + tl.cast(kv_head, tl.int64) * into_stride + column + tokens
    tl.store(places, tl.load(places, mask=tokens < end, other=0.0) + mass, mask=tokens < end)
