"""Attention of whole prompts to their own fresh K and V, through torch's SDPA.

On Hopper torch takes cuDNN, the fastest there is, which builds a plan for every length it has not seen: about a third
of a second, more than many a prefill. So lengths are padded to buckets, and only prepared buckets are served; the
kernel over the paged pool, which is a little slower, takes all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Iterable

BUCKETS_AN_OCTAVE = 16
SMALLEST_BUCKET = 64


def bucket_rows(rows: int) -> int:
    """The smallest bucket that holds `rows`: at most a sixteenth more."""
    octave = 1 << max(rows - 1, SMALLEST_BUCKET - 1).bit_length() - 1
    step = max(octave // BUCKETS_AN_OCTAVE, 1)
    return max(-(-rows // step) * step, SMALLEST_BUCKET)


class WholeAttention:
    """Causal attention over rows [rows, heads + 2 * kv_heads, head_dim]: query heads, then key and value heads."""

    def __init__(self, num_heads: int, kv_heads: int, head_dim: int, scale: float) -> None:
        self._shape = num_heads + 2 * kv_heads, head_dim
        self._split = [num_heads, kv_heads, kv_heads]
        self._scale = scale
        self._prepared: set[int] = set()

    def prepare(self, lengths: Iterable[int], dtype: torch.dtype, device: torch.device) -> None:
        """Has plans built for prompts of these lengths. The library keeps them for the calling thread only."""
        for bucket in sorted({bucket_rows(length) for length in lengths} - self._prepared):
            self._attend(torch.zeros((bucket, *self._shape), dtype=dtype, device=device))
            self._prepared.add(bucket)

    def serves(self, rows: int, device: torch.device) -> bool:
        """True where no plan is needed or one has been built."""
        return device.type != "cuda" or bucket_rows(rows) in self._prepared

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """`heads`: [rows, heads + 2 * kv_heads, head_dim], rotated; returns [rows, heads, head_dim]."""
        rows = heads.shape[0]
        if heads.is_cuda and bucket_rows(rows) > rows:
            # Padded rows stand behind all others, which therefore do not see them.
            return self._attend(pad(heads, (0, 0, 0, 0, 0, bucket_rows(rows) - rows)))[:rows]
        return self._attend(heads)

    def _attend(self, heads: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.transpose(0, 1)[None] for part in heads.split(self._split, 1))
        attended = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self._scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return attended[0].transpose(0, 1)
