"""vLLM's KV caches as one pool: a tensor for each layer, in a layout that hangs on version, backend and processor.

No layout is believed. A few random tokens are written into a small cache by the attention backend itself; the views
through which they can be read again are those of the layout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine_wrapper.vllm.kv_scales import head_scales
from kernels.layout import LayeredPool, indexable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine_wrapper.vllm.kv_scales import Scale
    from kernels.layout import KvGeometry

# K and V, or the latent rows alone.
Views = tuple[torch.Tensor, ...]

# Over the layers of Transformers vLLM names an attention by its number alone.
_INDEX = re.compile(r"(?:^|\.)layers\.(\d+)\.|^(\d+)\.attn$")
_PROBE_BLOCKS = 2


def in_order(names: Mapping[str, Any]) -> list[str] | None:
    """The names of the caches by layer, lowest first; None where they do not count layers from 0 without a gap."""
    found = {int(match[1] or match[2]): name for name in names if (match := _INDEX.search(name))}
    return [found[index] for index in range(len(names))] if sorted(found) == list(range(len(names))) else None


@dataclass(frozen=True, slots=True, eq=False)
class CacheLayout:
    """Where K and V, or latent rows (MLA), lie in a cache. `shape`: kv_heads, block_size, head_dim; `dtype` is of what
    is stored, which e4m3 does in bytes."""

    view: Callable[..., Views | None]
    shape: tuple[int, int, int]
    dtype: torch.dtype

    def views(self, cache: torch.Tensor) -> Views | None:
        """K and V of a cache, or its latent rows, each [blocks, kv_heads, block_size, head_dim]; None where it is of
        another form."""
        return self.view(cache.view(self.dtype), *self.shape)

    def stored(
        self,
        attention: Any,
        cache: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        slots: torch.Tensor | None = None,
    ) -> Views:
        """What the backend makes of rows, as `write` takes them, each in `dtype`: it writes them into memory of their
        own like `cache`, at `slots`, int64 [rows], or one behind the other."""
        slots = torch.arange(len(keys), device=cache.device) if slots is None else slots
        # The blocks are the first dimension, or stand behind K and V.
        dim, blocks = int(self.view is _kinds_outside), -(-len(keys) // self.shape[1])
        small = torch.zeros_like(cache.narrow(dim, 0, blocks), memory_format=torch.preserve_format)
        write(attention, small, keys, values, slots)
        read = self.views(small)
        assert read is not None
        found = [indexable(each).transpose(1, 2).flatten(0, 1)[slots].view(self.dtype) for each in read]
        return tuple(found)


def write(
    attention: Any, cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, slots: torch.Tensor
) -> None:
    """Has the backend write rows, [rows, kv_heads, head_dim], into `cache` at `slots`, int64 [rows]. Without values
    `keys` are latent rows (MLA), which it takes in two parts: the channels free of position, and those that turn."""
    update = attention.impl.do_kv_cache_update
    if values is not None:
        update(attention, keys, values, cache, slots)
        return
    parts = keys.flatten(1).split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=1)
    latent, turning = (each.contiguous() for each in parts)
    # Kernels take the cache without the head that vLLM 0.32 gives it.
    rows = cache.squeeze(1) if cache.ndim == 4 else cache
    update(latent, turning.unsqueeze(1), rows, slots, attention.kv_cache_dtype, attention._k_scale)


def fresh_rows(kv: Sequence[torch.Tensor], geometry: KvGeometry) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K and V of all rows, [rows, kv_heads, head_dim], that an attention is called with behind the queries; a latent
    attention gets the two parts of its row first, which come back as K."""
    if geometry.kv_factor == 2:
        keys, values = (each.view(-1, geometry.kv_heads, geometry.head_dim) for each in kv)
        return keys, values
    latent, turning, *_ = kv
    return torch.cat([latent, turning.flatten(1)], dim=1).unsqueeze(1), None


def layout_of(
    cache: torch.Tensor,
    attention: Any,
    shape: tuple[int, int, int],
    rows: torch.dtype | None = None,
    scales: tuple[Scale, Scale] | None = None,
) -> CacheLayout | None:
    """The layout of `cache`, [kv_heads, block_size, head_dim] being `shape`; None where it is none that is known.

    With `scales` of K and V the backend stores rows of dtype `rows` in e4m3, latent ones by that of K. Writes into no
    cache: it probes one like it.
    """
    for view in (_latent,) if hasattr(attention, "kv_lora_rank") else _LAYOUTS:
        layout = CacheLayout(view, shape, cache.dtype if scales is None else torch.float8_e4m3fn)
        if _reads_back(layout, cache, attention, rows or cache.dtype, scales or (1.0, 1.0)):
            return layout
    return None


