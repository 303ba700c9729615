"""KV of the benchmarks' model, with random values made on the spot."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.layout import ContiguousKv, KvGeometry, LayeredPool, PagedKv
from kernels.rope import RopeRotation

# Qwen2.5-7B: 28 layers, 4 KV heads, head_dim 128, rope_theta 1e6; 32 tokens a block.
QWEN_7B = KvGeometry(num_layers=28, kv_heads=4, head_dim=128, block_size=32)
ROTATION = RopeRotation(tuple(1e6 ** (-2 * plane / 128) for plane in range(64)), 128)
# What a layer's cache of vLLM holds, outermost first: as its memory lies, K and V are the halves of one axis.
VLLM_BLOCK_SIZE = 16
VLLM_LAYOUTS = {
    "blocks_kinds_nhd": ("blocks", "kinds", "tokens", "heads", "channels"),
    "blocks_kinds_hnd": ("blocks", "kinds", "heads", "tokens", "channels"),
    "kinds_blocks_nhd": ("kinds", "blocks", "tokens", "heads", "channels"),
    "blocks_heads_channels": ("blocks", "heads", "tokens", "kinds", "channels"),
}
TOKENS = (4096, 8192, 16384, 24576, 32768)
SHIFT = 7


def random_donor(tokens: int, geometry: KvGeometry = QWEN_7B, dtype: torch.dtype = torch.bfloat16) -> ContiguousKv:
    """A donor of `tokens` random tokens on the card."""
    shape = (geometry.num_layers, geometry.kv_factor, geometry.kv_heads, tokens, geometry.head_dim)
    return ContiguousKv(torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(dtype))


def random_pool(tokens: int, geometry: KvGeometry = QWEN_7B, dtype: torch.dtype = torch.bfloat16) -> PagedKv:
    """A pool of random values that holds `tokens` tokens in shuffled blocks."""
    blocks = torch.randperm(geometry.blocks_for(tokens), generator=torch.Generator().manual_seed(0))
    shape = (len(blocks), geometry.num_layers, geometry.kv_factor, geometry.row_elements)
    return PagedKv(torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(dtype), blocks, geometry)


def random_layers(
    layout: str, tokens: int, geometry: KvGeometry = QWEN_7B, dtype: torch.dtype = torch.bfloat16
) -> PagedKv:
    """As `random_pool`, in one of `VLLM_LAYOUTS` and in blocks of vLLM's size: a tensor a layer."""
    sizes = replace(geometry, block_size=VLLM_BLOCK_SIZE)
    blocks = torch.randperm(sizes.blocks_for(tokens), generator=torch.Generator().manual_seed(0))
    axes = VLLM_LAYOUTS[layout]
    lengths = {
        "blocks": len(blocks),
        "kinds": 2,
        "heads": sizes.kv_heads,
        "tokens": sizes.block_size,
        "channels": sizes.head_dim,
    }
    order = [axes.index(axis) for axis in ("kinds", "blocks", "heads", "tokens", "channels")]
    shape = [lengths[axis] for axis in axes]
    caches = [torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(dtype) for _ in range(sizes.num_layers)]
    keys, values = zip(*(cache.permute(order) for cache in caches), strict=True)
    return PagedKv(LayeredPool(keys, values), blocks, sizes)
