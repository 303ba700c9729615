"""sparse_prefill in vectorised torch: K and V gathered once a sequence, queries attended in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kernels.layout import PoolLayer, layer_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.sparse_prefill.rows import SequenceRows

CHUNK_ROWS = 256
# On a CPU, masked chunks take half as long again as the causal square; a quarter more rows cost as much.
LEAST_ROWS_PER_PADDING = 4


def write_rows(k: torch.Tensor, v: torch.Tensor | None, kv: PoolLayer, sequences: Sequence[SequenceRows]) -> None:
    """As `kernels.sparse_prefill.write_rows`; the arguments were checked."""
    pool, layer, geometry = kv
    for sequence in sequences:
        rows = slice(sequence.first_row, sequence.first_row + sequence.count)
        positions, block_ids = sequence.positions.to(pool.device), sequence.block_ids.to(pool.device)
        blocks = block_ids[positions // geometry.block_size]
        slots = positions % geometry.block_size
        for kind, values in enumerate((k,) if v is None else (k, v)):
            layer_view(pool, geometry, layer, kind)[blocks, :, slots] = values[rows]


def sparse_prefill(q: torch.Tensor, kv: PoolLayer, sequences: Sequence[SequenceRows], scale: float) -> torch.Tensor:
    """As `kernels.sparse_prefill.sparse_prefill`; the arguments were checked."""
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    for sequence in sequences:
        rows = slice(sequence.first_row, sequence.first_row + sequence.count)
        keys, values = _gather(kv, sequence)
        output[rows] = _attend(q[rows], keys, values, sequence, scale)
    return output


def _gather(kv: PoolLayer, sequence: SequenceRows) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of positions 0..last_position, each [kv_heads, tokens, head_dim]."""
    pool, layer, geometry = kv
    tokens = sequence.last_position + 1
    blocks = sequence.block_ids[: geometry.blocks_for(tokens)].to(pool.device)
    # [blocks, kv_heads, block_size, head_dim] each; to select along another dimension torch would copy the pool
    gathered = (layer_view(pool, geometry, layer, kind).index_select(0, blocks) for kind in (0, 1))
    keys, values = (each.transpose(0, 1).flatten(1, 2)[:, :tokens] for each in gathered)
    return keys, values


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sequence: SequenceRows, scale: float
) -> torch.Tensor:
    """`q`: [rows, heads, head_dim]; returns the same shape."""
    # queries has shape [1, heads, rows, head_dim]
    queries, keys, values = q.transpose(0, 1)[None], keys[None], values[None]
    grouped = queries.shape[1] != keys.shape[1]
    if sequence.count == 1 or _nearly_whole(sequence):
        missing = sequence.first_position if sequence.count > 1 else 0
        # Padding rows for the few positions in front makes it a square, for which the causal kernel needs no mask.
        queries = pad(queries, (0, 0, missing, 0))
        attended = scaled_dot_product_attention(
            queries, keys, values, is_causal=sequence.count > 1, scale=scale, enable_gqa=grouped
        )
        return attended[0, :, missing:].transpose(0, 1)
    return torch.cat(
        [
            _attend_chunk(queries[:, :, start : start + CHUNK_ROWS], keys, values, positions, scale, grouped)
            for start, positions in zip(
                range(0, sequence.count, CHUNK_ROWS),
                torch.split(sequence.positions.to(q.device), CHUNK_ROWS),
                strict=True,
            )
        ]
    )


def _nearly_whole(sequence: SequenceRows) -> bool:
    return sequence.contiguous and sequence.first_position * LEAST_ROWS_PER_PADDING <= sequence.count


def _attend_chunk(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    grouped: bool,
) -> torch.Tensor:
    """`queries`: [1, heads, rows, head_dim]; returns [rows, heads, head_dim]."""
    reach = int(positions[-1]) + 1
    mask = torch.arange(reach, device=positions.device) <= positions[:, None]
    attended = scaled_dot_product_attention(
        queries, keys[:, :, :reach], values[:, :, :reach], attn_mask=mask, scale=scale, enable_gqa=grouped
    )
    return attended[0].transpose(0, 1)
