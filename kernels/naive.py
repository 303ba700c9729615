"""What the operations mean, written to be read: one token, one layer and one head at a time, in float32."""

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
    from collections.abc import Sequence

    from kernels.layout import FreshRows, Kv, Move, PoolLayer, SequenceRows
    from kernels.rope import RopeRotation, Rotation


def kv_move(moves: Sequence[Move], target: Kv, rotation: Rotation) -> None:
    """Do as `kernels.kv_move.kv_move`."""
    if not moves:
        return
    check_moves(moves, target, rotation)
    layers, kv_factor, kv_heads, _ = target.sizes
    for move in moves:
        for token in range(move.length):
            for layer in range(layers):
                own = rotation.of_layer(layer)
                for head in range(kv_heads):
                    source = (layer, head, move.source_start + token)
                    destination = (layer, head, move.target_start + token)
                    key = row_of(move.source, 0, *source)
                    is_copied = move.shift == 0 or own.is_still
                    moved = key if is_copied else saturated(rotated_key(key, move.shift, own), key.dtype)
                    row_of(target, 0, *destination).copy_(moved)
                    if kv_factor == 2:
                        row_of(target, 1, *destination).copy_(row_of(move.source, 1, *source))


def row_of(kv: Kv, kind: int, layer: int, head: int, position: int) -> torch.Tensor:
    """Return the view [head_dim] of K (kind 0) or V (kind 1) at one position."""
    if isinstance(kv, ContiguousKv):
        return kv.tensor[layer, kind, head, position]
    block, slot = int(kv.block_ids[position // kv.geometry.block_size]), position % kv.geometry.block_size
    if isinstance(kv.pool, LayeredPool):
        return kv.pool.kinds[kind][layer][block, head, slot]
    start = (head * kv.geometry.block_size + slot) * kv.geometry.head_dim
    return kv.pool[block, layer, kind, start : start + kv.geometry.head_dim]


def rotated_key(key: torch.Tensor, shift: int, rotation: RopeRotation) -> torch.Tensor:
    """Return `key` [head_dim] rotated by `shift` positions, in float32."""
    rotated = key.float().clone()
    first, second = rotary_planes(rotated, rotation)
    for plane, frequency in enumerate(rotation.inverse_frequencies):
        cos, sin = math.cos(shift * frequency), math.sin(shift * frequency)
        x, y = float(first[plane]), float(second[plane])
        first[plane], second[plane] = x * cos - y * sin, y * cos + x * sin
    return rotated


def deviation(spans: Sequence[Move], fresh: FreshRows, layer: int, rotation: RopeRotation) -> torch.Tensor:
    """Do as `kernels.deviation.deviation`."""
    if not spans:
        return torch.empty(2, 0)
    check_spans(spans, fresh, layer, rotation)
    _, kv_factor, kv_heads, _ = spans[0].source.sizes
    columns = []
    for span in spans:
        for token in range(span.length):
            column = []
            for kind in range(kv_factor):
                difference = norm = 0.0
                for head in range(kv_heads):
                    donor = row_of(span.source, kind, layer, head, span.source_start + token).float()
                    if kind == 0:
                        donor = rotated_key(donor, span.shift, rotation)
                    row = fresh.planes[kind][span.target_start + token, head]
                    difference += float((row.float() - donor).square().sum())
                    norm += float(donor.square().sum())
                column.append((difference / norm) ** 0.5 if norm else math.inf if difference else 0.0)
            columns.append(column)
    return torch.tensor(columns, dtype=torch.float32).reshape(-1, kv_factor).T


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
