"""BegunLayer: rows within a layer, from which another part of a forward goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.sparse_prefill.rows import to_device

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class BegunLayer:
    """Rows within a layer, before its attention: `residual` [rows, hidden] and `heads`, the projected rows
    [rows, heads + 2 * kv_heads, head_dim], whose K and V are in the pool."""

    layer: int
    residual: torch.Tensor
    heads: torch.Tensor

    def keep(self, rows: torch.Tensor | None) -> BegunLayer:
        """Some of the rows, int64 on the host or on their device; None keeps all."""
        if rows is None:
            return self
        rows = to_device(rows, self.residual.device)
        return BegunLayer(self.layer, self.residual.index_select(0, rows), self.heads.index_select(0, rows))

    def room_for(self, rows: int) -> BegunLayer:
        """Zeros for so many rows like these."""
        return BegunLayer(
            self.layer,
            self.residual.new_zeros(rows, *self.residual.shape[1:]),
            self.heads.new_zeros(rows, *self.heads.shape[1:]),
        )

    def fill(self, rows: BegunLayer) -> None:
        """Copies rows to the beginning."""
        self.residual[: len(rows.residual)] = rows.residual
        self.heads[: len(rows.heads)] = rows.heads
