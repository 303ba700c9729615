"""The pool as TensorRT-LLM's V2 cache manager describes it: byte ranges that repeat for every block, by layer group.

Shaped after `tensorrt_llm/_torch/pyexecutor/connectors/kv_cache_layout.py`. Upstream describes raw device memory; here
a region is a part of the pool tensor, and its addresses are that tensor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

BAD_PAGE_INDEX = -1


@dataclass(frozen=True, slots=True)
class KvCacheBufferRef:
    """One layer's keys or values (`role` "key" or "value") in a region."""

    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True, slots=True)
class KvCacheRegion:
    """`size` bytes of neighbouring buffers in each of `num_slots` blocks: block i begins at `base + stride * i`.

    `rows` is the part of the pool that holds them, [blocks, layers, 2, row].
    """

    rows: torch.Tensor
    buffers: tuple[KvCacheBufferRef, ...]

    @property
    def base(self) -> int:
        return self.rows.data_ptr()

    @property
    def size(self) -> int:
        return self.rows[0].numel() * self.rows.element_size()

    @property
    def stride(self) -> int:
        return self.rows.stride(0) * self.rows.element_size()

    @property
    def num_slots(self) -> int:
        return self.rows.shape[0]

    def address_of(self, slot_id: int) -> int:
        """Raises IndexError outside the slots: -1 would otherwise be another request's block."""
        if not 0 <= slot_id < self.num_slots:
            raise IndexError(f"slot {slot_id} is out of range; it must be in 0..{self.num_slots - 1}")
        return self.base + self.stride * slot_id

    def as_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """A view [num_slots, size in `dtype`]."""
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
    listed = [sorted(layers) for layers in (groups or [range(num_layers)])]
    if sorted(layer for layers in listed for layer in layers) != list(range(num_layers)):
        raise ConfigurationError(
            f"layer_groups is {listed}; each of the model's {num_layers} layers must be in exactly one group"
        )
    described = []
    for group_id, layers in enumerate(listed):
        regions = tuple(_region(pool, run) for run in _runs(layers))
        described.append(KvCacheLayerGroupLayout(group_id, tuple(layers), None, regions))
    return KvCacheLayout(tokens_per_block, tuple(described), pool.dtype)


def _region(pool: torch.Tensor, layers: range) -> KvCacheRegion:
    buffers = tuple(KvCacheBufferRef(layer, role) for layer in layers for role in ("key", "value"))
    return KvCacheRegion(pool[:, layers.start : layers.stop], buffers)


def _runs(layers: Sequence[int]) -> Iterator[range]:
    """Runs of consecutive layers: neighbours in memory."""
    start = 0
    for index in range(1, len(layers) + 1):
        if index == len(layers) or layers[index] != layers[index - 1] + 1:
            yield range(layers[start], layers[index - 1] + 1)
            start = index
