"""PagedAttention: the pool and the active rows that one stage of the embedded engine attends to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.layout import KvGeometry, PoolLayer
from kernels.sparse_prefill import SequenceRows, write_rows

Watch = Callable[[torch.Tensor, torch.Tensor | None], None]


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The pool, the active rows of each sequence and a watch on their K and V, for one stage."""

    pool: torch.Tensor
    geometry: KvGeometry
    sequences: tuple[SequenceRows, ...]
    watch: Watch | None = None

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        """Write K and V of the active rows, [rows, kv_heads, head_dim], or latent rows and None, after the watch."""
        if self.watch is not None:
            self.watch(keys, values)
        write_rows(keys, values, PoolLayer(self.pool, layer, self.geometry), self.sequences)
