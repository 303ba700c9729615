"""kv_move as one Triton launch for a whole plan: each program moves a tile of tokens of one layer and kind."""

# Triton decorates untyped functions, and names compile-time constants in capitals.
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.device import launch
from kernels.layout import ContiguousKv, Kv, Move
from kernels.rope import LayerRotations
from kernels.span_table import (
    as_element,
    constants,
    factors_of,
    keep_until_read,
    load_part,
    load_planes,
    memory_of,
    plane_at,
    rows_at,
    span_of_tile,
    span_table,
    store_part,
    tile_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.rope import Rotation


def prepared(moves: Sequence[Move], target: Kv, rotation: Rotation) -> Callable[[range, int], None]:
    """Upload the table of moves that were checked, have a length, and that `triton_serves`.

    Returns a function that launches the kernel on the current stream of the target's device: it moves some layers of
    the sources to the target's layers from a first one on."""
    memory, rows = target.memory, memory_of(target)
    layers, kv_factor, kv_heads, head_dim = target.sizes
    # Fastest on an H200: neighbouring programs write neighbouring memory. A paged pool keeps all layers of a block
    # together; a contiguous tensor keeps all tokens of a layer, and so do pools of latent rows (MLA).
    is_contiguous, is_latent = isinstance(target, ContiguousKv), kv_factor == 1
    warps = 1 if is_latent and not is_contiguous else 2
    tokens = tile_tokens(head_dim, memory.dtype)
    table = span_table(moves, memory, (rows, rows), rotation, tokens, layers)
    programs = table.num_tiles * kv_factor * kv_heads
    fixed = constants(table, memory.dtype, head_dim, rotation)
    sources = [move.source.memory for move in moves]

    def run(moved: range, first: int) -> None:
        launch(
            move_kernel, (programs * len(moved),), memory, memory, table.words, table.tiles_at, table.factors_at,
            table.num_tiles, moved.start, first, len(moved), kv_factor, kv_heads, **fixed, TOKENS=tokens,
            LAYERED=isinstance(rotation, LayerRotations), TOKENS_FIRST=is_contiguous or is_latent, num_warps=warps,
        )  # fmt: skip
        keep_until_read(sources, memory)
        if table.words.is_cuda:
            # Its memory is given out again for the stream of its upload, which may be another one.
            table.words.record_stream(torch.cuda.current_stream(table.words.device))

    return run


@triton.jit(
    do_not_specialize=["tiles_at", "factors_at", "num_tiles", "from_layer", "to_layer", "layers", "kinds", "heads"]
)
def move_kernel(
    base, table, tiles_at, factors_at, num_tiles, from_layer, to_layer, layers, kinds, heads, UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAD_HEAD: tl.constexpr, PAD_BEFORE: tl.constexpr, PAD_HALF: tl.constexpr, PAD_AFTER: tl.constexpr,
    TOKENS: tl.constexpr, LAYERED: tl.constexpr, TOKENS_FIRST: tl.constexpr,
):  # fmt: skip
    """Move a tile of tokens of one head of one layer and kind; kind 0 is K, which rotates unless its shift is 0.

    LAYERED: the span names the factors' rows of all layers, one after the other, instead of one row."""
    program = tl.program_id(0)
    groups = layers * kinds * heads
    if TOKENS_FIRST:
        tile, group = program % num_tiles, program // num_tiles
    else:
        tile, group = program // groups, program % groups
    layer = group // (kinds * heads)
    kind = group // heads % kinds
    head = group % heads
    from_index = (from_layer + layer) * kinds + kind
    to_index = (to_layer + layer) * kinds + kind
    span, first_token = span_of_tile(table, tiles_at, tile)
    tokens = first_token + tl.arange(0, TOKENS)
    live = tokens < tl.load(span + 8)
    from_positions = tl.load(span + 6) + tokens
    to_positions = tl.load(span + 7) + tokens
    factor = tl.load(span + 9)
    if LAYERED:
        factor = tl.load(table + factor + to_layer + layer, mask=factor >= 0, other=-1)
    # Each branch looks its rows up for itself: they tile differently, and addresses of both would fill the registers.
    if (kind == 0) & (factor >= 0):
        from_rows = rows_at(table, span, from_positions, live, UNIT)
        to_rows = rows_at(table, table, to_positions, live, UNIT)
        cos, sin = factors_of(table, factors_at, factor, HALF, PAD_HALF)
        source = plane_at(base, table, span, from_index, head, UNIT)
        target = plane_at(base, table, table, to_index, head, UNIT)
        # All loads come before the stores, which they could not pass: the memory is one for the compiler.
        if PAD_BEFORE > 0:
            before = load_part(source, from_rows, live, 0, FIRST, PAD_BEFORE)
        if PAD_AFTER > 0:
            after = load_part(source, from_rows, live, FIRST + 2 * HALF, HEAD_DIM - FIRST - 2 * HALF, PAD_AFTER)
        first, second = load_planes(source, from_rows, live, FIRST, HALF, PAD_HALF, INTERLEAVED)
        rotated_first = as_element(first * cos - second * sin, base.dtype.element_ty)
        rotated_second = as_element(second * cos + first * sin, base.dtype.element_ty)
        if INTERLEAVED:
            both = tl.reshape(tl.join(rotated_first, rotated_second), (TOKENS, 2 * PAD_HALF))
            store_part(target, to_rows, live, both, FIRST, 2 * HALF, 2 * PAD_HALF)
        else:
            store_part(target, to_rows, live, rotated_first, FIRST, HALF, PAD_HALF)
            store_part(target, to_rows, live, rotated_second, FIRST + HALF, HALF, PAD_HALF)
        if PAD_BEFORE > 0:
            store_part(target, to_rows, live, before, 0, FIRST, PAD_BEFORE)
        if PAD_AFTER > 0:
            store_part(target, to_rows, live, after, FIRST + 2 * HALF, HEAD_DIM - FIRST - 2 * HALF, PAD_AFTER)
    else:
        from_rows = rows_at(table, span, from_positions, live, UNIT)
        to_rows = rows_at(table, table, to_positions, live, UNIT)
        source = plane_at(base, table, span, from_index, head, UNIT)
        target = plane_at(base, table, table, to_index, head, UNIT)
        row = load_part(source, from_rows, live, 0, HEAD_DIM, PAD_HEAD)
        store_part(target, to_rows, live, row, 0, HEAD_DIM, PAD_HEAD)
