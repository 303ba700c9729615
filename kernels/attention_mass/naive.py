"""row_lse and attention_mass, written to be read: one query and one head at a time, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.attention_mass import seen_tokens
from kernels.kv_move.naive import row_of
from kernels.layout import PagedKv

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernels.layout import PoolLayer, SequenceRows


def row_lse(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `kernels.attention_mass.row_lse`."""
    lse = torch.full(q.shape[:2], float("nan"))
    for _, row, head, _, scores in _scores(q, kv, sequences, scale, window):
        own = scores if sinks is None else torch.cat((scores, sinks[head : head + 1].float()))
        lse[row, head] = torch.logsumexp(own, 0)
    return lse


def attention_mass(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `kernels.attention_mass.attention_mass`."""
    mass = torch.zeros(kv.geometry.kv_heads, seen_tokens(sequences))
    lse, group = row_lse(q, kv, sequences, scale, window, sinks), q.shape[1] // kv.geometry.kv_heads
    for begin, row, head, seen, scores in _scores(q, kv, sequences, scale, window):
        mass[head // group, begin + seen.start : begin + seen.stop] += torch.exp(scores - lse[row, head])
    return mass


def _scores(
    q: torch.Tensor, kv: PoolLayer, sequences: Sequence[SequenceRows], scale: float, window: int | None
) -> Iterator[tuple[int, int, int, range, torch.Tensor]]:
    """Yield the sequence's first column, row, head, the positions that the row sees, and its scores there."""
    (pool, layer, geometry), group, begin = kv, q.shape[1] // kv.geometry.kv_heads, 0
    for sequence in sequences:
        held = PagedKv(pool, sequence.block_ids, geometry)
        for row, position in enumerate(sequence.positions.tolist(), sequence.first_row):
            seen = range(0 if window is None else max(0, position - window + 1), position + 1)
            for head in range(q.shape[1]):
                keys = torch.stack([row_of(held, 0, layer, head // group, p) for p in seen]).float()
                yield begin, row, head, seen, keys @ q[row, head].float() * scale
        begin += sequence.last_position + 1
