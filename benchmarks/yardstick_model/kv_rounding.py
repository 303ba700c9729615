"""Attention to K and V as a cache in e4m3 holds them, for training and evaluation by Transformers.

The embedded engine's `KvCacheConfig(dtype="fp8")` stores K, which RoPE has rotated, and V by a scale of 1, saturating
at 448, and attention reads what is stored. Transformers hands its attention functions the same K and V.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kernels.rope import saturated
from validation.models import AUTO

ATTENTION_NAME = "semblend_fp8_kv"


class _Rounded(torch.autograd.Function):
    """Straight-through: the gradient is that of values which are not rounded.

    Bengio, Léonard and Courville 2013, https://arxiv.org/abs/1308.3432.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - the gradient needs nothing of it
        return saturated(values, torch.float8_e4m3fn).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient


def rounded(values: torch.Tensor) -> torch.Tensor:
    """`values` rounded to e4m3, saturated: same shape and dtype; the gradient passes as it is, beyond 448 too."""
    found: torch.Tensor = _Rounded.apply(values)  # type: ignore[no-untyped-call]
    return found


def rounded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention by SDPA, to rounded K and V.

    `query`: [rows, heads, queries, head_dim]; `key`, `value`: [rows, kv_heads, tokens, head_dim], K rotated, those of a
    cache included: rounding them again changes nothing. Returns [rows, queries, heads, head_dim].
    """
    output, _ = sdpa_attention_forward(module, query, rounded(key), rounded(value), attention_mask, **options)
    return output, None


AttentionInterface.register(ATTENTION_NAME, rounded_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def keep_kv(model: Any, kv_dtype: str) -> None:
    """Has the attention of `model` see K and V as a cache in `kv_dtype`, auto or fp8, holds them.

    Saved configurations do not name it. Raises ValueError for fp8 where attention is not SDPA's, or to latent rows.
    """
    if kv_dtype == AUTO:
        return
    if model.config._attn_implementation != "sdpa" or hasattr(model.config, "kv_lora_rank"):
        raise ValueError(
            f"KV in {kv_dtype} is for SDPA to heads of K and V, which {type(model).__name__} does not have"
        )
    model.set_attn_implementation(ATTENTION_NAME)
