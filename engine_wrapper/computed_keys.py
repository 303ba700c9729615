"""Keys as a model computes them, beside a cache that rounds them to fp8."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kernels.layout import layer_view
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import KvGeometry
    from kernels.sparse_prefill import SequenceRows


@dataclass(frozen=True, slots=True, eq=False)
class ComputedKeys:
    """K, or latent rows, of a pool's blocks. `tensor`: [blocks + 1, layers, 1, kv_heads * block_size * head_dim];
    `geometry` is the pool's. No block id names the last block."""

    tensor: torch.Tensor
    geometry: KvGeometry

    @classmethod
    def beside(cls, blocks: int, geometry: KvGeometry, dtype: torch.dtype, device: torch.device) -> ComputedKeys:
        """Memory for a pool of `blocks`, NaN where nothing was written. Raises ConfigurationError where it cannot be
        had."""
        shape = (blocks + 1, geometry.num_layers, 1, geometry.row_elements)
        try:
            return cls(torch.full(shape, torch.nan, dtype=dtype, device=device), geometry)
        except RuntimeError as error:
            raise ConfigurationError(
                f"keys of {blocks} blocks in {dtype} do not fit on {device} beside the cache; lower the engine's own "
                "share of the memory, or set SEMBLEND_DONOR_DTYPE to cache"
            ) from error

    def write(self, layer: int, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes rotated `keys`, [rows, kv_heads, head_dim], at `slots`, int64 [rows], as from `slots_of`."""
        held, size = layer_view(self.tensor, replace(self.geometry, kv_factor=1), layer, 0), self.geometry.block_size
        held[slots // size, :, slots % size] = keys.to(held.dtype)


def slots_of(sequences: Sequence[SequenceRows], block_size: int) -> torch.Tensor:
    """Returns where each row is in the pool: block id * block_size + slot, int64 [rows], on the rows' device."""
    slots = [
        sequence.block_ids[sequence.positions // block_size] * block_size + sequence.positions % block_size
        for sequence in sequences
    ]
    return slots[0] if len(slots) == 1 else torch.cat(slots)
