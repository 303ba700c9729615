"""sparse_prefill in Triton: chooses the tiles of a batch and launches them."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.sparse_prefill.tiles import TileConfig, attention_work, batch_index
from kernels.sparse_prefill.triton_kernels import attention_kernel, join_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import KvGeometry
    from kernels.sparse_prefill.rows import SequenceRows

LOG2_E = 1.4426950408889634
# Rounds of programs from which the tiles of one KV head fill the card by themselves: its KV then stays in L2.
HEAD_MAJOR_ROUNDS = 4
INTERPRETED_PROCESSORS = 4


def sparse_prefill(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    sequences: Sequence[SequenceRows],
    geometry: KvGeometry,
    scale: float,
    config: TileConfig | None = None,
    piece: int | None = None,
) -> torch.Tensor:
    """As `kernels.sparse_prefill.sparse_prefill`; the arguments were checked.

    `config` and `piece` (tokens of KV a program covers, a multiple of block_n) override what is chosen by the shapes.
    """
    sequences = tuple(sequences)
    kv_heads, head_dim = geometry.kv_heads, geometry.head_dim
    group = q.shape[1] // kv_heads
    if config is None:
        config = choose_config(max(sequence.count for sequence in sequences) * group, head_dim, q.dtype)
    processors = processors_of(q.device)
    work = attention_work(sequences, group, kv_heads, config, processors, piece)
    index = batch_index(sequences)
    q = q if q.stride(2) == 1 else q.contiguous()
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_items, block_d = work.items.shape[0], max(16, triton.next_power_of_2(head_dim))
    lanes = work.slots * kv_heads * config.block_m
    lse = torch.empty(lanes, dtype=torch.float32, device=q.device)
    partial = torch.empty(lanes * head_dim, dtype=torch.float32, device=q.device)
    # The interpreter cannot multiply bf16.
    exact = q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and q.device.type == "cpu")
    attention_kernel[(num_items * kv_heads,)](
        q,
        pool,
        output,
        partial,
        lse,
        work.items,
        index.positions,
        index.block_ids,
        layer,
        num_items,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_SIZE=geometry.block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SPLIT=work.slots > 0,
        HEAD_MAJOR=num_items >= HEAD_MAJOR_ROUNDS * processors * config.resident,
        MATH=tl.float32 if exact else tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16,
        PRECISION="ieee" if exact else None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    if work.slots:
        launch_join(partial, lse, output, work.tiles, geometry, config)
    return output


def launch_join(
    partial: torch.Tensor,
    lse: torch.Tensor,
    output: torch.Tensor,
    tiles: torch.Tensor,
    geometry: KvGeometry,
    config: TileConfig,
) -> None:
    """Launches the kernel that joins the partial outputs of `tiles`."""
    # Low tiles are few and cut into many pieces, which then are read side by side; the sizes are a sweep's on an H200.
    rows, ways, slots = (1, 16, 4) if config.block_m <= 64 else (8, 1, 4)
    join_kernel[(tiles.shape[0] * triton.cdiv(config.block_m, rows), geometry.kv_heads)](
        partial,
        lse,
        output,
        tiles,
        KV_HEADS=geometry.kv_heads,
        GROUP=output.shape[1] // geometry.kv_heads,
        HEAD_DIM=geometry.head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(geometry.head_dim)),
        BLOCK_M=config.block_m,
        ROWS=rows,
        WAYS=ways,
        SLOTS=slots,
        num_warps=4,
    )


@cache
def choose_config(packed_rows: int, head_dim: int, dtype: torch.dtype) -> TileConfig:
    """The tile for a batch whose longest sequence has `packed_rows` rows times query heads a KV head."""
    if dtype == torch.float32:
        # Exact float32 products run outside the tensor cores, and larger tiles spill their registers.
        return TileConfig(16 if packed_rows <= 16 else 32, 16, 4 if head_dim <= 128 else 8, 2)
    if packed_rows <= 16:
        return TileConfig(16, 64, 4, 3, resident=3) if head_dim <= 128 else TileConfig(16, 32, 4, 3, resident=2)
    if packed_rows <= 64:
        return TileConfig(64, 64, 4, 3, resident=2) if head_dim <= 128 else TileConfig(64, 32, 4, 3)
    # Fastest in the sweep on an H200: two resident programs hide each other's softmax behind matrix work.
    if head_dim <= 128:
        return TileConfig(128, 64, 8, 3 if head_dim <= 64 else 2, resident=2, max_registers=128)
    return TileConfig(128, 64, 8, 2)


@cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of the card, or what stands for them where kernels are interpreted."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
