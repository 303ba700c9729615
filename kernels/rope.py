"""Moves rotated keys to other positions.

A cached key at position p is R(p) k (Su et al. 2021, RoFormer). Rotations of one plane compose, R(p + s) = R(s) R(p),
so a key moves by `s` positions when it is rotated by R(s); a scaling of cos and sin (yarn) is kept as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RopeRotation:
    """The planes in which a model rotates its keys.

    `inverse_frequencies`: radians a position, one a plane, `rotary_dim / 2` of them. `rotary_dim` leading channels of
    the head rotate, the others pass. Planes are channels (i, i + rotary_dim/2), or (2i, 2i + 1) if `interleaved`.
    """

    inverse_frequencies: tuple[float, ...]
    rotary_dim: int
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2 or len(self.inverse_frequencies) * 2 != self.rotary_dim:
            raise ValueError(
                f"rotary_dim {self.rotary_dim} must be even, at least 2 and twice the "
                f"{len(self.inverse_frequencies)} inverse frequencies"
            )


def rotation_factors(
    shift: int, rotation: RopeRotation, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin of `shift` positions, each [rotary_dim / 2] in `dtype`; the angles are taken in float64."""
    angles = torch.tensor(rotation.inverse_frequencies, dtype=torch.float64) * shift
    factors = torch.stack((angles.cos(), angles.sin())).to(dtype)
    cos, sin = factors.to(device, non_blocking=True)
    return cos, sin


def rotate_keys(keys: torch.Tensor, shift: int, rotation: RopeRotation) -> torch.Tensor:
    """Rotates `keys` [..., tokens, head_dim] by `shift` positions; same shape and dtype, computed in at least float32.

    A shift of 0 returns `keys` itself. Raises ValueError when `rotary_dim` exceeds `head_dim`.
    """
    if keys.shape[-1] < rotation.rotary_dim:
        raise ValueError(f"keys have head_dim {keys.shape[-1]}, below the rotary_dim {rotation.rotary_dim}")
    if shift == 0:
        return keys
    math_dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
    cos, sin = rotation_factors(shift, rotation, math_dtype, keys.device)
    source = keys.to(math_dtype)
    rotated = source.clone(memory_format=torch.contiguous_format)
    first, second = _planes(source, rotation)
    rotated_first, rotated_second = _planes(rotated, rotation)
    rotated_first.mul_(cos).addcmul_(second, sin, value=-1)
    rotated_second.mul_(cos).addcmul_(first, sin)
    return rotated.to(keys.dtype)


def _planes(keys: torch.Tensor, rotation: RopeRotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the planes' first and second channels, each [..., tokens, rotary_dim / 2]."""
    if rotation.interleaved:
        return keys[..., 0 : rotation.rotary_dim : 2], keys[..., 1 : rotation.rotary_dim : 2]
    half = rotation.rotary_dim // 2
    return keys[..., :half], keys[..., half : rotation.rotary_dim]
