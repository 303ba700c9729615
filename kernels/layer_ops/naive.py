"""The layer operations written to be read: one row and one head at a time, in float32, rounded where they are stored.

The arguments are those that `kernels.layer_ops` has checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.layout import layer_view
from kernels.rope import saturated

if TYPE_CHECKING:
    from kernels.layer_ops import HeadNorms
    from kernels.layout import PoolLayer


def add_rms_norm(rows: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `kernels.layer_ops.add_rms_norm`."""
    output = torch.full_like(rows, float("nan"))
    for row in range(rows.shape[0]):
        total = rows[row]
        if residual is not None:
            residual[row] = residual[row].float() + rows[row].float()
            total = residual[row]  # as the next layer reads it: rounded
        output[row] = _rms_norm(total.float(), weight, eps)
    return output


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `kernels.layer_ops.silu_mul`."""
    inner = gate_up.shape[1] // 2
    output = torch.full_like(gate_up[:, :inner], float("nan"))
    for row in range(gate_up.shape[0]):
        gate, up = gate_up[row, :inner].float(), gate_up[row, inner:].float()
        output[row] = gate / (1 + torch.exp(-gate)) * up
    return output


def rotate_rows(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv: PoolLayer,
    norms: HeadNorms | None,
) -> None:
    """As `kernels.layer_ops.rotate_rows`."""
    geometry = kv.geometry
    # heads has shape [rows, heads + 2 * kv_heads, head_dim]
    heads = qkv.view(qkv.shape[0], -1, geometry.head_dim)
    first_key = heads.shape[1] - 2 * geometry.kv_heads
    first_value = heads.shape[1] - geometry.kv_heads
    for row in range(heads.shape[0]):
        for head in range(first_value):
            vector = heads[row, head].float()
            if norms is not None:
                vector = _rms_norm(vector, norms.query if head < first_key else norms.key, norms.eps)
            heads[row, head] = _rotated(vector, cos[row], sin[row])
        slot = int(slots[row])
        if slot < 0:
            continue
        for kv_head in range(geometry.kv_heads):
            _row_of(kv, 0, kv_head, slot).copy_(saturated(heads[row, first_key + kv_head], kv.pool.dtype))
            _row_of(kv, 1, kv_head, slot).copy_(saturated(heads[row, first_value + kv_head], kv.pool.dtype))


def _rms_norm(vector: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    mean_square = vector.square().sum() / vector.numel()
    return vector / torch.sqrt(mean_square + eps) * weight.float()


def _rotated(vector: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`vector` [head_dim] with each plane (channel, channel + head_dim / 2) turned by its angle."""
    half = vector.numel() // 2
    first, second = vector[:half], vector[half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


def _row_of(kv: PoolLayer, kind: int, head: int, slot: int) -> torch.Tensor:
    """The view [head_dim] of K (kind 0) or V (kind 1) at one slot."""
    pool, layer, geometry = kv
    block, offset = divmod(slot, geometry.block_size)
    return layer_view(pool, geometry, layer, kind)[block, head, offset]
