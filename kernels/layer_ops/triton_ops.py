"""The layer operations in Triton: each reads its rows once and writes them once."""

# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.dispatch import launch
from kernels.span_table import as_element, load_planes, store_part

if TYPE_CHECKING:
    from kernels.layer_ops import HeadNorms
    from kernels.layout import PoolLayer

SILU_BLOCK = 2048
ROWS_PER_TILE = 16


@triton.jit
def _norm_kernel(
    rows_ptr, residual_ptr, weight_ptr, output_ptr, hidden, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    values = tl.load(rows_ptr + row * hidden + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        held = tl.load(residual_ptr + row * hidden + columns, mask=mask, other=0.0)
        values = (held.to(tl.float32) + values.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * hidden + columns, values, mask=mask)
    wide = values.to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    normed = (wide * scale).to(output_ptr.dtype.element_ty).to(tl.float32) * weight
    tl.store(output_ptr + row * hidden + columns, normed.to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _silu_kernel(gate_up_ptr, output_ptr, inner, BLOCK: tl.constexpr):
    """BLOCK channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inner
    gate = tl.load(gate_up_ptr + row * (2 * inner) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * inner) + inner + columns, mask=mask, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(output_ptr.dtype.element_ty).to(tl.float32)
    tl.store(output_ptr + row * inner + columns, (active * up).to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _normed_half(values, scale, query_norm_ptr, key_norm_ptr, is_query, channels, mask, DTYPE: tl.constexpr):
    query_weight = tl.load(query_norm_ptr + channels, mask=mask, other=0.0)
    key_weight = tl.load(key_norm_ptr + channels, mask=mask, other=0.0)
    weight = tl.where(is_query, query_weight, key_weight).to(tl.float32)
    return ((values * scale[:, None]).to(DTYPE).to(tl.float32) * weight[None, :]).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "layer"])
def _rotate_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    pool_ptr,
    query_norm_ptr,
    key_norm_ptr,
    num_rows,
    layer,
    eps,
    pool_block_stride,
    pool_layer_stride,
    pool_kind_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    NORMED: tl.constexpr,
):
    """One head of a tile of rows: query heads first, then key heads, then value heads."""
    head = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_H)
    in_half = channels < half
    live = rows < num_rows
    mask = live[:, None] & in_half[None, :]
    dtype = qkv_ptr.dtype.element_ty
    first_channels = rows.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
    first, second = load_planes(qkv_ptr, first_channels, live, 0, half, BLOCK_H, False)
    if head < HEADS + KV_HEADS:
        if NORMED:
            is_query = head < HEADS
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            scale = tl.math.rsqrt(squares / HEAD_DIM + eps)
            first = _normed_half(first, scale, query_norm_ptr, key_norm_ptr, is_query, channels, in_half, dtype)
            second = _normed_half(
                second, scale, query_norm_ptr, key_norm_ptr, is_query, channels + half, in_half, dtype
            )
        angles = rows[:, None] * half + channels[None, :]
        cos = tl.load(cos_ptr + angles, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + angles, mask=mask, other=0.0)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
        store_part(qkv_ptr, first_channels, live, first.to(dtype), 0, half, BLOCK_H)
        store_part(qkv_ptr, first_channels, live, second.to(dtype), half, half, BLOCK_H)
    if head >= HEADS:
        slots = tl.load(slots_ptr + rows, mask=live, other=-1)
        written = (slots >= 0)[:, None] & mask
        kv_head = (head - HEADS) % KV_HEADS
        kind = (head - HEADS) // KV_HEADS
        base = (
            tl.cast(layer, tl.int64) * pool_layer_stride + kind * pool_kind_stride + kv_head * (BLOCK_SIZE * HEAD_DIM)
        )
        places = slots // BLOCK_SIZE * pool_block_stride + slots % BLOCK_SIZE * HEAD_DIM
        pointers = pool_ptr + base + places[:, None] + channels[None, :]
        tl.store(pointers, as_element(first.to(dtype), pool_ptr.dtype.element_ty), mask=written)
        tl.store(pointers + half, as_element(second.to(dtype), pool_ptr.dtype.element_ty), mask=written)


def add_rms_norm(rows: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `kernels.layer_ops.add_rms_norm`."""
    output = torch.empty_like(rows)
    block = triton.next_power_of_2(rows.shape[1])
    launch(
        _norm_kernel,
        (rows.shape[0],),
        rows,
        rows,
        rows if residual is None else residual,
        weight,
        output,
        rows.shape[1],
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return output


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `kernels.layer_ops.silu_mul`."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    block = min(SILU_BLOCK, triton.next_power_of_2(inner))
    grid = (rows, triton.cdiv(inner, block))
    launch(_silu_kernel, grid, gate_up, gate_up, output, inner, BLOCK=block, num_warps=8)
    return output


def rotate_rows(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv: PoolLayer,
    norms: HeadNorms | None,
) -> None:
    """As `kernels.layer_ops.rotate_rows`; the arguments were checked."""
    pool, layer, geometry = kv
    assert isinstance(pool, torch.Tensor)
    heads = qkv.shape[1] // geometry.head_dim - 2 * geometry.kv_heads
    launch(
        _rotate_kernel,
        (triton.cdiv(qkv.shape[0], ROWS_PER_TILE), heads + 2 * geometry.kv_heads),
        qkv,
        qkv,
        cos,
        sin,
        slots,
        pool,
        qkv if norms is None else norms.query,
        qkv if norms is None else norms.key,
        qkv.shape[0],
        layer,
        0.0 if norms is None else norms.eps,
        *pool.stride()[:3],
        HEADS=heads,
        KV_HEADS=geometry.kv_heads,
        HEAD_DIM=geometry.head_dim,
        BLOCK_SIZE=geometry.block_size,
        BLOCK_H=triton.next_power_of_2(geometry.head_dim // 2),
        ROWS=ROWS_PER_TILE,
        NORMED=norms is not None,
        num_warps=4,
    )
