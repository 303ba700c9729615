"""attention_mass, written to be read: one query and one head at a time, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.attention_mass import seen_tokens
from kernels.kv_move.naive import row_of
from kernels.layout import PagedKv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import PoolLayer, SequenceRows


def attention_mass(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    lse: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """Do as `kernels.attention_mass.attention_mass`."""
    (pool, layer, geometry), group, begin = kv, q.shape[1] // kv.geometry.kv_heads, 0
    mass = torch.zeros(geometry.kv_heads, seen_tokens(sequences))
    for sequence in sequences:
        held = PagedKv(pool, sequence.block_ids, geometry)
        for row, position in enumerate(sequence.positions.tolist(), sequence.first_row):
            seen = range(0 if window is None else max(0, position - window + 1), position + 1)
            for head in range(q.shape[1]):
                keys = torch.stack([row_of(held, 0, layer, head // group, p) for p in seen]).float()
                scores = keys @ q[row, head].float() * scale
                mass[head // group, begin + seen.start : begin + seen.stop] += torch.exp(scores - lse[row, head])
        begin += sequence.last_position + 1
    return mass
