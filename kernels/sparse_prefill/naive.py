"""sparse_prefill written to be read: one query, one head at a time, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.kv_move.naive import row_of
from kernels.layout import PagedKv
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
        kv = PagedKv(pool, sequence.block_ids, geometry)
        for row, position in enumerate(sequence.positions.tolist(), sequence.first_row):
            for head in range(geometry.kv_heads):
                row_of(kv, 0, layer, head, position).copy_(k[row, head])
                row_of(kv, 1, layer, head, position).copy_(v[row, head])


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
        kv = PagedKv(pool, sequence.block_ids, geometry)
        for row, position in enumerate(sequence.positions.tolist(), sequence.first_row):
            for head in range(heads):
                kv_head = head // (heads // geometry.kv_heads)
                keys = torch.stack([row_of(kv, 0, layer, kv_head, p) for p in range(position + 1)]).float()
                values = torch.stack([row_of(kv, 1, layer, kv_head, p) for p in range(position + 1)]).float()
                weights = torch.softmax(keys @ q[row, head].float() * scale, dim=0)
                output[row, head] = weights @ values
    return output
