"""What the operations mean, written to be read: one token, one layer and one query at a time, in float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kernels.attention_mass import seen_tokens
from kernels.deviation import check_spans
from kernels.kv_move import check_moves
from kernels.layout import ContiguousKv, LayeredPool, PagedKv, check_rows, check_written
from kernels.rope import rotary_planes, saturated

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernels.layout import FreshRows, Kv, Move, PoolLayer, SequenceRows
    from kernels.rope import RopeRotation, Rotation


def kv_move(moves: Sequence[Move], target: Kv, rotation: Rotation) -> None:
    """Do as `kernels.kv_move.kv_move`."""
    check_moves(moves, target, rotation)
    layers, kv_factor, _, _ = target.sizes
    for move in moves:
        for token in range(move.length):
            for layer in range(layers):
                for kind in range(kv_factor):
                    row, own = row_of(move.source, kind, layer, move.source_start + token), rotation.of_layer(layer)
                    if kind == 0 and move.shift and not own.is_still:
                        row = saturated(rotated(row, move.shift, own), row.dtype)
                    row_of(target, kind, layer, move.target_start + token).copy_(row)


def row_of(kv: Kv, kind: int, layer: int, position: int) -> torch.Tensor:
    """Return the view [kv_heads, head_dim] of K (kind 0) or V (kind 1) at one position."""
    if isinstance(kv, ContiguousKv):
        return kv.tensor[layer, kind, :, position]
    geometry = kv.geometry
    block, slot = int(kv.block_ids[position // geometry.block_size]), position % geometry.block_size
    if isinstance(kv.pool, LayeredPool):
        return kv.pool.kinds[kind][layer][block, :, slot]
    return kv.pool[block, layer, kind].view(geometry.kv_heads, geometry.block_size, geometry.head_dim)[:, slot]


def rotated(keys: torch.Tensor, shift: int, rotation: RopeRotation) -> torch.Tensor:
    """Return `keys` [..., head_dim] rotated by `shift` positions, in float32."""
    keys = keys.float()
    turned = keys.clone()
    planes = zip(*(part.unbind(-1) for each in (keys, turned) for part in rotary_planes(each, rotation)), strict=True)
    for frequency, (x, y, turned_x, turned_y) in zip(rotation.inverse_frequencies, planes, strict=True):
        cos, sin = math.cos(shift * frequency), math.sin(shift * frequency)
        turned_x.copy_(x * cos - y * sin)
        turned_y.copy_(y * cos + x * sin)
    return turned


def deviation(spans: Sequence[Move], fresh: FreshRows, layer: int, rotation: RopeRotation) -> torch.Tensor:
    """Do as `kernels.deviation.deviation`."""
    if not spans:
        return torch.empty(2, 0)
    check_spans(spans, fresh, layer, rotation)
    tokens = []
    for span in spans:
        for token in range(span.length):
            found = []
            for kind, plane in enumerate(fresh.planes):
                donor = row_of(span.source, kind, layer, span.source_start + token).float()
                if kind == 0:
                    donor = rotated(donor, span.shift, rotation)
                difference, norm = float((plane[span.target_start + token].float() - donor).norm()), float(donor.norm())
                found.append(difference / norm if norm else math.inf if difference else 0.0)
            tokens.append(found)
    return torch.tensor(tokens, dtype=torch.float32).reshape(-1, len(fresh.planes)).T


def write_rows(k: torch.Tensor, v: torch.Tensor | None, kv: PoolLayer, sequences: Sequence[SequenceRows]) -> None:
    """Do as `kernels.sparse_prefill.write_rows`."""
    check_written(k, v, kv, sequences)
    for sequence in sequences:
        held = PagedKv(kv.pool, sequence.block_ids, kv.geometry)
        for row, position in enumerate(sequence.positions.tolist(), sequence.first_row):
            for kind, values in enumerate((k,) if v is None else (k, v)):
                row_of(held, kind, kv.layer, position).copy_(saturated(values[row], kv.pool.dtype))


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
    check_rows({"q": q}, q.shape[1], kv, sequences)
    output = torch.full_like(q, float("nan"))
    for held, row, head, kv_head, seen, scores in _queries(q, kv, sequences, scale, window):
        logits = scores if sinks is None else torch.cat((scores, sinks[head : head + 1].float()))
        if lse is not None:
            lse[row, head] = torch.logsumexp(logits, dim=0)
        values = torch.stack([row_of(held, 1, kv.layer, position)[kv_head] for position in seen]).float()
        output[row, head] = torch.softmax(logits, dim=0)[: len(seen)] @ values
    return output


def _queries(
    q: torch.Tensor, kv: PoolLayer, sequences: Sequence[SequenceRows], scale: float, window: int | None
) -> Iterator[tuple[PagedKv, int, int, int, range, torch.Tensor]]:
    """Yield of each query its sequence's KV, row, head and KV head, the positions that it sees and their scores."""
    group = q.shape[1] // kv.geometry.kv_heads
    for sequence in sequences:
        held = PagedKv(kv.pool, sequence.block_ids, kv.geometry)
        for row, position in enumerate(sequence.positions.tolist(), sequence.first_row):
            seen = range(0 if window is None else max(0, position - window + 1), position + 1)
            for head in range(q.shape[1]):
                keys = torch.stack([row_of(held, 0, kv.layer, each)[head // group] for each in seen]).float()
                yield held, row, head, head // group, seen, keys @ q[row, head].float() * scale


def attention_mass(
    q: torch.Tensor,
    kv: PoolLayer,
    sequences: Sequence[SequenceRows],
    scale: float,
    lse: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """Do as `kernels.attention_mass.attention_mass`."""
    mass, begin = torch.zeros(kv.geometry.kv_heads, seen_tokens(sequences)), 0
    for sequence in sequences:
        for _, row, head, kv_head, seen, scores in _queries(q, kv, [sequence], scale, window):
            mass[kv_head, begin + seen.start : begin + seen.stop] += torch.exp(scores - lse[row, head])
        begin += sequence.last_position + 1
    return mass
