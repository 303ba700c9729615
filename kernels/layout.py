"""How KV lies in memory: TensorRT-LLM's paged pool in one tensor, vLLM's layer by layer, and a donor's tensor.

The inner order of TensorRT-LLM's pool is HND, offset = (head * block_size + slot) * head_dim + channel, as in
TensorRT-LLM's `getKVLocalIdx` (cpp/tensorrt_llm/kernels/kvCacheUtils.h).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Pools and donors may be in fp8 too: a rotation keeps the tensor's one scale, so that kv_move and deviation need not
# know it. Attention takes it to be 1.
MOVABLE_DTYPES = (*SUPPORTED_DTYPES, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Sizes of one rank's KV: `kv_heads` are the heads that this rank holds, `block_size` the tokens of a block.

    `kv_factor` is 2 (K and V), or 1 if one latent row is both (MLA), as in TensorRT-LLM's pools.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    kv_factor: int = 2

    def __post_init__(self) -> None:
        for name in ("num_layers", "kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"KvGeometry.{name} is {getattr(self, name)}; it must be at least 1")
        if self.kv_factor not in (1, 2):
            raise ValueError(f"KvGeometry.kv_factor is {self.kv_factor}; it must be 2 (K and V) or 1 (MLA)")

    @property
    def row_elements(self) -> int:
        """Elements of K (or V, or the latent) of one block and one layer."""
        return self.kv_heads * self.block_size * self.head_dim

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token over all layers."""
        return self.num_layers * self.kv_factor * self.kv_heads * self.head_dim * dtype.itemsize

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True, eq=False)
class LayeredPool:
    """A pool whose layers lie apart, as vLLM's do: K and V of each layer, [blocks, kv_heads, block_size, head_dim] with
    any strides; without values, K is a latent row that is both (MLA). It has a tensor's `device`, `dtype` and `shape`,
    that of the pool in one tensor."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...] = ()

    @property
    def kinds(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """K and V, or the latent rows, of all layers each."""
        return (self.keys, self.values) if self.values else (self.keys,)

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def is_cuda(self) -> bool:
        return self.keys[0].is_cuda

    @property
    def shape(self) -> tuple[int, int, int, int]:
        blocks, *row = self.keys[0].shape
        return blocks, len(self.keys), len(self.kinds), math.prod(row)

    def layers(self, first: int, end: int) -> LayeredPool:
        """Layers `first .. end - 1`, without a copy."""
        return LayeredPool(self.keys[first:end], self.values[first:end])


Pool = torch.Tensor | LayeredPool


class PoolLayer(NamedTuple):
    """One layer of a pool: [blocks, layers, kv_factor, kv_heads * block_size * head_dim], or a LayeredPool."""

    pool: Pool
    layer: int
    geometry: KvGeometry


@dataclass(frozen=True, slots=True)
class PagedKv:
    """One sequence in a paged pool: position p lies in block `block_ids[p // block_size]`, slot `p % block_size`.

    `pool`: [blocks, layers, kv_factor, kv_heads * block_size * head_dim], K then V, or a LayeredPool; `block_ids`:
    int64 [n]. Keep `block_ids` on the host: they are checked there before every write, and reading them from a device
    would wait for it.
    """

    pool: Pool
    block_ids: torch.Tensor
    geometry: KvGeometry

    @property
    def capacity(self) -> int:
        """Positions that the blocks hold."""
        return self.block_ids.numel() * self.geometry.block_size

    def places(self, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and slots of the positions from `start` on, each int64 [length], on the pool's device."""
        positions, size = torch.arange(start, start + length), self.geometry.block_size
        blocks, slots = self.block_ids.cpu()[positions // size], positions % size
        return blocks.to(self.pool.device, non_blocking=True), slots.to(self.pool.device, non_blocking=True)

    def layers(self, first: int, end: int) -> PagedKv:
        """Layers `first .. end - 1`, without a copy."""
        pool = self.pool.layers(first, end) if isinstance(self.pool, LayeredPool) else self.pool[:, first:end]
        return replace(self, pool=pool, geometry=replace(self.geometry, num_layers=end - first))


@dataclass(frozen=True, slots=True)
class ContiguousKv:
    """One donor's KV: [layers, kv_factor, kv_heads, tokens, head_dim], K then V; any strides, on any device."""

    tensor: torch.Tensor

    @property
    def capacity(self) -> int:
        """Positions that the tensor holds."""
        return self.tensor.shape[3]

    def layers(self, first: int, end: int) -> ContiguousKv:
        """Layers `first .. end - 1`, without a copy."""
        return ContiguousKv(self.tensor[first:end])


def pool_view(pool: torch.Tensor, geometry: KvGeometry) -> torch.Tensor:
    """Views `pool` as [blocks, layers, kv_factor, kv_heads, block_size, head_dim], without a copy.

    Raises ValueError when the pool does not have the geometry's shape.
    """
    check_pool(pool, geometry)
    return pool.view(*pool.shape[:3], geometry.kv_heads, geometry.block_size, geometry.head_dim)


def layer_view(pool: Pool, geometry: KvGeometry, layer: int, kind: int) -> torch.Tensor:
    """Views K, or the latent, (kind 0) or V (kind 1) of one layer as [blocks, kv_heads, block_size, head_dim], without
    a copy."""
    if isinstance(pool, LayeredPool):
        return pool.kinds[kind][layer]
    return pool_view(pool, geometry)[:, layer, kind]


def indexable(values: torch.Tensor) -> torch.Tensor:
    """`values`, as bytes where torch cannot index their dtype."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def check_pool(pool: Pool, geometry: KvGeometry, name: str = "pool") -> None:
    """Raises ValueError, naming the tensor and its bound, when `pool` is not a pool of this geometry."""
    if isinstance(pool, LayeredPool):
        _check_layers(pool, geometry, name)
        return
    expected = (geometry.num_layers, geometry.kv_factor, geometry.row_elements)
    if pool.ndim != 4 or tuple(pool.shape[1:]) != expected:
        raise ValueError(
            f"{name} has shape {list(pool.shape)}; [blocks, {', '.join(map(str, expected))}] is needed for {geometry}"
        )
    check_dtype(pool.dtype, name)
    if pool.stride(3) != 1:
        raise ValueError(f"{name} has stride {pool.stride(3)} in its last dimension; it must be 1")


def _check_layers(pool: LayeredPool, geometry: KvGeometry, name: str) -> None:
    check_dtype(pool.dtype, name)
    blocks = pool.shape[0]
    row = (blocks, geometry.kv_heads, geometry.block_size, geometry.head_dim)
    found = {(tuple(each.shape), each.dtype, each.device) for kind in pool.kinds for each in kind}
    counts = [len(kind) for kind in pool.kinds]
    if found != {(row, pool.dtype, pool.device)} or counts != [geometry.num_layers] * geometry.kv_factor:
        raise ValueError(
            f"{name} has {counts} layers of {sorted(map(str, found))}; {geometry.num_layers} of {list(row)} in each of "
            f"{geometry.kv_factor} kinds, all of one dtype on one device, are needed for {geometry}"
        )


def check_dtype(dtype: torch.dtype, name: str) -> None:
    """Raises ValueError when `dtype` is none of MOVABLE_DTYPES."""
    if dtype not in MOVABLE_DTYPES:
        supported = ", ".join(str(each).removeprefix("torch.") for each in MOVABLE_DTYPES)
        raise ValueError(f"{name} is {dtype}; supported are {supported}")
