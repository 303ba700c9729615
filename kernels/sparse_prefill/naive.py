"""sparse_prefill and write_rows, written to be read: one query and one head at a time, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.kv_move.naive import row_of
from kernels.layout import PagedKv, SequenceRows, check_rows, check_written
from kernels.rope import saturated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import PoolLayer


def write_rows(k: torch.Tensor, v: torch.Tensor | None, kv: PoolLayer, sequences: Sequence[SequenceRows]) -> None:
    """Do as `kernels.sparse_prefill.write_rows`."""
    pool, layer, geometry = kv
    check_written(k, v, kv, sequences)
    for sequence in sequences:
        held = PagedKv(pool, sequence.block_ids, geometry)
        for row, position in enumerate(sequence.positions.tolist(), sequence.first_row):
            for head in range(geometry.kv_heads):
                row_of(held, 0, layer, head, position).copy_(saturated(k[row, head], pool.dtype))
                if v is not None:
                    row_of(held, 1, layer, head, position).copy_(saturated(v[row, head], pool.dtype))


def sparse_prefill(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do as `kernels.sparse_prefill.sparse_prefill`."""
    (pool, layer, geometry), heads = kv, q.shape[1]
    check_rows({"q": q}, heads, kv, sequences)
    output = torch.full_like(q, float("nan"))
    for sequence in sequences:
        held = PagedKv(pool, sequence.block_ids, geometry)
        for row, position in enumerate(sequence.positions.tolist(), sequence.first_row):
            for head in range(heads):
                kv_head = head // (heads // geometry.kv_heads)
                seen = range(0 if window is None else max(0, position - window + 1), position + 1)
                keys = torch.stack([row_of(held, 0, layer, kv_head, p) for p in seen]).float()
                values = torch.stack([row_of(held, 1, layer, kv_head, p) for p in seen]).float()
                logits = keys @ q[row, head].float() * scale
                if sinks is not None:
                    logits = torch.cat((logits, sinks[head : head + 1].float()))
                if lse is not None:
                    lse[row, head] = torch.logsumexp(logits, dim=0)
                weights = torch.softmax(logits, dim=0)
                output[row, head] = weights[: len(seen)] @ values
    return output
