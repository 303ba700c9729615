"""Flash attention (Dao 2023, FlashAttention-2) of packed rows over paged KV in Triton, and the write of K and V.

A loop of its own reads the KV below a tile's first position, which needs no mask. The rest, up to the tile's last
position, is compared with the rows' positions in registers. With a window, so is the KV at the start that only some of
the rows see, and what no row sees is not read. If the KV of a tile is split into pieces, the partial outputs are joined
by their log-sum-exp (Dao et al. 2023, flash-decoding). A sink is a token that no row reads; each knows its score."""

# Triton decorates untyped functions, and names compile-time constants in capitals.
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803
from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from kernels.device import launch
from kernels.span_table import as_element
from kernels.sparse_prefill.tiles import TileConfig, attention_work, batch_index, longest_part, row_tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import PoolLayer, SequenceRows
    from kernels.sparse_prefill import Queries

LOG2_E = 1.4426950408889634
LOG2_E_IN_KERNELS = tl.constexpr(LOG2_E)
# From this number of rounds of programs on, the tiles of one KV head alone fill the card: its KV then stays in L2.
HEAD_MAJOR_ROUNDS = 4
INTERPRETED_PROCESSORS = 4
ROWS_PER_TILE = 16


def sparse_prefill(asked: Queries, config: TileConfig | None = None, piece: int | None = None) -> torch.Tensor:
    """Serve `kernels.sparse_prefill.sparse_prefill`; the arguments were checked.

    `config` and `piece` (tokens of KV of a program, a multiple of block_n) override what is chosen by the shapes."""
    q, kv, _, scale, window, sinks, lse = asked
    sequences, geometry = tuple(asked.sequences), kv.geometry
    kv_heads, head_dim, group = geometry.kv_heads, geometry.head_dim, q.shape[1] // geometry.kv_heads
    if config is None:
        config = choose_config(longest_part(sequences, window) * group, head_dim, q.dtype)
    processors = processors_of(q.device)
    work = attention_work(sequences, group, kv_heads, config, processors, piece, window)
    num_items = work.items.shape[0]
    q = q if q.stride(2) == 1 else q.contiguous()
    memory, layer, strides, constants = memory_of(kv)
    shared = {
        "SINKS": sinks is not None,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_M": config.block_m,
    }
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lanes = work.slots * kv_heads * config.block_m
    partial_lse = torch.empty(lanes, dtype=torch.float32, device=q.device)
    partial = torch.empty(lanes * head_dim, dtype=torch.float32, device=q.device)
    sinks = sinks if sinks is None else sinks.contiguous()
    # Numbers, and a tensor in any case: where batches differ in a constant, Triton compiles while a step waits.
    head_major, has_lse = num_items >= HEAD_MAJOR_ROUNDS * processors * config.resident, lse is not None
    row_lse = lse if lse is not None else partial_lse
    launch(
        attention_kernel, (num_items * kv_heads,), q, q, memory, output, partial, partial_lse, work.items,
        *batch_index(sequences), sinks, row_lse, layer, num_items, window or 0, int(head_major), int(has_lse),
        scale * LOG2_E, *q.stride()[:2], *strides, **constants, **shared, BLOCK_SIZE=geometry.block_size,
        BLOCK_N=config.block_n, WINDOWED=window is not None, **math_of(q), num_warps=config.num_warps,
        num_stages=config.num_stages, maxnreg=config.max_registers,
    )  # fmt: skip
    if work.slots:
        # Low tiles are few and have many pieces, so pieces are read side by side; measured on an H200.
        rows, ways, slots = (1, 16, 4) if config.block_m <= 64 else (8, 1, 4)
        launch(
            join_kernel, (work.tiles.shape[0] * triton.cdiv(config.block_m, rows), kv_heads), q, partial, partial_lse,
            output, work.tiles, sinks, row_lse, int(has_lse), **shared, ROWS=rows, WAYS=ways, SLOTS=slots, num_warps=4,
        )  # fmt: skip
    return output


