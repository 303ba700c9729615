"""What the operations mean, written to be read: one token and one layer at a time, in float32 or above."""

import math

import torch

from kernels.attention_mass import seen_tokens
from kernels.deviation import check_spans
from kernels.kv_move import check_moves
from kernels.layout import ContiguousKv, PagedKv, check_rows, check_written, layer_view
from kernels.rope import rotary_planes, saturated


def kv_move(moves, target, rotation):
    check_moves(moves, target, rotation)
    layers, kv_factor, *_ = target.sizes
    for move in moves:
        for token in range(move.length):
            for layer in range(layers):
                own, source, to = rotation.of_layer(layer), move.source_start + token, move.target_start + token
                key = row_of(move.source, 0, layer, source)
                is_copied = move.shift == 0 or own.is_still
                moved = key if is_copied else saturated(rotated_keys(key, move.shift, own), key.dtype)
                row_of(target, 0, layer, to).copy_(moved)
                if kv_factor == 2:
                    row_of(target, 1, layer, to).copy_(row_of(move.source, 1, layer, source))


def row_of(kv, kind, layer, position):
    """The view [kv_heads, head_dim] of K (kind 0) or V (kind 1) at one position."""
    if isinstance(kv, ContiguousKv):
        return kv.tensor[layer, kind, :, position]
    block, slot = int(kv.block_ids[position // kv.geometry.block_size]), position % kv.geometry.block_size
    return layer_view(kv.pool, kv.geometry, layer, kind)[block, :, slot]


def rotated_keys(keys, shift, rotation):
    """`keys`, [kv_heads, head_dim], rotated by `shift` positions, in float32."""
    rotated = keys.double()
    first, second = rotary_planes(rotated, rotation)
    x, y, angles = first.clone(), second.clone(), shift * torch.tensor(rotation.inverse_frequencies).double()
    first.copy_(x * angles.cos() - y * angles.sin())
    second.copy_(y * angles.cos() + x * angles.sin())
    return rotated.float()


def deviation(spans, fresh, layer, rotation):
    check_spans(spans, fresh, layer, rotation)
    found = []
    for span in (span for span in spans if span.length):
        columns = []
        for kind, rows in enumerate(fresh.planes):
            tokens = range(span.source_start, span.source_start + span.length)
            donor = torch.stack([row_of(span.source, kind, layer, token) for token in tokens]).float()
            donor = donor if kind else rotated_keys(donor, span.shift, rotation)
            difference = (rows[span.target_start :][: span.length].float() - donor).flatten(1).norm(dim=1)
            columns.append(torch.where(difference == 0, 0.0, difference / donor.flatten(1).norm(dim=1)))
        found.append(torch.stack(columns))
    return torch.cat(found, dim=1)


def write_rows(k, v, kv, sequences):
    check_written(k, v, kv, sequences)
    for sequence in sequences:
        held = PagedKv(kv.pool, sequence.block_ids, kv.geometry)
        for row, position in enumerate(sequence.positions.tolist(), sequence.first_row):
            for kind, rows in enumerate((k,) if v is None else (k, v)):
                row_of(held, kind, kv.layer, position).copy_(saturated(rows[row], kv.pool.dtype))


def seen_by_row(q, kv, sequences, window):
    """Yields a row, the first position that it sees, and K and V from there on, [heads, tokens, head_dim]."""
    check_rows({"q": q}, q.shape[1], kv, sequences)
    group = q.shape[1] // kv.geometry.kv_heads
    for sequence in sequences:
        held = PagedKv(kv.pool, sequence.block_ids, kv.geometry)
        for row, position in enumerate(sequence.positions.tolist(), sequence.first_row):
            first = 0 if window is None else max(0, position - window + 1)
            rows = ([row_of(held, kind, kv.layer, p) for p in range(first, position + 1)] for kind in (0, 1))
            yield row, first, *(torch.stack(each, 1).float().repeat_interleave(group, 0) for each in rows)


def sparse_prefill(q, kv, sequences, scale, window=None, sinks=None, lse=None):
    output = torch.full_like(q, math.nan)
    for row, _, keys, values in seen_by_row(q, kv, sequences, window):
        logits = (keys @ q[row, :, :, None].float())[..., 0] * scale
        if sinks is not None:
            logits = torch.cat((logits, sinks[:, None].float()), dim=1)
        if lse is not None:
            lse[row] = logits.logsumexp(1)
        weights = logits.softmax(1)[:, None, : values.shape[1]]
        output[row] = (weights @ values)[:, 0]
    return output


def attention_mass(q, kv, sequences, scale, lse, window=None):
    mass = torch.zeros(kv.geometry.kv_heads, seen_tokens(sequences))
    begins = [seen_tokens(sequences[:at]) for at, each in enumerate(sequences) for _ in range(each.count)]
    for row, first, keys, _ in seen_by_row(q, kv, sequences, window):
        weights = ((keys @ q[row, :, :, None].float())[..., 0] * scale - lse[row, :, None]).exp()
        columns = slice(begins[row] + first, begins[row] + first + keys.shape[1])
        mass[:, columns] += weights.unflatten(0, (kv.geometry.kv_heads, -1)).sum(1)
    return mass
