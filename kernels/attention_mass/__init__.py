"""How much attention each token of a paged pool gets from a few rows; by it a check decides what is computed again.

If Triton is installed (the extra `gpu`), its kernels serve pools on a CUDA device; torch serves all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.device import triton_serves
from kernels.layout import LayeredPool, PoolLayer, SequenceRows
from kernels.sparse_prefill import check_queries, gathered

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SequenceRows", "attention_mass", "row_lse", "seen_tokens"]

CHUNK_ROWS = 64


def seen_tokens(sequences: Sequence[SequenceRows]) -> int:
    """Return how many tokens `attention_mass` has columns for: of each sequence those up to its last row's."""
    return sum(sequence.last_position + 1 for sequence in sequences)


def row_lse(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logarithm of each row's sum of exp(score), float32 [rows, heads]; a sink's score is one of them.

    Arguments and errors are those of `attention_mass`."""
    check_queries(q, kv, sequences, scale, window, sinks)
    return _row_lse(q, kv, sequences, scale, window, sinks)


def attention_mass(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    *,
    lse: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention that each token gets from its sequence's rows, summed over rows and heads of a KV head.

    `q`: [rows, heads, head_dim], rotated; query head h reads KV head h // (heads / kv_heads). The pool must hold K of
    every position that a row sees: 0..p for a row at p, or the last `window` of them. `scale`, above 0, multiplies the
    scores; `sinks`, [heads], are scores of no token. `lse`: `row_lse` of the same arguments, where an attention has
    returned it.

    Returns float32 [kv_heads, `seen_tokens`], the sequences' tokens one after another: 0 for what no row sees. It is
    added to `into` if that is given, as over the layers of a model. The sum over all is rows times heads, without
    sinks. Sums are taken in a fixed order, so equal inputs give equal bits. Raises ValueError, naming the tensor and
    its bound."""
    check_queries(q, kv, sequences, scale, window, sinks)
    shape = kv.geometry.kv_heads, seen_tokens(sequences)
    if into is None:
        into = torch.zeros(shape, device=q.device)
    elif into.shape != shape or into.dtype != torch.float32 or into.device != q.device or not into.is_contiguous():
        raise ValueError(
            f"into is {into.dtype} of shape {list(into.shape)} on {into.device}; contiguous float32 of shape "
            f"{list(shape)} on {q.device} is needed"
        )
    if lse is None:
        lse = _row_lse(q, kv, sequences, scale, window, sinks)
    elif lse.shape != q.shape[:2] or lse.dtype != torch.float32 or lse.device != q.device:
        raise ValueError(
            f"lse is {lse.dtype} of shape {list(lse.shape)} on {lse.device}; float32 of shape {list(q.shape[:2])} on "
            f"{q.device} is needed"
        )
    if sequences and _triton_serves(kv):
        from kernels.attention_mass import triton_mass

        return triton_mass.attention_mass(q, kv, sequences, scale, window, lse, into)
    return attention_mass_by_torch(q, kv, sequences, scale, window, lse, into)


def _row_lse(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Do as `row_lse`; the arguments were checked."""
    if sequences and _triton_serves(kv):
        from kernels.attention_mass import triton_mass

        return triton_mass.row_lse(q, kv, sequences, scale, window, sinks)
    return row_lse_by_torch(q, kv, sequences, scale, window, sinks)


def _triton_serves(kv: PoolLayer) -> bool:
    keys = kv.pool.keys[kv.layer] if isinstance(kv.pool, LayeredPool) else kv.pool
    return triton_serves(keys, ())


def row_lse_by_torch(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Serve `row_lse`, of checked arguments: K is gathered once a sequence, and rows are read in chunks."""
    lse = torch.empty(q.shape[:2], device=q.device)
    for sequence in sequences:
        keys = gathered(kv, sequence, 0, torch.float32, 0)
        for own in range(sequence.first_row, sequence.first_row + sequence.count, CHUNK_ROWS):
            rows = slice(own, min(own + CHUNK_ROWS, sequence.first_row + sequence.count))
            lse[rows] = _scores(q, keys, sequence, rows, scale, window).logsumexp(-1).flatten(1)
    return lse if sinks is None else torch.logaddexp(lse, sinks.float())


def attention_mass_by_torch(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    window: int | None,
    lse: torch.Tensor,
    into: torch.Tensor,
) -> torch.Tensor:
    """Serve `attention_mass`, of checked arguments, as `row_lse_by_torch` does."""
    begin = 0
    for sequence in sequences:
        end = begin + sequence.last_position + 1
        keys = gathered(kv, sequence, 0, torch.float32, 0)
        for own in range(sequence.first_row, sequence.first_row + sequence.count, CHUNK_ROWS):
            rows = slice(own, min(own + CHUNK_ROWS, sequence.first_row + sequence.count))
            scores = _scores(q, keys, sequence, rows, scale, window)
            into[:, begin:end] += (scores - lse[rows].view(*scores.shape[:3], 1)).exp().sum((0, 2))
        begin = end
    return into


def _scores(
    q: torch.Tensor, keys: torch.Tensor, sequence: SequenceRows, rows: slice, scale: float, window: int | None
) -> torch.Tensor:
    """Return scores of some rows, float32 [rows, kv_heads, group, tokens], -inf for what a row does not see."""
    # keys: [kv_heads, tokens, head_dim]
    positions = sequence.positions[rows.start - sequence.first_row : rows.stop - sequence.first_row].to(q.device)
    tokens = torch.arange(keys.shape[1], device=q.device)
    seen = tokens <= positions[:, None]
    if window is not None:
        seen &= tokens > positions[:, None] - window
    queries = q[rows].float().unflatten(1, (keys.shape[0], -1))
    scores = torch.einsum("rhgd,htd->rhgt", queries, keys) * scale
    return scores.masked_fill(~seen[:, None, None], -torch.inf)
