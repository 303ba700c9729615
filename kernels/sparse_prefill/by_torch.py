"""What `kernels.sparse_prefill` and `kernels.attention_mass` compute, in torch, of arguments that were checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kernels.layout import indexable, layer_view
from kernels.rope import saturated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import PoolLayer, SequenceRows

CHUNK_ROWS = 256
# Scores of a chunk with sinks or a log-sum-exp, which torch's own attention would not keep.
SINK_SCORES = 1 << 26
# On a CPU, masked chunks take half as long again as the causal square; a quarter more rows cost as much.
LEAST_ROWS_PER_PADDING = 4
# Rows whose attention is summed at once.
MASS_ROWS = 64


def write_rows(k: torch.Tensor, v: torch.Tensor | None, kv: PoolLayer, sequences: Sequence[SequenceRows]) -> None:
    """Write as `write_rows`; the arguments were checked."""
    pool, layer, geometry = kv
    for sequence in sequences:
        rows = slice(sequence.first_row, sequence.first_row + sequence.count)
        positions, block_ids = sequence.positions.to(pool.device), sequence.block_ids.to(pool.device)
        blocks = block_ids[positions // geometry.block_size]
        slots = positions % geometry.block_size
        for kind, values in enumerate((k,) if v is None else (k, v)):
            held = indexable(layer_view(pool, geometry, layer, kind))
            held[blocks, :, slots] = indexable(saturated(values[rows], pool.dtype))


def sparse_prefill(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Serve `sparse_prefill`, of checked arguments: K and V are gathered once a sequence; queries attend in chunks."""
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
            output[rows] = _attend_square(q[rows], keys, values, scale)
        else:
            places, filled = sequence.host_positions - first, None if lse is None else lse[rows]
            output[rows] = _attend_masked(q[rows], keys, values, places, scale, own, sinks, filled)
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


def _attend_square(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend one row to all positions, or the last rows causally. `q`: [rows, heads, head_dim]; returns its shape."""
    # Padding rows for the few positions before them makes it a square, for which the causal kernel needs no mask.
    missing = keys.shape[1] - len(q) if len(q) > 1 else 0
    return _attended(pad(q, (0, 0, 0, 0, missing, 0)), keys, values, scale, is_causal=len(q) > 1)[missing:]


def _attended(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, **seen: Any) -> torch.Tensor:
    """Return torch's own attention of `q`, [rows, heads, head_dim], in its shape."""
    queries, is_grouped = q.transpose(0, 1)[None], q.shape[1] != keys.shape[0]
    attended = scaled_dot_product_attention(
        queries, keys[None], values[None], scale=scale, enable_gqa=is_grouped, **seen
    )
    return attended[0].transpose(0, 1)


def _attend_masked(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Return what `q`, [rows, heads, head_dim], gets, in its shape. `positions`, on the host, are places in `keys`."""
    attended, start, rows = [], 0, CHUNK_ROWS
    if sinks is not None or lse is not None:
        rows = min(rows, max(1, SINK_SCORES // (q.shape[1] * keys.shape[1])))
    # A chunk's windows leave out no token between the first and the last.
    apart = [] if window is None else (torch.nonzero(positions.diff() > window)[:, 0] + 1).tolist()
    for own in (each for part in torch.tensor_split(positions, apart) for each in torch.split(part, rows)):
        first, end = 0 if window is None else max(0, int(own[0]) - window + 1), int(own[-1]) + 1
        near, places = (keys[:, first:end], values[:, first:end]), own.to(q.device)
        tokens = torch.arange(first, end, device=q.device)
        mask = tokens <= places[:, None]
        if window is not None:
            mask &= tokens > places[:, None] - window
        chunk = slice(start, start + len(own))
        attended.append(_attend_chunk(q[chunk], *near, mask, scale, sinks, None if lse is None else lse[chunk]))
        start += len(own)
    return torch.cat(attended)


def _attend_chunk(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Return what `q`, [rows, heads, head_dim], gets, in its shape. `mask`: bool [rows, tokens]."""
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


def attention_mass(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    lse: torch.Tensor,
    window: int | None,
    into: torch.Tensor,
) -> torch.Tensor:
    """Serve `attention_mass`, of checked arguments: K is gathered once a sequence, and rows are read in chunks."""
    begin = 0
    for sequence in sequences:
        end = begin + sequence.last_position + 1
        keys = gathered(kv, sequence, 0, torch.float32, 0)  # [kv_heads, tokens, head_dim]
        tokens = torch.arange(keys.shape[1], device=q.device)
        rows = slice(sequence.first_row, sequence.first_row + sequence.count)
        chunks = (each[rows].split(MASS_ROWS) for each in (q.float(), lse))
        for queries, sums, own in zip(*chunks, sequence.positions.to(q.device)[:, None].split(MASS_ROWS), strict=True):
            seen = tokens <= own
            if window is not None:
                seen &= tokens > own - window
            grouped = queries.unflatten(1, (keys.shape[0], -1))
            scores = torch.einsum("rhgd,htd->rhgt", grouped, keys) * scale - sums.view(*grouped.shape[:3], 1)
            into[:, begin:end] += scores.masked_fill(~seen[:, None, None], -torch.inf).exp().sum((0, 2))
        begin = end
    return into
