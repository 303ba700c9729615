"""The KV pool: one tensor for all blocks of all layers, laid out as TensorRT-LLM's primary pool.

`KvCacheLayout` is how the V2 cache manager describes it: byte ranges that repeat for every block, by layer group,
shaped after `tensorrt_llm/_torch/pyexecutor/connectors/kv_cache_layout.py`. Upstream describes raw device memory; here
a region is a part of the pool tensor, and its addresses are that tensor's.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.layout import pool_view
from semblend_trt.errors import CapacityError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_wrapper.embedded.llm_args import LlmArgs
    from kernels.layout import KvGeometry

DEFAULT_POOL_BYTES = 1 << 30


class KvPool:
    """`tensor`: [blocks, layers, kv_factor, kv_heads * block_size * head_dim], K then V, or latent rows alone, in
    `layout` inside a block: "HND" or "NHD". A model runs on `computed`, which is always HND: `tensor` itself, or a copy
    of it for a forward.

    It starts as zeros: attention masks rows that no request has written, but a masked NaN would still spread. Raises
    CapacityError when there is no memory for it.
    """

    def __init__(
        self, num_blocks: int, geometry: KvGeometry, dtype: torch.dtype, device: torch.device, layout: str = "HND"
    ) -> None:
        self.geometry = geometry
        shape = (num_blocks, geometry.num_layers, geometry.kv_factor, geometry.row_elements)
        try:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            self.computed = self.tensor if layout == "HND" else torch.zeros_like(self.tensor)
        except RuntimeError as error:
            raise CapacityError(
                f"a KV pool of {num_blocks} blocks of {geometry.block_size} tokens does not fit into the memory of "
                f"{device}; lower kv_cache_config.max_tokens"
            ) from error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Runs a forward over `computed`: it begins as a copy of `tensor`, and is copied back unless the forward
        fails."""
        if self.computed is self.tensor:
            yield
            return
        sizes, rows = self.geometry, pool_view(self.computed, self.geometry)
        inside = (sizes.block_size, sizes.kv_heads, sizes.head_dim)
        registered = self.tensor.view(*self.tensor.shape[:3], *inside).transpose(3, 4)
        rows.copy_(registered)
        yield
        registered.copy_(rows)

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block's KV of all layers."""
        self.tensor[target].copy_(self.tensor[source])


def pool_dtype(asked: str, dtype: torch.dtype) -> torch.dtype:
    """What KV of a model in `dtype` is stored in: for "fp8" e4m3, by a scale of 1, as TensorRT-LLM has it for a
    checkpoint that brings none (`KvCacheConfig.dtype` of `llmapi/llm_args.py`).

    Raises ConfigurationError for another dtype than the model's.
    """
    if asked == "fp8":
        return torch.float8_e4m3fn
    if asked not in ("auto", str(dtype).removeprefix("torch.")):
        raise ConfigurationError(
            f"kv_cache_config.dtype {asked} differs from the model's {dtype}; use auto or fp8, or load the model in it"
        )
    return dtype


def pool_blocks(args: LlmArgs, max_seq_len: int, geometry: KvGeometry, dtype: torch.dtype) -> int:
    """Blocks of the pool that `args` asks for.

    `kv_cache_config.max_tokens` is rounded down to whole blocks. Without it the pool holds `max_batch_size` sequences
    of `max_seq_len` tokens, but at most DEFAULT_POOL_BYTES (1 GiB). Raises CapacityError when that is no block at all.
    """
    block_size, wanted = geometry.block_size, args.kv_cache_config.max_tokens
    if wanted is not None:
        if wanted < block_size:
            raise CapacityError(
                f"kv_cache_config.max_tokens {wanted} holds no block of {block_size} tokens; give at least {block_size}"
            )
        return wanted // block_size
    affordable = DEFAULT_POOL_BYTES // (geometry.bytes_per_token(dtype) * block_size)
    if affordable < 1:
        raise CapacityError(
            f"one block of this model needs more than the default pool of {DEFAULT_POOL_BYTES} bytes; "
            "set kv_cache_config.max_tokens"
        )
    return min(args.max_batch_size * geometry.blocks_for(max_seq_len), affordable)


@dataclass(frozen=True, slots=True)
class KvCacheBufferRef:
    """One layer's keys or values (`role` "key" or "value") in a region."""

    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True, slots=True)
class KvCacheRegion:
    """Neighbouring buffers in each block. `rows` is the part of the pool that holds them, [blocks, layers, 2, row]."""

    rows: torch.Tensor
    buffers: tuple[KvCacheBufferRef, ...]

    @property
    def base(self) -> int:
        return self.rows.data_ptr()

    @property
    def num_slots(self) -> int:
        return self.rows.shape[0]

    def address_of(self, slot_id: int) -> int:
        """Raises IndexError outside the slots: -1 would otherwise be another request's block."""
        if not 0 <= slot_id < self.num_slots:
            raise IndexError(f"slot {slot_id} is out of range; it must be in 0..{self.num_slots - 1}")
        return self.rows[slot_id].data_ptr()

    def as_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """A view [num_slots, elements of `dtype`]."""
        return self.rows.flatten(1).view(dtype)


@dataclass(frozen=True, slots=True)
class KvCacheLayerGroupLayout:
    """Layers whose blocks share one space of ids; `window_size` None is full attention."""

    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[KvCacheRegion, ...]


@dataclass(frozen=True, slots=True)
class KvCacheLayout:
    """All layer groups of one pool of `dtype`."""

    tokens_per_block: int
    groups: tuple[KvCacheLayerGroupLayout, ...]
    dtype: torch.dtype

    def as_single_pool_tensor(self) -> torch.Tensor | None:
        """The pool as V1 registers it, [blocks, layers, 2, row]; None for several groups or regions."""
        if len(self.groups) != 1 or len(self.groups[0].regions) != 1:
            return None
        return self.groups[0].regions[0].rows


def cache_layout(
    pool: torch.Tensor, tokens_per_block: int, groups: Sequence[Sequence[int]] | None = None
) -> KvCacheLayout:
    """Describes `pool`, [blocks, layers, 2, row]; `groups` lists each group's layers, all in one group by default.

    Raises ConfigurationError unless every layer is in exactly one group.
    """
    num_layers = pool.shape[1]
    listed = [tuple(sorted(layers)) for layers in (groups or [range(num_layers)])]
    if sorted(layer for layers in listed for layer in layers) != list(range(num_layers)):
        raise ConfigurationError(
            f"layer_groups is {[list(layers) for layers in listed]}; each of the model's {num_layers} layers must be "
            "in exactly one group"
        )
    described = (
        KvCacheLayerGroupLayout(group_id, layers, None, tuple(_region(pool, run) for run in _runs(layers)))
        for group_id, layers in enumerate(listed)
    )
    return KvCacheLayout(tokens_per_block, tuple(described), pool.dtype)


def _region(pool: torch.Tensor, layers: range) -> KvCacheRegion:
    buffers = tuple(KvCacheBufferRef(layer, role) for layer in layers for role in ("key", "value")[: pool.shape[2]])
    return KvCacheRegion(pool[:, layers.start : layers.stop], buffers)


def _runs(layers: Sequence[int]) -> Iterator[range]:
    """Runs of consecutive layers: neighbours in memory."""
    start = 0
    for index in range(1, len(layers) + 1):
        if index == len(layers) or layers[index] != layers[index - 1] + 1:
            yield range(layers[start], layers[index - 1] + 1)
            start = index
