"""deviation written to be read: one token and one head at a time, in float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kernels.deviation import check_spans
from kernels.kv_move.naive import rotated_key, row_of
from kernels.layout import Fresh, FreshRows, Move

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.rope import RopeRotation


def deviation(spans: Sequence[Move], fresh: Fresh, layer: int, rotation: RopeRotation) -> torch.Tensor:
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
                    position = span.target_start + token
                    if isinstance(fresh, FreshRows):
                        row = fresh.planes[kind][position - fresh.first_position, head]
                    else:
                        row = row_of(fresh, kind, layer, head, position)
                    difference += float((row.float() - donor).square().sum())
                    norm += float(donor.square().sum())
                column.append((difference / norm) ** 0.5 if norm else math.inf if difference else 0.0)
            columns.append(column)
    return torch.tensor(columns, dtype=torch.float32).reshape(-1, kv_factor).T
