"""How much attention each token of a paged pool gets from a few rows; by it a check decides what is computed again.

If Triton is installed (the extra `gpu`), its kernels serve pools on a CUDA device; torch serves all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.device import triton_serves
from kernels.layout import LayeredPool, PoolLayer, SequenceRows
from kernels.sparse_prefill import Queries, check_float32, check_queries, gathered

__all__ = ["SequenceRows", "attention_mass", "seen_tokens"]

# Rows whose attention is summed at once.
MASS_ROWS = 64


def seen_tokens(sequences: Sequence[SequenceRows]) -> int:
    """Return how many tokens `attention_mass` has columns for: of each sequence those up to its last row's."""
    return sum(sequence.last_position + 1 for sequence in sequences)


def attention_mass(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    lse: torch.Tensor,
    window: int | None = None,
    *,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention that each token gets from its sequence's rows, summed over rows and heads of a KV head.

    `q`: [rows, heads, head_dim], rotated; query head h reads KV head h // (heads / kv_heads). The pool must hold K of
    every position that a row sees: 0..p for a row at p, or the last `window` of them. `scale`, above 0, multiplies the
    scores. `lse`, float32 [rows, heads]: what `sparse_prefill` of the same arguments fills; sinks are in it.

    Returns float32 [kv_heads, `seen_tokens`], the sequences' tokens one after another: 0 for what no row sees. It is
    added to `into` if that is given, as over the layers of a model. The sum over all is rows times heads, without
    sinks. Sums are taken in a fixed order, so equal inputs give equal bits. Raises ValueError, naming the tensor and
    its bound."""
    asked = Queries(q, kv, sequences, scale, window, lse=lse)
    check_queries(asked)
    shape = kv.geometry.kv_heads, seen_tokens(sequences)
    if into is None:
        into = torch.zeros(shape, dtype=torch.float32, device=q.device)
    else:
        check_float32("into", into, shape, q.device)
    keys = kv.pool.keys[kv.layer] if isinstance(kv.pool, LayeredPool) else kv.pool
    if sequences and triton_serves(keys, ()):
        from kernels.attention_mass import triton_mass

        return triton_mass.attention_mass(asked, lse, into)
    return attention_mass_by_torch(asked, lse, into)


def attention_mass_by_torch(asked: Queries, lse: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Serve `attention_mass`, of checked arguments: K is gathered once a sequence, and rows are read in chunks."""
    (q, kv, sequences, scale, window, *_), begin = asked, 0
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
