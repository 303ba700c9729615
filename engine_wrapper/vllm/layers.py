"""vLLM's KV caches as one pool: a tensor for each layer, in a layout that hangs on version, backend and processor.

No layout is believed. A few random tokens are written into a small cache by the attention backend itself; the views
through which they can be read again are those of the layout.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from kernels.layout import LayeredPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Views = tuple[torch.Tensor, torch.Tensor]

# Over the layers of Transformers vLLM names an attention by its number alone.
_INDEX = re.compile(r"(?:^|\.)layers\.(\d+)\.|^(\d+)\.attn$")
_PROBE_BLOCKS = 2


def in_order(names: Mapping[str, Any]) -> list[str] | None:
    """The names of the caches by layer, lowest first; None where they do not count layers from 0 without a gap."""
    found = {int(match[1] or match[2]): name for name in names if (match := _INDEX.search(name))}
    return [found[index] for index in range(len(names))] if sorted(found) == list(range(len(names))) else None


def layered_pool(
    caches: Mapping[str, torch.Tensor], attention: Mapping[str, Any], kv_heads: int, head_dim: int, block_size: int
) -> LayeredPool | None:
    """The caches, by name, as a pool; None where their layout is none that is known. `attention`: each one's module.

    Writes into no cache: it probes one like them.
    """
    names = in_order(caches)
    if not names:
        return None
    first = caches[names[0]]
    if hasattr(attention[names[0]], "kv_lora_rank"):
        rows = [_latent_rows(caches[name], block_size, head_dim) for name in names]
        found = tuple(each for each in rows if each is not None)
        is_known = len(found) == len(names) and _latent_reads_back(found[0], attention[names[0]])
        return LayeredPool(found) if is_known else None
    shape = (kv_heads, block_size, head_dim)
    for view in _LAYOUTS:
        if _reads_back(view, first, attention[names[0]], shape):
            pairs = [view(caches[name], *shape) for name in names]
            keys, values = zip(*(pair for pair in pairs if pair is not None), strict=True)
            return LayeredPool(keys, values) if len(keys) == len(names) else None
    return None


def _reads_back(
    view: Callable[..., Views | None], cache: torch.Tensor, attention: Any, shape: tuple[int, int, int]
) -> bool:
    """Whether what the backend writes into a small cache of the same kind is read through `view`."""
    kv_heads, block_size, head_dim = shape
    if view(cache, *shape) is None or not callable(getattr(attention.impl, "do_kv_cache_update", None)):
        return False
    # The blocks are the first dimension, or stand behind K and V.
    blocks = 1 if view is _kinds_outside else 0
    small = torch.zeros_like(cache.narrow(blocks, 0, _PROBE_BLOCKS), memory_format=torch.preserve_format)
    generator = torch.Generator().manual_seed(0)
    tokens = _PROBE_BLOCKS * block_size
    keys, values = (
        torch.randn(tokens, kv_heads, head_dim, generator=generator).to(cache.device, cache.dtype) for _ in range(2)
    )
    slots = torch.randperm(tokens, generator=generator).to(cache.device)
    attention.impl.do_kv_cache_update(attention, keys, values, small, slots)
    read = view(small, *shape)
    assert read is not None
    # [blocks, kv_heads, block_size, head_dim] -> [slots, kv_heads, head_dim]
    found = [each.transpose(1, 2).flatten(0, 1)[slots] for each in read]
    return torch.equal(found[0], keys) and torch.equal(found[1], values)


def _latent_rows(cache: torch.Tensor, block_size: int, head_dim: int) -> torch.Tensor | None:
    """The cache of a latent attention as [blocks, 1, block_size, head_dim]; before vLLM 0.32 it is without the 1."""
    rows = cache.unsqueeze(1) if cache.ndim == 3 else cache
    return rows if rows.shape[1:] == (1, block_size, head_dim) else None


def _latent_reads_back(cache: torch.Tensor, attention: Any) -> bool:
    """Whether what the backend of a latent attention writes into a small cache of the same kind lies there as one row a
    slot: channels free of position first, those that turn behind them."""
    if not callable(getattr(attention.impl, "do_kv_cache_update", None)):
        return False
    small = torch.zeros_like(cache[:_PROBE_BLOCKS, 0], memory_format=torch.preserve_format)
    generator, tokens = torch.Generator().manual_seed(0), small.shape[0] * small.shape[1]
    rows = torch.randn(tokens, small.shape[2], generator=generator).to(cache.device, cache.dtype)
    slots = torch.randperm(tokens, generator=generator).to(cache.device)
    latent, turning = rows.split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=1)
    written = latent.contiguous(), turning.contiguous().unsqueeze(1)
    attention.impl.do_kv_cache_update(*written, small, slots, attention.kv_cache_dtype, attention._k_scale)
    return torch.equal(small.flatten(0, 1)[slots], rows)


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