def write_rows(k: torch.Tensor, v: torch.Tensor | None, kv: PoolLayer, sequences: Sequence[SequenceRows]) -> None:
    """Serve `kernels.sparse_prefill.write_rows` in one launch; the arguments were checked."""
    geometry, sequences = kv.geometry, tuple(sequences)
    memory, layer, strides, constants = memory_of(kv)
    tiles = row_tiles(sequences, ROWS_PER_TILE)
    k, v = (rows if rows.stride(2) == 1 else rows.contiguous() for rows in (k, k if v is None else v))
    launch(
        write_kernel, (tiles.shape[0], geometry.kv_heads), memory, k, v, memory, tiles, *batch_index(sequences),
        layer, *k.stride()[:2], *v.stride()[:2], *strides, **constants, HEAD_DIM=geometry.head_dim,
        BLOCK_D=triton.next_power_of_2(geometry.head_dim), BLOCK_SIZE=geometry.block_size, KINDS=geometry.kv_factor,
        ROWS=ROWS_PER_TILE, num_warps=4,
    )  # fmt: skip


def memory_of(kv: PoolLayer) -> tuple[torch.Tensor, int, tuple[int, int, int], dict[str, int]]:
    """Return a tensor, the layer in it, its strides of block, layer and kind, and those of head and slot by name."""
    pool, layer, geometry = kv
    if isinstance(pool, torch.Tensor):
        block, apart, kinds, _ = pool.stride()
        head, slot = geometry.block_size * geometry.head_dim, geometry.head_dim
        return pool, layer, (block, apart, kinds), {"HEAD_STRIDE": head, "SLOT_STRIDE": slot}
    keys, last = pool.keys[layer], pool.kinds[-1][layer]
    block, head, slot, _ = keys.stride()
    kinds = (last.data_ptr() - keys.data_ptr()) // keys.element_size()
    return keys, 0, (block, 0, kinds), {"HEAD_STRIDE": head, "SLOT_STRIDE": slot}


def math_of(q: torch.Tensor) -> dict[str, Any]:
    """Return the compile-time arguments by which a kernel multiplies `q`; the interpreter cannot multiply bf16."""
    if q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and q.device.type == "cpu"):
        return {"MATH": tl.float32, "PRECISION": "ieee"}
    return {"MATH": tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16, "PRECISION": None}


@cache
def choose_config(packed_rows: int, head_dim: int, dtype: torch.dtype) -> TileConfig:
    """Return the tile for a batch whose longest sequence has `packed_rows` rows times query heads a KV head."""
    if dtype == torch.float32:
        # Exact float32 products run outside the tensor cores, and larger tiles spill their registers.
        return TileConfig(16 if packed_rows <= 16 else 32, 16, 4 if head_dim <= 128 else 8, 2)
    if packed_rows <= 16:
        return TileConfig(16, 64, 4, 3, resident=3) if head_dim <= 128 else TileConfig(16, 32, 4, 3, resident=2)
    if packed_rows <= 64:
        return TileConfig(64, 64, 4, 3, resident=2) if head_dim <= 128 else TileConfig(64, 32, 4, 3)
    # Fastest measured on an H200: two resident programs hide each other's softmax under matrix work.
    if head_dim <= 128:
        return TileConfig(128, 64, 8, 3 if head_dim <= 64 else 2, resident=2, max_registers=128)
    return TileConfig(128, 64, 8, 2)


@cache
def processors_of(device: torch.device) -> int:
    """Return the card's multiprocessors, or a number in their place where kernels are interpreted."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _places_of(tokens, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return block table index and slot of each token of a tile from `tokens` on; one index for a tile in a block."""
    own = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        block, slot = tokens // BLOCK_SIZE, tokens % BLOCK_SIZE + own
    elif BLOCK_N % BLOCK_SIZE == 0:
        block, slot = tokens // BLOCK_SIZE + own // BLOCK_SIZE, own % BLOCK_SIZE
    else:
        block, slot = (tokens + own) // BLOCK_SIZE, (tokens + own) % BLOCK_SIZE
    return block, slot


