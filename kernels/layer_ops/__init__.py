"""The operations between a decoder layer's matrix products, each in one pass over its rows.

On a CUDA device with Triton each is one kernel, elsewhere torch. Rounding follows Transformers' layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.dispatch import has_kernels
from kernels.layer_ops import eager
from kernels.layout import PoolLayer, check_pool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from kernels.sparse_prefill import SequenceRows

__all__ = ["HeadNorms", "add_rms_norm", "rotate_rows", "silu_mul", "slots_of"]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every query and key head before the rotation (Qwen3): `query` and `key` are [head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


def add_rms_norm(rows: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich 2019) of `rows + residual`, which is written back into `residual`.

    `rows` and `residual`: [rows, hidden], contiguous; `weight`: [hidden]. Without a residual, of `rows` alone. The sum
    is rounded to the rows' dtype, the norm is computed in float32. Raises ValueError, naming the tensor.
    """
    if rows.ndim != 2 or not rows.is_contiguous():
        raise ValueError(f"rows has shape {list(rows.shape)}; contiguous [rows, hidden] is needed")
    if residual is not None and (residual.shape != rows.shape or not residual.is_contiguous()):
        raise ValueError(f"residual has shape {list(residual.shape)}; contiguous {list(rows.shape)} is needed")
    if weight.shape != rows.shape[1:]:
        raise ValueError(f"weight has shape {list(weight.shape)}; {list(rows.shape[1:])} is needed")
    normed: torch.Tensor = _path_on(rows.device).add_rms_norm(rows, residual, weight, eps)
    return normed


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (SwiGLU, Shazeer 2020) of `gate_up` [rows, 2 * inner]; returns [rows, inner]."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"gate_up has shape {list(gate_up.shape)}; contiguous [rows, 2 * inner] is needed")
    activated: torch.Tensor = _path_on(gate_up.device).silu_mul(gate_up)
    return activated


def rotate_rows(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv: PoolLayer,
    norms: HeadNorms | None = None,
) -> None:
    """Rotates (NeoX half-split) the query and key heads of `qkv` in place and writes K and V into the pool.

    `qkv`: [rows, (heads + 2 * kv_heads) * head_dim], contiguous; `cos`, `sin`: float32 [rows, head_dim / 2]; `slots`:
    int64 [rows] as from `slots_of`, where -1 writes nothing. The rotation is computed in float32, and the pool gets
    what `qkv` holds then; one in float8_e4m3fn saturates.
    """
    pool, layer, geometry = kv
    check_pool(pool, geometry)
    half, key_values = geometry.head_dim // 2, 2 * geometry.kv_heads * geometry.head_dim
    width = qkv.shape[-1] - key_values
    if qkv.ndim != 2 or not qkv.is_contiguous() or width <= 0 or width % geometry.head_dim:
        raise ValueError(
            f"qkv has shape {list(qkv.shape)}; contiguous [rows, (heads + {2 * geometry.kv_heads}) * "
            f"{geometry.head_dim}] is needed"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (qkv.shape[0], half) or table.dtype != torch.float32 or not table.is_contiguous():
            raise ValueError(
                f"{name} is {table.dtype} of shape {list(table.shape)}; float32 [{qkv.shape[0]}, {half}] is needed"
            )
    if slots.shape != (qkv.shape[0],) or slots.dtype != torch.int64:
        raise ValueError(f"slots is {slots.dtype} of shape {list(slots.shape)}; int64 [{qkv.shape[0]}] is needed")
    if not 0 <= layer < geometry.num_layers:
        raise ValueError(f"layer is {layer}, outside 0..{geometry.num_layers - 1}")
    _path_on(qkv.device).rotate_rows(qkv, cos, sin, slots, kv, norms)


def slots_of(sequences: Sequence[SequenceRows], block_size: int) -> torch.Tensor:
    """Where each row's K and V lie in the pool: block id * block_size + slot, int64 [rows], on the rows' device."""
    slots = [
        sequence.block_ids[sequence.positions // block_size] * block_size + sequence.positions % block_size
        for sequence in sequences
    ]
    return slots[0] if len(slots) == 1 else torch.cat(slots)


def _path_on(device: torch.device) -> ModuleType:
    """The module that serves tensors there."""
    if has_kernels(device):
        from kernels.layer_ops import triton_ops

        return triton_ops
    return eager
