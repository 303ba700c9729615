"""sparse_prefill written to be read: one query, one head at a time, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.sparse_prefill.rows import SequenceRows, check_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import KvGeometry


def write_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    sequences: Sequence[SequenceRows],
    geometry: KvGeometry,
) -> None:
    """As `kernels.sparse_prefill.write_rows`."""
    check_rows({"k": k, "v": v}, geometry.kv_heads, pool, layer, sequences, geometry)
    for sequence in sequences:
        for offset, position in enumerate(sequence.positions.tolist()):
            for head in range(geometry.kv_heads):
                _row(pool, layer, 0, head, position, sequence, geometry).copy_(k[sequence.first_row + offset, head])
                _row(pool, layer, 1, head, position, sequence, geometry).copy_(v[sequence.first_row + offset, head])


def sparse_prefill(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    sequences: Sequence[SequenceRows],
    geometry: KvGeometry,
    scale: float,
) -> torch.Tensor:
    """As `kernels.sparse_prefill.sparse_prefill`."""
    heads = q.shape[1]
    check_rows({"q": q}, heads, pool, layer, sequences, geometry)
    output = torch.full_like(q, float("nan"))
    for sequence in sequences:
        for offset, position in enumerate(sequence.positions.tolist()):
            row = sequence.first_row + offset
            for head in range(heads):
                kv_head = head // (heads // geometry.kv_heads)
                reach = [(pool, layer, kv_head, p, sequence, geometry) for p in range(position + 1)]
                keys = torch.stack([_row(pool, layer, 0, kv_head, *rest[3:]) for rest in reach]).float()
                values = torch.stack([_row(pool, layer, 1, kv_head, *rest[3:]) for rest in reach]).float()
                weights = torch.softmax(keys @ q[row, head].float() * scale, dim=0)
                output[row, head] = weights @ values
    return output


def _row(
    pool: torch.Tensor,
    layer: int,
    kind: int,
    head: int,
    position: int,
    sequence: SequenceRows,
    geometry: KvGeometry,
) -> torch.Tensor:
    """The view [head_dim] of K (kind 0) or V (kind 1) at one position."""
    block = int(sequence.block_ids[position // geometry.block_size])
    start = (head * geometry.block_size + position % geometry.block_size) * geometry.head_dim
    return pool[block, layer, kind, start : start + geometry.head_dim]
