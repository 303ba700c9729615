"""Flash attention (Dao 2023, FlashAttention-2) of packed rows over paged KV, in Triton.

KV below a tile's first position needs no mask and is read in a loop of its own; the rest, up to its last position, is
compared with the rows' positions in registers. Where the KV of a tile is split into pieces, the partial outputs are
joined by their log-sum-exp (Dao et al. 2023, flash-decoding).
"""

# Triton decorates untyped functions, and names compile-time constants in capitals.
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _block_of(tokens, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Index in the block table of each token of a tile that starts at `tokens`; a scalar for a tile within a block."""
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tokens // BLOCK_SIZE
    elif BLOCK_N % BLOCK_SIZE == 0:
        block = tokens // BLOCK_SIZE + tl.arange(0, BLOCK_N) // BLOCK_SIZE
    else:
        block = (tokens + tl.arange(0, BLOCK_N)) // BLOCK_SIZE
    return block


@triton.jit
def _slot_of(tokens, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slot in its block of each token of a tile that starts at `tokens`."""
    if BLOCK_SIZE % BLOCK_N == 0:
        slot = tokens % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    elif BLOCK_N % BLOCK_SIZE == 0:
        slot = tl.arange(0, BLOCK_N) % BLOCK_SIZE
    else:
        slot = (tokens + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
    return slot


@triton.jit
def _attend(
    accumulator,
    normaliser,
    maximum,
    q,
    row_positions,
    keys,
    value_offset,
    table,
    begin,
    end,
    last_block,
    block_stride,
    scale,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attends to tokens begin..end-1; `MASKED` compares them with the rows' positions."""
    channels = tl.arange(0, BLOCK_D)
    # The block ids of a tile are loaded while the tile before it is attended to.
    ids = tl.load(table + tl.minimum(_block_of(begin, BLOCK_SIZE, BLOCK_N), last_block))
    for start in range(begin, end, BLOCK_N):
        slots = _slot_of(start, BLOCK_SIZE, BLOCK_N)
        offsets = ids * block_stride + slots * HEAD_DIM
        ids = tl.load(table + tl.minimum(_block_of(start + BLOCK_N, BLOCK_SIZE, BLOCK_N), last_block))
        # k, v: [block_n, block_d]
        pointers = keys + offsets[:, None] + channels[None, :]
        if BLOCK_D == HEAD_DIM:
            k = tl.load(pointers)
        else:
            k = tl.load(pointers, mask=channels[None, :] < HEAD_DIM, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(MATH)), input_precision=PRECISION)
        if MASKED:
            tokens = start + tl.arange(0, BLOCK_N)
            scores = tl.where(tokens[None, :] <= row_positions[:, None], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
            # A row that has seen no token yet has no finite maximum.
            subtracted = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.math.exp2(scores * scale - subtracted[:, None])
            decay = tl.math.exp2(maximum - subtracted)
            # Slots beyond the reach may hold anything, and 0 * NaN is NaN.
            readable = (tokens < end)[:, None] & (channels[None, :] < HEAD_DIM)
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


@triton.jit(do_not_specialize=["items_ptr", "positions_ptr", "block_ids_ptr", "layer", "num_items"])
def attention_kernel(
    q_ptr,
    pool_ptr,
    output_ptr,
    partial_ptr,
    lse_ptr,
    items_ptr,
    positions_ptr,
    block_ids_ptr,
    layer,
    num_items,
    scale,
    q_row_stride,
    q_head_stride,
    pool_block_stride,
    pool_layer_stride,
    pool_kind_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One item (a tile of packed rows and a piece of its KV) of one KV head."""
    program = tl.program_id(0)
    item = program % num_items if HEAD_MAJOR else program // KV_HEADS
    kv_head = program // num_items if HEAD_MAJOR else program % KV_HEADS
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
    # The first position bounds the part that needs no mask.
    open_end = tl.maximum(tl.minimum((lowest + 1) // BLOCK_N * BLOCK_N, kv_end), kv_begin)

    q_pointers = q_ptr + (rows * q_row_stride + heads * q_head_stride)[:, None] + channels[None, :]
    q = tl.load(q_pointers, mask=channels[None, :] < HEAD_DIM, other=0.0).to(MATH)
    keys = pool_ptr + tl.cast(layer, tl.int64) * pool_layer_stride + kv_head * (BLOCK_SIZE * HEAD_DIM)
    table = block_ids_ptr + first_block
    last_block = highest // BLOCK_SIZE

    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    normaliser = tl.zeros([BLOCK_M], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    accumulator, normaliser, maximum = _attend(
        accumulator, normaliser, maximum, q, row_positions, keys, pool_kind_stride, table, kv_begin, open_end,
        last_block, pool_block_stride, scale, False, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, MATH, PRECISION,
    )  # fmt: skip
    accumulator, normaliser, maximum = _attend(
        accumulator, normaliser, maximum, q, row_positions, keys, pool_kind_stride, table, open_end, kv_end,
        last_block, pool_block_stride, scale, True, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, MATH, PRECISION,
    )  # fmt: skip

    empty = normaliser == 0.0
    accumulator = accumulator / tl.where(empty, 1.0, normaliser)[:, None]
    stored = (packed < packed_end)[:, None] & (channels[None, :] < HEAD_DIM)
    joined = False
    if SPLIT:
        joined = slot >= 0
    if joined:
        lanes = (slot * KV_HEADS + kv_head).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        lse = tl.where(empty, float("-inf"), maximum + tl.math.log2(tl.where(empty, 1.0, normaliser)))
        tl.store(lse_ptr + lanes, lse)
        tl.store(partial_ptr + (lanes * HEAD_DIM)[:, None] + channels[None, :], accumulator, mask=stored)
    else:
        output_pointers = output_ptr + ((rows * (KV_HEADS * GROUP) + heads) * HEAD_DIM)[:, None] + channels[None, :]
        tl.store(output_pointers, accumulator.to(output_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["tiles_ptr"])
def join_kernel(
    partial_ptr,
    lse_ptr,
    output_ptr,
    tiles_ptr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    WAYS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """ROWS packed rows of a tile and one KV head: the mean of their partial outputs, weighted by 2 ** lse.

    Each of WAYS groups of threads takes every WAYS-th piece, SLOTS of them at a time.
    """
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
        weight = tl.math.exp2(maximum - tl.max(maximum, 1)[:, None])
        total = tl.sum(tl.reshape(total, (ROWS, WAYS)) * weight, 1)
        accumulator = tl.sum(tl.reshape(accumulator, (ROWS, WAYS, BLOCK_D)) * weight[:, :, None], 1)
    packed = packed_begin + first_lane + tl.arange(0, ROWS)
    live = packed < packed_end
    rows = (first_row + packed // GROUP).to(tl.int64)
    heads = kv_head * GROUP + packed % GROUP
    pointers = output_ptr + ((rows * (KV_HEADS * GROUP) + heads) * HEAD_DIM)[:, None] + channels[None, :]
    # Rows beyond the tile's end have no weight.
    joined = accumulator / tl.where(live, total, 1.0)[:, None]
    tl.store(pointers, joined.to(output_ptr.dtype.element_ty), mask=live[:, None] & (channels[None, :] < HEAD_DIM))
