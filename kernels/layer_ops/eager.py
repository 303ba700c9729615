"""The layer operations in torch, all rows at once; `naive` says what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

from kernels.layout import PoolLayer, indexable, layer_view
from kernels.rope import saturated

if TYPE_CHECKING:
    from kernels.layer_ops import HeadNorms


def add_rms_norm(rows: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `kernels.layer_ops.add_rms_norm`."""
    if residual is not None:
        rows = residual.add_(rows)
    return _rms_norm(rows, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `kernels.layer_ops.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def rotate_rows(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv: PoolLayer,
    norms: HeadNorms | None,
) -> None:
    """As `kernels.layer_ops.rotate_rows`; the arguments were checked."""
    pool, layer, geometry = kv
    # heads has shape [rows, heads + 2 * kv_heads, head_dim]
    heads = qkv.view(qkv.shape[0], -1, geometry.head_dim)
    query, key, value = heads.split([heads.shape[1] - 2 * geometry.kv_heads, geometry.kv_heads, geometry.kv_heads], 1)
    if norms is not None:
        query.copy_(_rms_norm(query, norms.query, norms.eps))
        key.copy_(_rms_norm(key, norms.key, norms.eps))
    for part in (query, key):
        part.copy_(_rotated(part, cos[:, None], sin[:, None]))
    written = slots >= 0
    blocks, offsets = slots[written] // geometry.block_size, slots[written] % geometry.block_size
    for kind, rows in enumerate((key, value)):
        held = indexable(layer_view(pool, geometry, layer, kind))
        held[blocks, :, offsets] = indexable(saturated(rows[written], pool.dtype))


def _rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(rows.dtype)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)
