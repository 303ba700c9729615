"""Attention of queries at any positions of several sequences to a paged pool, if asked in a window and with sinks.

If Triton is installed (the extra `gpu`), its kernels serve pools on a CUDA device; torch serves all others. With
TRITON_INTERPRET=1, Triton's interpreter serves pools on the host, to test the kernels without a card."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kernels.device import triton_serves
from kernels.layout import LayeredPool, PoolLayer, SequenceRows, check_rows, check_written, in_chunks
from kernels.sparse_prefill import by_torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SequenceRows", "in_chunks", "sparse_prefill", "write_rows"]


def write_rows(k: torch.Tensor, v: torch.Tensor | None, kv: PoolLayer, sequences: Sequence[SequenceRows]) -> None:
    """Write each row's rotated key and value, [rows, kv_heads, head_dim], into its position's slot.

    With kv_factor 1 (MLA) `k` is the latent, without a `v`. A pool in float8_e4m3fn takes rows of any other dtype,
    and saturates. The sequences cover the rows in order. Raises ValueError, naming the tensor and its bound, before
    anything is written."""
    if not sequences:
        return
    check_written(k, v, kv, sequences)
    if _triton_serves(kv):
        from kernels.sparse_prefill import triton_attention

        triton_attention.write_rows(k, v, kv, sequences)
    else:
        by_torch.write_rows(k, v, kv, sequences)


def sparse_prefill(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each query to positions 0..p of its own sequence, p being its position, or to the last `window` of them.

    `q`: [rows, heads, head_dim], heads a multiple of kv_heads (query head h reads KV head h // (heads / kv_heads)). The
    pool must hold K and V, not latent rows, of every position that a query sees. `scale`, above 0, multiplies the
    scores. `window`: tokens, the query's own among them (Transformers, `masking_utils.py`, sliding_window_overlay).
    `sinks`: logits of any float dtype, [heads], in the softmax's denominator only (Transformers, `modeling_gpt_oss.py`,
    eager_attention_forward). K and V in float8_e4m3fn are read as numbers of q's dtype: their scale is 1. `lse`,
    float32 [rows, heads], is filled with the logarithm of each row's sum of exp(score); a sink's score is one of them.
    Returns [rows, heads, head_dim] in q's dtype. Raises ValueError, naming the tensor and its bound."""
    if kv.geometry.kv_factor != 2:
        raise ValueError(f"KvGeometry.kv_factor is {kv.geometry.kv_factor}; rows attend to K and V, 2")
    check_queries(q, kv, sequences, scale, window, sinks, lse)
    if sequences and _triton_serves(kv):
        from kernels.sparse_prefill import triton_attention

        return triton_attention.sparse_prefill(q, kv, sequences, scale, window, sinks, lse=lse)
    return by_torch.sparse_prefill(q, kv, sequences, scale, window, sinks, lse)


def check_queries(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Raise ValueError, naming the tensor and its bound, unless the arguments of `sparse_prefill` fit one another."""
    geometry = kv.geometry
    if q.ndim != 3 or q.shape[1] < 1 or q.shape[1] % geometry.kv_heads:
        raise ValueError(
            f"q has shape {list(q.shape)}; [rows, a multiple of {geometry.kv_heads} heads, {geometry.head_dim}] is "
            "needed"
        )
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}; it must be finite and above 0")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1 token, or None for all")
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.device != q.device or not sinks.is_floating_point()):
        raise ValueError(
            f"sinks is {sinks.dtype} of shape {list(sinks.shape)} on {sinks.device}; floats of shape [{q.shape[1]}] on "
            f"{q.device} are needed"
        )
    check_rows({"q": q}, q.shape[1], kv, sequences)
    if lse is not None:
        check_float32("lse", lse, q.shape[:2], q.device)


def check_float32(name: str, tensor: torch.Tensor, shape: Sequence[int], device: torch.device) -> None:
    """Raise ValueError, naming the tensor and its bound, unless it is contiguous float32 of `shape` on `device`."""
    if (*tensor.shape, tensor.dtype, tensor.device) != (*shape, torch.float32, device) or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}; contiguous float32 of shape "
            f"{list(shape)} on {device} is needed"
        )


def _triton_serves(kv: PoolLayer) -> bool:
    if not isinstance(kv.pool, LayeredPool):
        return triton_serves(kv.pool, ())
    keys, *values = (kind[kv.layer] for kind in kv.pool.kinds)
    return all(each.stride() == keys.stride() for each in values) and triton_serves(keys, values)