@triton.jit
def _attend(
    accumulator, normaliser, maximum, q, row_positions, keys, value_offset, table, begin, end, last_block,
    block_stride, scale, window, first_seen, MASKED: tl.constexpr, WINDOWED: tl.constexpr, SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MATH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to tokens begin..end-1; `MASKED` compares them with the rows' positions, and `WINDOWED` with the window.

    No row sees a token before `first_seen`."""
    channels = tl.arange(0, BLOCK_D)
    # The block ids of a tile are loaded while the tile before it is attended to.
    ids = tl.load(table + tl.minimum(_places_of(begin, BLOCK_SIZE, BLOCK_N)[0], last_block))
    for start in range(begin, end, BLOCK_N):
        slots = _places_of(start, BLOCK_SIZE, BLOCK_N)[1]
        offsets = ids * block_stride + slots * SLOT_STRIDE
        ids = tl.load(table + tl.minimum(_places_of(start + BLOCK_N, BLOCK_SIZE, BLOCK_N)[0], last_block))
        # k, v: [block_n, block_d]
        pointers = keys + offsets[:, None] + channels[None, :]
        if BLOCK_D == HEAD_DIM:
            k = tl.load(pointers)
        else:
            k = tl.load(pointers, mask=channels[None, :] < HEAD_DIM, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(MATH)), input_precision=PRECISION)
        if MASKED:
            tokens = start + tl.arange(0, BLOCK_N)
            seen = tokens[None, :] <= row_positions[:, None]
            # Slots that no row sees may hold anything, and 0 * NaN is NaN.
            held = tokens < end
            if WINDOWED:
                seen = seen & (tokens[None, :] > row_positions[:, None] - window)
                held = held & (tokens >= first_seen)
            scores = tl.where(seen, scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
            # A row that has seen no token yet has no finite maximum.
            subtracted = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.math.exp2(scores * scale - subtracted[:, None])
            decay = tl.math.exp2(maximum - subtracted)
            readable = held[:, None] & (channels[None, :] < HEAD_DIM)
            v = tl.load(pointers + value_offset, mask=readable, other=0.0)
        else:
            new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
            weights = tl.math.exp2(scores * scale - new_maximum[:, None])
            decay = tl.math.exp2(maximum - new_maximum)
            if BLOCK_D == HEAD_DIM:
                v = tl.load(pointers + value_offset)
            else:
                v = tl.load(pointers + value_offset, mask=channels[None, :] < HEAD_DIM, other=0.0)
        normaliser = normaliser * decay + tl.sum(weights, 1)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(weights.to(MATH), v.to(MATH), accumulator, input_precision=PRECISION)
        maximum = new_maximum
    return accumulator, normaliser, maximum


@triton.jit(do_not_specialize=[
    "items_ptr", "positions_ptr", "block_ids_ptr", "layer", "num_items", "window", "head_major", "has_lse",
])  # fmt: skip
def attention_kernel(
    q_ptr, pool_ptr, output_ptr, partial_ptr, lse_ptr, items_ptr, positions_ptr, block_ids_ptr, sinks_ptr,
    row_lse_ptr, layer, num_items, window, head_major, has_lse, scale, q_row_stride, q_head_stride, pool_block_stride,
    pool_layer_stride, pool_kind_stride, HEAD_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, MATH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend for one item (a tile of packed rows and a piece of its KV) of one KV head."""
    program = tl.program_id(0)
    item = tl.where(head_major != 0, program % num_items, program // KV_HEADS)
    kv_head = tl.where(head_major != 0, program // num_items, program % KV_HEADS)
    record = items_ptr + item * 7
    first_row = tl.load(record)
    packed_begin = tl.load(record + 1)
    packed_end = tl.load(record + 2)
    first_block = tl.load(record + 3)
    kv_begin = tl.load(record + 4)
    piece_end = tl.load(record + 5)
    slot = tl.load(record + 6)

    packed = packed_begin + tl.arange(0, BLOCK_M)
    channels = tl.arange(0, BLOCK_D)
    # Packed rows beyond the tile's end repeat its last row and are not stored.
    readable = tl.minimum(packed, packed_end - 1)
    rows = (first_row + readable // GROUP).to(tl.int64)
    heads = kv_head * GROUP + readable % GROUP
    row_positions = tl.load(positions_ptr + rows).to(tl.int32)
    lowest = tl.load(positions_ptr + first_row + packed_begin // GROUP).to(tl.int32)
    highest = tl.load(positions_ptr + first_row + (packed_end - 1) // GROUP).to(tl.int32)
    kv_end = tl.minimum(highest + 1, piece_end)
    # The first position, and with a window the last one, bound the part that needs no mask.
    open_begin = kv_begin
    if WINDOWED:
        all_see = (tl.maximum(highest + 1 - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        open_begin = tl.maximum(tl.minimum(all_see, kv_end), kv_begin)
    open_end = tl.maximum(tl.minimum((lowest + 1) // BLOCK_N * BLOCK_N, kv_end), open_begin)
    first_seen = lowest + 1 - window

    q_pointers = q_ptr + (rows * q_row_stride + heads * q_head_stride)[:, None] + channels[None, :]
    q = tl.load(q_pointers, mask=channels[None, :] < HEAD_DIM, other=0.0).to(MATH)
    keys = pool_ptr + tl.cast(layer, tl.int64) * pool_layer_stride + kv_head * HEAD_STRIDE
    table = block_ids_ptr + first_block
    last_block = highest // BLOCK_SIZE

    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    normaliser = tl.zeros([BLOCK_M], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SINKS:
        # The sink of a tile in pieces is added where they are joined.
        sinks = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E_IN_KERNELS
        maximum = tl.where(slot < 0, sinks, maximum)
        normaliser = tl.where(slot < 0, 1.0, normaliser)
    # Of the KV before `open_begin`, in between and from `open_end` on, the middle needs no mask.
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        begin = kv_begin if part == 0 else open_begin if part == 1 else open_end
        end = open_begin if part == 0 else open_end if part == 1 else kv_end
        accumulator, normaliser, maximum = _attend(
            accumulator, normaliser, maximum, q, row_positions, keys, pool_kind_stride, table, begin, end, last_block,
            pool_block_stride, scale, window, first_seen, part != 1, WINDOWED, SLOT_STRIDE, HEAD_DIM, BLOCK_D,
            BLOCK_SIZE, BLOCK_N, MATH, PRECISION,
        )  # fmt: skip

    empty = normaliser == 0.0
    accumulator = accumulator / tl.where(empty, 1.0, normaliser)[:, None]
    stored = (packed < packed_end)[:, None] & (channels[None, :] < HEAD_DIM)
    if slot >= 0:
        lanes = (slot * KV_HEADS + kv_head).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        lse = tl.where(empty, float("-inf"), maximum + tl.math.log2(tl.where(empty, 1.0, normaliser)))
        tl.store(lse_ptr + lanes, lse)
        tl.store(partial_ptr + (lanes * HEAD_DIM)[:, None] + channels[None, :], accumulator, mask=stored)
    else:
        output_pointers = output_ptr + ((rows * (KV_HEADS * GROUP) + heads) * HEAD_DIM)[:, None] + channels[None, :]
        tl.store(output_pointers, accumulator.to(output_ptr.dtype.element_ty), mask=stored)
        if has_lse != 0:
            lse = (maximum + tl.math.log2(normaliser)) / LOG2_E_IN_KERNELS
            tl.store(row_lse_ptr + rows * (KV_HEADS * GROUP) + heads, lse, mask=packed < packed_end)


@triton.jit(do_not_specialize=["tiles_ptr", "has_lse"])
def join_kernel(
    partial_ptr, lse_ptr, output_ptr, tiles_ptr, sinks_ptr, row_lse_ptr, has_lse, SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr, WAYS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Join ROWS packed rows of a tile and one KV head: the mean of their partial outputs, weighted by 2 ** lse.

    Each of WAYS groups of threads takes every WAYS-th piece, SLOTS of them at a time."""
    parts = (BLOCK_M + ROWS - 1) // ROWS
    record = tiles_ptr + tl.program_id(0) // parts * 5
    first_lane = tl.program_id(0) % parts * ROWS
    kv_head = tl.program_id(1)
    packed_begin = tl.load(record + 1)
    packed_end = tl.load(record + 2)
    if packed_begin + first_lane >= packed_end:
        return
    first_row = tl.load(record)
    first_slot = tl.load(record + 3)
    end_slot = first_slot + tl.load(record + 4)

    # One line for each row and way.
    lines = tl.arange(0, ROWS * WAYS)
    lanes = first_lane + lines // WAYS
    channels = tl.arange(0, BLOCK_D)
    accumulator = tl.zeros([ROWS * WAYS, BLOCK_D], tl.float32)
    # A running maximum far below any score, so that pieces without a token keep a weight of zero.
    maximum = tl.full([ROWS * WAYS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS * WAYS], tl.float32)
    for start in range(first_slot, end_slot, WAYS * SLOTS):
        # Unrolled, so that the loads of several pieces are in flight; here threads exchange nothing.
        for step in tl.static_range(SLOTS):
            slots = start + step * WAYS + lines % WAYS
            places = (slots * KV_HEADS + kv_head).to(tl.int64) * BLOCK_M + lanes
            readable = (packed_begin + lanes < packed_end) & (slots < end_slot)
            lse = tl.load(lse_ptr + places, mask=readable, other=float("-inf"))
            partial = tl.load(
                partial_ptr + (places * HEAD_DIM)[:, None] + channels[None, :],
                mask=readable[:, None] & (channels[None, :] < HEAD_DIM),
                other=0.0,
            )
            new_maximum = tl.maximum(maximum, lse)
            weight = tl.math.exp2(lse - new_maximum)
            decay = tl.math.exp2(maximum - new_maximum)
            accumulator = accumulator * decay[:, None] + partial * weight[:, None]
            total = total * decay + weight
            maximum = new_maximum
    if WAYS > 1:
        maximum = tl.reshape(maximum, (ROWS, WAYS))
        highest = tl.max(maximum, 1)
        weight = tl.math.exp2(maximum - highest[:, None])
        total = tl.sum(tl.reshape(total, (ROWS, WAYS)) * weight, 1)
        accumulator = tl.sum(tl.reshape(accumulator, (ROWS, WAYS, BLOCK_D)) * weight[:, :, None], 1)
        maximum = highest
    packed = packed_begin + first_lane + tl.arange(0, ROWS)
    live = packed < packed_end
    rows = (first_row + packed // GROUP).to(tl.int64)
    heads = kv_head * GROUP + packed % GROUP
    pointers = output_ptr + ((rows * (KV_HEADS * GROUP) + heads) * HEAD_DIM)[:, None] + channels[None, :]
    if SINKS:
        sink = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E_IN_KERNELS
        new_maximum = tl.maximum(maximum, sink)
        decay = tl.math.exp2(maximum - new_maximum)
        total = total * decay + tl.math.exp2(sink - new_maximum)
        accumulator = accumulator * decay[:, None]
        maximum = new_maximum
    # Rows beyond the tile's end have no weight.
    total = tl.where(live, total, 1.0)
    if has_lse != 0:
        lse = (maximum + tl.math.log2(total)) / LOG2_E_IN_KERNELS
        tl.store(row_lse_ptr + rows * (KV_HEADS * GROUP) + heads, lse, mask=live)
    joined = accumulator / total[:, None]
    tl.store(pointers, joined.to(output_ptr.dtype.element_ty), mask=live[:, None] & (channels[None, :] < HEAD_DIM))


@triton.jit(do_not_specialize=["tiles_ptr", "positions_ptr", "block_ids_ptr", "layer"])
def write_kernel(
    k_ptr, v_ptr, pool_ptr, tiles_ptr, positions_ptr, block_ids_ptr, layer, k_row_stride, k_head_stride, v_row_stride,
    v_head_stride, pool_block_stride, pool_layer_stride, pool_kind_stride, HEAD_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KINDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write K and V, or the latent, of one tile of rows and one KV head."""
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
    slots = blocks * pool_block_stride + positions % BLOCK_SIZE * SLOT_STRIDE
    offset = tl.cast(layer, tl.int64) * pool_layer_stride + head * HEAD_STRIDE
    pointers = pool_ptr + offset + slots[:, None] + channels[None, :]
    tl.store(pointers, as_element(k, pool_ptr.dtype.element_ty), mask=mask)
    if KINDS == 2:
        v = tl.load(v_ptr + (rows * v_row_stride + head * v_head_stride)[:, None] + channels[None, :], mask=mask)
        tl.store(pointers + pool_kind_stride, as_element(v, pool_ptr.dtype.element_ty), mask=mask)
