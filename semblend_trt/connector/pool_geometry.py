"""The geometry for which an engine's pool holds a model's KV: the pool is believed, and what does not fit is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kernels.layout import MOVABLE_DTYPES, KvGeometry, LayeredPool, check_pool

if TYPE_CHECKING:
    from semblend_trt.connector.model_facts import ModelFacts


def geometry_of(pool: Any, facts: ModelFacts, tensor_parallel_size: int) -> KvGeometry | None:
    """The geometry for which `pool` is the model's KV pool, [blocks, layers, kv_factor, kv_heads * block_size *
    head_dim] or a LayeredPool; None where there is none, or its strides are not those of a pool."""
    kv_heads = max(1, facts.kv_heads // tensor_parallel_size)
    if isinstance(pool, LayeredPool):
        block_size = pool.keys[0].shape[2]
        geometry = KvGeometry(facts.num_layers, kv_heads, facts.head_dim, block_size, facts.kv_factor)
        try:
            check_pool(pool, geometry)
        except ValueError:
            return None
        return geometry
    row = kv_heads * facts.head_dim
    if not isinstance(pool, torch.Tensor) or pool.is_meta or pool.ndim != 4 or not pool.numel():
        return None
    if tuple(pool.shape[1:3]) != (facts.num_layers, facts.kv_factor) or pool.shape[3] % row:
        return None
    if pool.dtype not in MOVABLE_DTYPES:
        return None
    if pool.stride(3) != 1 or _has_overlaps(pool):
        return None
    # The engine may override tokens_per_block (FlashMLA does), so the pool is believed rather than the arguments.
    return KvGeometry(facts.num_layers, kv_heads, facts.head_dim, pool.shape[3] // row, facts.kv_factor)


def needs_scales(pool: Any) -> bool:
    """Whether `pool` is one tensor in fp8, whose scales its engine must tell; with a LayeredPool its arguments do."""
    return isinstance(pool, torch.Tensor) and pool.dtype == torch.float8_e4m3fn


def described(pool: Any) -> str:
    """The pool in words, for the log."""
    if not isinstance(pool, torch.Tensor):
        return f"a pool of type {type(pool).__name__}"
    return f"a pool of shape {list(pool.shape)}, strides {list(pool.stride())} and dtype {pool.dtype}"


def _has_overlaps(pool: torch.Tensor) -> bool:
    """Whether two places of `pool` may be the same memory, by its strides."""
    reach = 1
    for stride, size in sorted(zip(pool.stride(), pool.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach = max(reach, stride * size)
    return False
