"""Which query rows belong to which sequence, and the checks that every path makes on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kernels.layout import KvGeometry, check_pool

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows `first_row .. first_row + n - 1` of the batch stand at `positions` of one sequence.

    `positions`: int64 [n], strictly rising; `block_ids`: int64, the sequence's blocks in the pool. Build it from host
    tensors: bounds are read once, here, and `to` moves the tensors without reading them again. Raises ValueError.
    """

    first_row: int
    positions: torch.Tensor
    block_ids: torch.Tensor
    first_position: int = field(init=False, repr=False)
    last_position: int = field(init=False, repr=False)
    lowest_block: int = field(init=False, repr=False)
    highest_block: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("positions", "block_ids"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int64 or tensor.ndim != 1 or tensor.numel() == 0:
                raise ValueError(
                    f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; a vector of int64 with at least one "
                    "element is needed"
                )
        if self.first_row < 0:
            raise ValueError(f"first_row is {self.first_row}; it must be at least 0")
        if self.count > 1 and not bool((self.positions[1:] > self.positions[:-1]).all()):
            raise ValueError("positions must rise strictly")
        lowest, highest = self.block_ids.aminmax()
        bounds = (int(self.positions[0]), int(self.positions[-1]), int(lowest), int(highest))
        if bounds[0] < 0 or bounds[2] < 0:
            raise ValueError(f"positions start at {bounds[0]} and block_ids at {bounds[2]}; both must be at least 0")
        self._set_bounds(bounds)

    def _set_bounds(self, bounds: tuple[int, int, int, int]) -> None:
        names = ("first_position", "last_position", "lowest_block", "highest_block")
        for name, bound in zip(names, bounds, strict=True):
            object.__setattr__(self, name, bound)

    @property
    def count(self) -> int:
        """Rows of this sequence."""
        return self.positions.shape[0]

    @property
    def contiguous(self) -> bool:
        """True when the positions have no gap."""
        return self.last_position - self.first_position + 1 == self.count

    def to(self, device: torch.device | str) -> SequenceRows:
        """The same rows with their tensors on `device`, copied without waiting."""
        moved = object.__new__(SequenceRows)
        object.__setattr__(moved, "first_row", self.first_row)
        object.__setattr__(moved, "positions", self.positions.to(device, non_blocking=True))
        object.__setattr__(moved, "block_ids", self.block_ids.to(device, non_blocking=True))
        moved._set_bounds((self.first_position, self.last_position, self.lowest_block, self.highest_block))
        return moved


def check_rows(
    tensors: dict[str, torch.Tensor],
    heads: int,
    pool: torch.Tensor,
    layer: int,
    sequences: Sequence[SequenceRows],
    geometry: KvGeometry,
) -> None:
    """Raises ValueError unless `tensors`, each [rows, heads, head_dim], and `sequences` fit the pool and one another.

    The sequences must cover the rows in order and without a gap.
    """
    check_pool(pool, geometry)
    if not 0 <= layer < geometry.num_layers:
        raise ValueError(f"layer is {layer}, outside 0..{geometry.num_layers - 1}")
    rows = 0
    for index, sequence in enumerate(sequences):
        if sequence.first_row != rows:
            raise ValueError(f"sequences[{index}].first_row is {sequence.first_row}; {rows} is the next free row")
        rows += sequence.count
        if sequence.highest_block >= pool.shape[0]:
            raise ValueError(
                f"sequences[{index}].block_ids reach {sequence.highest_block}, outside 0..{pool.shape[0] - 1}, "
                "the blocks of the pool"
            )
        capacity = sequence.block_ids.shape[0] * geometry.block_size
        if sequence.last_position >= capacity:
            raise ValueError(
                f"sequences[{index}].positions reach {sequence.last_position}; its blocks hold 0..{capacity - 1}"
            )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != (rows, heads, geometry.head_dim):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; [{rows}, {heads}, {geometry.head_dim}] is needed by the "
                "sequences and the geometry"
            )
        if tensor.dtype != pool.dtype or tensor.device != pool.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; the pool is {pool.dtype} on {pool.device}")
