"""deviation as one Triton launch: each program compares a tile of tokens of K or V over all heads."""

# Triton decorates untyped functions, and names compile-time constants in capitals.
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.device import launch
from kernels.span_table import (
    Memory,
    constants,
    factors_of,
    keep_until_read,
    load_part,
    load_planes,
    memory_at,
    plane_at,
    rows_at,
    span_of_tile,
    span_table,
    tile_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.layout import FreshRows, Move
    from kernels.rope import RopeRotation


def compared(spans: Sequence[Move], fresh: FreshRows, layer: int, rotation: RopeRotation, *sums: int) -> torch.Tensor:
    """Serve `kernels.deviation.deviation`, or with `sums` 2 `squares`, of checked spans that `triton_serves`."""
    shape = (*sums, spans[0].source.sizes[1], sum(span.length for span in spans))
    output = torch.empty(shape, dtype=torch.float32, device=fresh.k.device)
    if compared := [span for span in spans if span.length]:
        prepared(output, compared, fresh, layer, rotation)()
    return output


def prepared(
    output: torch.Tensor, spans: Sequence[Move], fresh: FreshRows, layer: int, rotation: RopeRotation
) -> Callable[[], None]:
    """Upload the table of spans, which all have a length; return what launches the kernel on the current stream.

    `output` has three axes for the squares and two for the deviation."""
    base = fresh.k
    _, kv_factor, kv_heads, head_dim = spans[0].source.sizes
    tokens = tile_tokens(head_dim, base.dtype)
    targets = _memory_of_rows(fresh.k), _memory_of_rows(fresh.planes[-1])
    table = span_table(spans, base, targets, rotation, tokens)

    def run() -> None:
        launch(
            deviation_kernel, (table.num_tiles, kv_factor), base, base, table.words, output, table.tiles_at,
            table.factors_at, output.shape[-1], layer, **constants(table, base.dtype, head_dim, rotation),
            TOKENS=tokens, HEADS=kv_heads, KINDS=kv_factor if output.ndim == 3 else 0, num_warps=4,
        )  # fmt: skip
        keep_until_read([span.source.memory for span in spans], base)

    return run


def _memory_of_rows(rows: torch.Tensor) -> Memory:
    """Describe rows: [tokens, kv_heads, head_dim] has neither layers nor kinds: their strides are 0."""
    token, head, _ = rows.stride()
    return memory_at(rows, (0, 0, 0, head, token), max(1, rows.shape[0]), np.zeros(1, np.int64))


@triton.jit
def _compare(fresh, donor):
    """Return sums of squares over channels of fresh - donor and of donor, float32 [TOKENS] each."""
    difference = fresh - donor
    return tl.sum(difference * difference, axis=1), tl.sum(donor * donor, axis=1)


@triton.jit
def _compare_part(
    fresh, donor, to_rows, from_rows, live, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr
):
    """Do as `_compare`, for channels that do not rotate."""
    fresh_part = load_part(fresh, to_rows, live, FIRST, COUNT, PADDED).to(tl.float32)
    return _compare(fresh_part, load_part(donor, from_rows, live, FIRST, COUNT, PADDED).to(tl.float32))


@triton.jit(do_not_specialize=["tiles_at", "factors_at", "total", "layer"])
def deviation_kernel(
    base, table, output, tiles_at, factors_at, total, layer, UNIT: tl.constexpr, HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAD_HEAD: tl.constexpr,
    PAD_BEFORE: tl.constexpr, PAD_HALF: tl.constexpr, PAD_AFTER: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, KINDS: tl.constexpr,
):  # fmt: skip
    """Compare in program (tile, kind): kind 0 is K, which rotates unless its shift is 0.

    Each kind has its own target record. With KINDS, the number of kinds, store the sums of squares; with 0, the
    deviation."""
    kind = tl.program_id(1)
    span, first_token = span_of_tile(table, tiles_at, tl.program_id(0))
    record = table + 16 * kind
    index = layer * tl.num_programs(1) + kind
    tokens = first_token + tl.arange(0, TOKENS)
    live = tokens < tl.load(span + 8)
    from_positions = tl.load(span + 6) + tokens
    to_positions = tl.load(span + 7) + tokens
    factor = tl.load(span + 9)
    difference = tl.zeros((TOKENS,), tl.float32)
    norm = tl.zeros((TOKENS,), tl.float32)
    from_rows = rows_at(table, span, from_positions, live, UNIT)
    to_rows = rows_at(table, record, to_positions, live, UNIT)
    if (kind == 0) & (factor >= 0):
        cos, sin = factors_of(table, factors_at, factor, HALF, PAD_HALF)
        for head in range(HEADS):
            donor = plane_at(base, table, span, index, head, UNIT)
            fresh = plane_at(base, table, record, index, head, UNIT)
            first, second = load_planes(donor, from_rows, live, FIRST, HALF, PAD_HALF, INTERLEAVED)
            fresh_first, fresh_second = load_planes(fresh, to_rows, live, FIRST, HALF, PAD_HALF, INTERLEAVED)
            first_difference, first_norm = _compare(fresh_first, first * cos - second * sin)
            second_difference, second_norm = _compare(fresh_second, second * cos + first * sin)
            difference += first_difference + second_difference
            norm += first_norm + second_norm
            if PAD_BEFORE > 0:
                part = _compare_part(fresh, donor, to_rows, from_rows, live, 0, FIRST, PAD_BEFORE)
                difference += part[0]
                norm += part[1]
            if PAD_AFTER > 0:
                part = _compare_part(
                    fresh, donor, to_rows, from_rows, live, FIRST + 2 * HALF, HEAD_DIM - FIRST - 2 * HALF, PAD_AFTER
                )
                difference += part[0]
                norm += part[1]
    else:
        for head in range(HEADS):
            donor = plane_at(base, table, span, index, head, UNIT)
            fresh = plane_at(base, table, record, index, head, UNIT)
            part = _compare_part(fresh, donor, to_rows, from_rows, live, 0, HEAD_DIM, PAD_HEAD)
            difference += part[0]
            norm += part[1]
    to_tokens = output + kind * total + tl.load(span + 10) + tokens
    if KINDS > 0:
        tl.store(to_tokens, difference, mask=live)
        tl.store(to_tokens + KINDS * total, norm, mask=live)
    else:
        tl.store(to_tokens, tl.where(difference == 0.0, 0.0, tl.sqrt(difference / norm)), mask=live)
