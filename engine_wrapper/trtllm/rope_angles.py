"""Rotates queries and keys to their positions, where the engine leaves that to its attention kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.rope import RopeRotation


@dataclass(frozen=True, slots=True, eq=False)
class RopeAngles:
    """cos and sin of some rows' positions, each float32 [rows, 1, rotary_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor
    rotation: RopeRotation

    @classmethod
    def at(cls, positions: torch.Tensor, rotation: RopeRotation) -> RopeAngles:
        """`positions`: int64 [rows]; the angles are taken in float64, on the positions' device."""
        frequencies = torch.tensor(rotation.inverse_frequencies, dtype=torch.float64, device=positions.device)
        angles = positions.double()[:, None, None] * frequencies
        return cls(angles.cos().float(), angles.sin().float(), rotation)

    def keep(self, rows: torch.Tensor) -> RopeAngles:
        """Those of some of the rows, int64."""
        return RopeAngles(self.cos.index_select(0, rows), self.sin.index_select(0, rows), self.rotation)

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """`heads`: [rows, heads, head_dim], not rotated; same shape and dtype, computed in float32."""
        rotation = self.rotation
        source = heads.float()
        rotated = source.clone()
        channels = slice(rotation.first_channel, rotation.end_channel)
        first, second = _planes(source[..., channels], rotation)
        turned_first, turned_second = _planes(rotated[..., channels], rotation)
        turned_first.copy_(first * self.cos - second * self.sin)
        turned_second.copy_(second * self.cos + first * self.sin)
        return rotated.to(heads.dtype)


def _planes(rotary: torch.Tensor, rotation: RopeRotation) -> tuple[torch.Tensor, torch.Tensor]:
    if rotation.interleaved:
        return rotary[..., 0::2], rotary[..., 1::2]
    half = rotation.rotary_dim // 2
    return rotary[..., :half], rotary[..., half:]
