"""The engine's pool of KV: its facts for the connector, and whether it holds KV of a model's sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.layout import MOVABLE_DTYPES, KvGeometry, LayeredPool, check_pool


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The registered pool. `scales`: a digest, of fp8 alone. `chunk`: in tokens, if some layers attend in chunks.

    `exchanges_blocks`: the engine may give a request an equal block for its own one, and tells it at the end alone."""

    geometry: KvGeometry
    num_blocks: int
    dtype: torch.dtype
    scales: str | None = None
    chunk: int | None = None
    holds_saved_blocks: bool = False
    exchanges_blocks: bool = False


def geometry_of(pool: Any, sizes: KvGeometry) -> KvGeometry | None:
    """Return the geometry of `pool`, [blocks, layers, kv_factor, kv_heads * block_size * head_dim] or a LayeredPool.

    None if it does not hold KV of one rank's `sizes`, or its strides are not those of a pool. The pool gives the block
    size, because an engine may override tokens_per_block (FlashMLA does)."""
    if isinstance(pool, LayeredPool):
        geometry = replace(sizes, block_size=pool.keys[0].shape[2])
        try:
            check_pool(pool, geometry)
        except ValueError:
            return None
        return geometry
    if not isinstance(pool, torch.Tensor) or pool.is_meta or pool.ndim != 4 or not pool.numel():
        return None
    row = sizes.kv_heads * sizes.head_dim
    if tuple(pool.shape[1:3]) != (sizes.num_layers, sizes.kv_factor) or pool.shape[3] % row:
        return None
    if pool.dtype not in MOVABLE_DTYPES or pool.stride(3) != 1:
        return None
    reach = 1
    for stride, size in sorted(zip(pool.stride(), pool.shape, strict=True)):
        if size > 1 and stride < reach:
            return None  # two places may be the same memory
        reach = max(reach, stride * size)
    return replace(sizes, block_size=pool.shape[3] // row)


def needs_scales(pool: Any) -> bool:
    """Return True for one tensor in fp8, whose scales its engine must name; the arguments of a LayeredPool do."""
    return isinstance(pool, torch.Tensor) and pool.dtype == torch.float8_e4m3fn