def layered_pool(caches: Mapping[str, torch.Tensor], layout: CacheLayout) -> LayeredPool | None:
    """The caches, by name, as a pool; None where one of them is of another form, or a layer is missing."""
    pairs = [layout.views(caches[name]) for name in in_order(caches) or ()]
    if not pairs or None in pairs:
        return None
    return LayeredPool(*zip(*(pair for pair in pairs if pair is not None), strict=True))


def _reads_back(
    layout: CacheLayout, cache: torch.Tensor, attention: Any, rows: torch.dtype, scales: tuple[Scale, Scale]
) -> bool:
    """Whether what the backend writes into a small cache of the same kind is read through the layout."""
    kv_heads, block_size, head_dim = layout.shape
    views = layout.views(cache)
    if views is None or not callable(getattr(attention.impl, "do_kv_cache_update", None)):
        return False
    generator = torch.Generator().manual_seed(0)
    tokens = _PROBE_BLOCKS * block_size
    # What is stored without rounding; in e4m3 a little more, since vLLM's CPU backend (0.28) rounds towards 0.
    more = 1.0 if layout.dtype != torch.float8_e4m3fn else 1 + 2**-6
    wanted = [torch.randn(tokens, kv_heads, head_dim, generator=generator).to(layout.dtype).float() for _ in views]
    factors = head_scales(scales, kv_heads)[..., None] * more
    keys, *values = ((each * own).to(cache.device, rows) for each, own in zip(wanted, factors, strict=False))
    slots = torch.randperm(tokens, generator=generator).to(cache.device)
    found = layout.stored(attention, cache, keys, values[0] if values else None, slots)
    return all(torch.equal(each.float().cpu(), own) for each, own in zip(found, wanted, strict=True))


def _latent(cache: torch.Tensor, kv_heads: int, block_size: int, head_dim: int) -> Views | None:
    """[blocks, 1, block_size, head_dim], one row that is K and V (MLA); before vLLM 0.32 it is without the 1."""
    rows = cache.unsqueeze(1) if cache.ndim == 3 else cache
    return (rows,) if rows.shape[1:] == (kv_heads, block_size, head_dim) else None


def _channels(cache: torch.Tensor, kv_heads: int, block_size: int, head_dim: int) -> Views | None:
    """[blocks, kv_heads, block_size, K and V]"""
    if cache.shape[1:] != (kv_heads, block_size, 2 * head_dim):
        return None
    return cache[..., :head_dim], cache[..., head_dim:]


def _halves(cache: torch.Tensor, kv_heads: int, block_size: int, head_dim: int) -> Views | None:
    """[blocks, kv_heads, K and V of block_size tokens each]"""
    if cache.shape[1:] != (kv_heads, block_size, 2 * head_dim) or not cache.is_contiguous():
        return None
    both = cache.view(len(cache), kv_heads, 2 * block_size, head_dim)
    return both[:, :, :block_size], both[:, :, block_size:]


def _transposed_keys(cache: torch.Tensor, kv_heads: int, block_size: int, head_dim: int) -> Views | None:
    """As `_halves`, with the tokens of K side by side."""
    halves = _halves(cache, kv_heads, block_size, head_dim)
    if halves is None:
        return None
    keys, values = halves
    block, head, _, _ = keys.stride()
    return keys.as_strided(keys.shape, (block, head, 1, block_size)), values


def _kinds_inside(cache: torch.Tensor, kv_heads: int, block_size: int, head_dim: int) -> Views | None:
    """[blocks, 2, block_size, kv_heads, head_dim], in any order of memory"""
    if cache.shape[1:] != (2, block_size, kv_heads, head_dim):
        return None
    return cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)


def _kinds_outside(cache: torch.Tensor, kv_heads: int, block_size: int, head_dim: int) -> Views | None:
    """[2, blocks, block_size, kv_heads, head_dim], in any order of memory"""
    if cache.ndim != 5 or (cache.shape[0], *cache.shape[2:]) != (2, block_size, kv_heads, head_dim):
        return None
    return cache[0].transpose(1, 2), cache[1].transpose(1, 2)


_LAYOUTS = (_channels, _halves, _transposed_keys, _kinds_inside, _kinds_outside)
