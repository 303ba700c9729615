"""Attention of queries at any positions of several sequences to a paged pool, if asked in a window and with sinks.

If Triton is installed (the extra `gpu`), its kernels serve pools on a CUDA device; torch serves all others. With
TRITON_INTERPRET=1, Triton's interpreter serves pools on the host, to test the kernels without a card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kernels.device import triton_serves
from kernels.layout import (
    LayeredPool,
    PoolLayer,
    SequenceRows,
    check_rows,
    check_written,
    in_chunks,
    indexable,
    layer_view,
)
from kernels.rope import saturated

__all__ = ["Queries", "SequenceRows", "in_chunks", "sparse_prefill", "write_rows"]

CHUNK_ROWS = 256
# Scores of a chunk with sinks or a log-sum-exp, which torch's own attention would not keep.
SINK_SCORES = 1 << 26
# On a CPU, masked chunks take half as long again as the causal square; a quarter more rows cost as much.
LEAST_ROWS_PER_PADDING = 4


class Queries(NamedTuple):
    """What attention is asked for: the arguments of `sparse_prefill`."""

    q: torch.Tensor
    kv: PoolLayer
    sequences: Sequence[SequenceRows]
    scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None
    lse: torch.Tensor | None = None


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
        write_rows_by_torch(k, v, kv, sequences)


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
    asked = Queries(q, kv, sequences, scale, window, sinks, lse)
    check_queries(asked)
    if sequences and _triton_serves(kv):
        from kernels.sparse_prefill import triton_attention

        return triton_attention.sparse_prefill(asked)
    return sparse_prefill_by_torch(asked)


def check_queries(asked: Queries) -> None:
    """Raise ValueError, naming the tensor and its bound, unless what is asked for fits together."""
    q, kv, sequences, scale, window, sinks, lse = asked
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


def write_rows_by_torch(
    k: torch.Tensor, v: torch.Tensor | None, kv: PoolLayer, sequences: Sequence[SequenceRows]
) -> None:
    """Serve `write_rows`, of checked arguments."""
    pool, layer, geometry = kv
    for sequence in sequences:
        rows = slice(sequence.first_row, sequence.first_row + sequence.count)
        positions, block_ids = sequence.positions.to(pool.device), sequence.block_ids.to(pool.device)
        blocks = block_ids[positions // geometry.block_size]
        slots = positions % geometry.block_size
        for kind, values in enumerate((k,) if v is None else (k, v)):
            held = indexable(layer_view(pool, geometry, layer, kind))
            held[blocks, :, slots] = indexable(saturated(values[rows], pool.dtype))


def sparse_prefill_by_torch(asked: Queries) -> torch.Tensor:
    """Serve `sparse_prefill`, of checked arguments: K and V are gathered once a sequence; queries attend in chunks."""
    q, kv, sequences, scale, window, sinks, lse = asked
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    for sequence in sequences:
        rows = slice(sequence.first_row, sequence.first_row + sequence.count)
        # A window over all positions hides no token.
        own = window if window is not None and window <= sequence.last_position else None
        first = 0 if own is None else max(0, sequence.first_position - own + 1)
        keys, values = (gathered(kv, sequence, first, q.dtype, kind) for kind in (0, 1))
        has_no_gap = sequence.last_position - sequence.first_position + 1 == sequence.count
        nearly_whole = has_no_gap and sequence.first_position * LEAST_ROWS_PER_PADDING <= sequence.count
        if own is None and sinks is None and lse is None and (sequence.count == 1 or nearly_whole):
            # Rows for the few positions before them make a square, for which the causal kernel needs no mask.
            missing = 0 if sequence.count == 1 else sequence.first_position
            padded = pad(q[rows], (0, 0, 0, 0, missing, 0))
            output[rows] = _attended(padded, keys, values, scale, is_causal=sequence.count > 1)[missing:]
        else:
            part = asked._replace(q=q[rows], window=own, lse=None if lse is None else lse[rows])
            output[rows] = _attend_masked(part, keys, values, sequence.host_positions - first)
    return output


def gathered(kv: PoolLayer, sequence: SequenceRows, first: int, dtype: torch.dtype, kind: int) -> torch.Tensor:
    """Return K (kind 0) or V (kind 1) of positions first..last_position in `dtype`, [kv_heads, tokens, head_dim]."""
    pool, layer, geometry = kv
    tokens, before = sequence.last_position + 1, first // geometry.block_size
    blocks = sequence.block_ids[before : geometry.blocks_for(tokens)].to(pool.device)
    # [blocks, kv_heads, block_size, head_dim]; to select along another dimension torch would copy the pool
    held = indexable(layer_view(pool, geometry, layer, kind)).index_select(0, blocks).view(pool.dtype).to(dtype)
    kept = slice(first - before * geometry.block_size, tokens - before * geometry.block_size)
    return held.transpose(0, 1).flatten(1, 2)[:, kept]


def _attended(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, **seen: Any) -> torch.Tensor:
    """Return torch's own attention of `q`, [rows, heads, head_dim], in its shape."""
    queries, is_grouped = q.transpose(0, 1)[None], q.shape[1] != keys.shape[0]
    attended = scaled_dot_product_attention(
        queries, keys[None], values[None], scale=scale, enable_gqa=is_grouped, **seen
    )
    return attended[0].transpose(0, 1)


def _attend_masked(asked: Queries, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return what one sequence's rows get, in their shape. `positions`, on the host, are places in `keys`."""
    q, _, _, _, window, sinks, lse = asked
    attended, start, rows = [], 0, CHUNK_ROWS
    if sinks is not None or lse is not None:
        rows = min(rows, max(1, SINK_SCORES // (q.shape[1] * keys.shape[1])))
    # A chunk's windows leave out no token between the first and the last.
    apart = [] if window is None else (torch.nonzero(positions.diff() > window)[:, 0] + 1).tolist()
    for own in (each for part in torch.tensor_split(positions, apart) for each in torch.split(part, rows)):
        first, end = 0 if window is None else max(0, int(own[0]) - window + 1), int(own[-1]) + 1
        places = own.to(q.device)
        tokens = torch.arange(first, end, device=q.device)
        mask = tokens <= places[:, None]
        if window is not None:
            mask &= tokens > places[:, None] - window
        chunk = slice(start, start + len(own))
        part = asked._replace(q=q[chunk], lse=None if lse is None else lse[chunk])
        attended.append(_attend_chunk(part, keys[:, first:end], values[:, first:end], mask))
        start += len(own)
    return torch.cat(attended)


def _attend_chunk(asked: Queries, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return what a chunk of rows gets, in its shape. `mask`: bool [rows, tokens]."""
    q, _, _, scale, _, sinks, lse = asked
    if sinks is None and lse is None:
        return _attended(q, keys, values, scale, attn_mask=mask)
    # [kv_heads, group, rows, head_dim]; torch's own attention knows no sinks
    queries = q.float().unflatten(1, (keys.shape[0], -1)).permute(1, 2, 0, 3)
    scores = (queries @ keys.float().transpose(1, 2)[:, None] * scale).masked_fill(~mask, -torch.inf)
    sums = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        sums = torch.logaddexp(sums, sinks.float().view(*queries.shape[:2], 1, 1))
    if lse is not None:
        lse.copy_(sums.permute(2, 0, 1, 3).flatten(1))
    weights: torch.Tensor = (scores - sums).exp()
    return (weights @ values.float()[:, None]).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
