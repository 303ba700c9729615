"""Attention of queries at any positions of several sequences to a paged pool, if asked in a window and with sinks.

Triton kernels serve pools on a CUDA device if Triton is installed (the extra `gpu`), and torch all others. With
TRITON_INTERPRET=1, Triton's interpreter serves pools on the host: so the kernels are tested without a card.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernels.dispatch import triton_serves
from kernels.layout import LayeredPool
from kernels.sparse_prefill import eager
from kernels.sparse_prefill.rows import SequenceRows, check_rows, check_written, in_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kernels.layout import PoolLayer

__all__ = ["SequenceRows", "in_chunks", "sparse_prefill", "write_rows"]


def write_rows(k: torch.Tensor, v: torch.Tensor | None, kv: PoolLayer, sequences: Sequence[SequenceRows]) -> None:
    """Writes each row's rotated key and value, [rows, kv_heads, head_dim], into its position's slot.

    With kv_factor 1 (MLA) `k` is the latent, and `v` is None. A pool in float8_e4m3fn takes rows of any other dtype,
    and saturates. The sequences cover the rows in order. Raises ValueError, naming the tensor and its bound, before
    anything is written. Without sequences it does nothing.
    """
    if not sequences:
        return
    check_written(k, v, kv, sequences)
    if _triton_serves(kv):
        from kernels.sparse_prefill import triton_attention

        triton_attention.write_rows(k, v, kv, sequences)
    else:
        eager.write_rows(k, v, kv, sequences)


def sparse_prefill(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends each query to positions 0..p of its own sequence, p being its position, or to the last `window` of them.

    `q`: [rows, heads, head_dim], heads a multiple of kv_heads (query head h reads KV head h // (heads / kv_heads)).
    K and V of every position that a query sees must be in the pool; latent rows are none. `scale`, above 0, multiplies
    the scores. `window`: tokens, the query's own among them (Transformers, `masking_utils.py`,
    sliding_window_overlay). `sinks`: a logit for each head, [heads], of any float dtype, which takes part in the
    softmax's denominator only (Transformers, `modeling_gpt_oss.py`, eager_attention_forward). K and V in float8_e4m3fn
    are read as numbers of q's dtype: their scale is 1. Returns [rows, heads, head_dim] in q's dtype. Raises ValueError,
    naming the tensor and its bound.
    """
    geometry = kv.geometry
    if q.ndim != 3 or q.shape[1] < 1 or q.shape[1] % geometry.kv_heads:
        raise ValueError(
            f"q has shape {list(q.shape)}; [rows, a multiple of {geometry.kv_heads} heads, {geometry.head_dim}] is "
            "needed"
        )
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}; it must be finite and above 0")
    if geometry.kv_factor != 2:
        raise ValueError(f"KvGeometry.kv_factor is {geometry.kv_factor}; rows attend to K and V, 2")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1 token, or None for all")
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.device != q.device or not sinks.is_floating_point()):
        raise ValueError(
            f"sinks is {sinks.dtype} of shape {list(sinks.shape)} on {sinks.device}; floats of shape [{q.shape[1]}] on "
            f"{q.device} are needed"
        )
    check_rows({"q": q}, q.shape[1], kv, sequences)
    if sequences and _triton_serves(kv):
        from kernels.sparse_prefill import triton_attention

        return triton_attention.sparse_prefill(q, kv, sequences, scale, window, sinks)
    return eager.sparse_prefill(q, kv, sequences, scale, window, sinks)


def _triton_serves(kv: PoolLayer) -> bool:
    if not isinstance(kv.pool, LayeredPool):
        return triton_serves(kv.pool, ())
    keys, *values = (kind[kv.layer] for kind in kv.pool.kinds)
    return all(each.stride() == keys.stride() for each in values) and triton_serves(keys, values)
