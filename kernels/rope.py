"""Moves rotated keys to other positions.

A cached key at position p is R(p) k (Su et al. 2021, RoFormer). Rotations of one plane compose, R(p + s) = R(s) R(p),
so a key moves by `s` positions when it is rotated by R(s); a scaling of cos and sin (yarn) is kept as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RopeRotation:
    """The planes in which a model rotates its keys: `rotary_dim` channels of a head, from `first_channel` on.

    `inverse_frequencies`: radians per position, one for each of the `rotary_dim / 2` planes. `first_channel` is 0, or
    the end of the latent in MLA. Counted from there, a plane is channels (i, i + rotary_dim/2), or (2i, 2i + 1) if
    `interleaved`. If all frequencies are 0, the layer has no RoPE: its keys stay as they are, bit for bit."""

    inverse_frequencies: tuple[float, ...]
    rotary_dim: int
    interleaved: bool = False
    first_channel: int = 0

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2 or len(self.inverse_frequencies) * 2 != self.rotary_dim:
            raise ValueError(
                f"rotary_dim {self.rotary_dim} must be even, at least 2 and twice the "
                f"{len(self.inverse_frequencies)} inverse frequencies"
            )
        if self.first_channel < 0:
            raise ValueError(f"first_channel is {self.first_channel}; it must be at least 0")

    @property
    def end_channel(self) -> int:
        """The channel after the last one that rotates."""
        return self.first_channel + self.rotary_dim

    @property
    def kinds(self) -> tuple[RopeRotation, ...]:
        """The rotations that layers have."""
        return (self,)

    @property
    def is_still(self) -> bool:
        """Whether it turns nothing."""
        return not any(self.inverse_frequencies)

    def of_layer(self, layer: int) -> RopeRotation:  # noqa: ARG002 - all layers have it
        """Return the rotation of `layer`."""
        return self

    def layers(self, first: int, end: int) -> RopeRotation:  # noqa: ARG002 - all layers have it
        """Return the rotation of layers `first .. end - 1`."""
        return self


@dataclass(frozen=True, slots=True)
class LayerRotations:
    """Rotations that differ by layer: layer i turns by `kinds[kind_of_layer[i]]`.

    Raises ValueError unless all kinds turn the same channels in the same planes and every layer has a kind."""

    kinds: tuple[RopeRotation, ...]
    kind_of_layer: tuple[int, ...]

    def __post_init__(self) -> None:
        planes = {(kind.rotary_dim, kind.interleaved, kind.first_channel) for kind in self.kinds}
        if len(planes) != 1:
            raise ValueError(
                f"rotations of layers turn {sorted(planes)} (rotary_dim, interleaved, first_channel); all must "
                "turn the same channels"
            )
        if not all(0 <= kind < len(self.kinds) for kind in self.kind_of_layer):
            raise ValueError(f"kind_of_layer is {self.kind_of_layer}, not all in 0..{len(self.kinds) - 1}")

    def of_layer(self, layer: int) -> RopeRotation:
        """Return the rotation of `layer`."""
        return self.kinds[self.kind_of_layer[layer]]

    def layers(self, first: int, end: int) -> LayerRotations:
        """Return the rotations of layers `first .. end - 1`."""
        return LayerRotations(self.kinds, self.kind_of_layer[first:end])


Rotation = RopeRotation | LayerRotations


def still(rotary_dim: int) -> RopeRotation:
    """Return the rotation that turns nothing, of a layer without RoPE."""
    return RopeRotation((0.0,) * (rotary_dim // 2), rotary_dim)


def by_layer(rotations: Sequence[RopeRotation]) -> Rotation:
    """Return the rotation of a model whose layers have `rotations`, one each; one for all where they are equal."""
    kinds = tuple(dict.fromkeys(rotations))
    return kinds[0] if len(kinds) == 1 else LayerRotations(kinds, tuple(map(kinds.index, rotations)))


def rotate_keys(keys: torch.Tensor, shift: int, rotation: RopeRotation) -> torch.Tensor:
    """Rotate `keys` [..., tokens, head_dim] by `shift` positions; same shape and dtype, computed in at least float32.

    A shift of 0 and a rotation that turns nothing return `keys` itself. float8_e4m3fn saturates at its largest value,
    which a rotation may exceed. Raises ValueError when the rotated channels exceed `head_dim`."""
    check_head_dim(keys.shape[-1], rotation, "keys")
    if shift == 0 or rotation.is_still:
        return keys
    math_dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
    factors = rotary_factors(torch.tensor(shift), rotation).to(math_dtype).to(keys.device, non_blocking=True)
    return rotate(keys, factors, rotation)


def rotary_factors(positions: torch.Tensor, rotation: RopeRotation) -> torch.Tensor:
    """Return all planes' cos and sin at `positions`, int64 [...]: float64 [2, ..., rotary_dim / 2], on their device."""
    # In float64: a position times a frequency loses its fraction in float32.
    frequencies = torch.tensor(rotation.inverse_frequencies, dtype=torch.float64, device=positions.device)
    angles = positions[..., None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def rotate(keys: torch.Tensor, factors: torch.Tensor, rotation: RopeRotation) -> torch.Tensor:
    """Rotate `keys` [..., head_dim] by `rotary_factors` that can be broadcast to them, in the factors' dtype.

    Same shape and dtype; float8_e4m3fn saturates at its largest value."""
    source = keys.to(factors.dtype)
    rotated = source.clone(memory_format=torch.contiguous_format)
    (first, second), (rotated_first, rotated_second) = (rotary_planes(each, rotation) for each in (source, rotated))
    cos, sin = factors
    rotated_first.mul_(cos).addcmul_(second, sin, value=-1)
    rotated_second.mul_(cos).addcmul_(first, sin)
    return saturated(rotated, keys.dtype)


def saturated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `values` in `dtype`; float8_e4m3fn, which has no infinity, saturates."""
    if dtype == torch.float8_e4m3fn and values.dtype != dtype:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def check_head_dim(head_dim: int, rotation: Rotation, name: str) -> None:
    """Raise ValueError when `rotation` turns channels that a head of `head_dim` does not have."""
    planes = rotation.kinds[0]
    if head_dim < planes.end_channel:
        behind = f" behind the first_channel {planes.first_channel}" if planes.first_channel else ""
        raise ValueError(f"{name} has head_dim {head_dim}, below the rotary_dim {planes.rotary_dim}{behind}")


def rotary_planes(keys: torch.Tensor, rotation: RopeRotation) -> tuple[torch.Tensor, torch.Tensor]:
    """View the planes' first and second channels, each [..., tokens, rotary_dim / 2]."""
    rotary = keys[..., rotation.first_channel : rotation.end_channel]
    if rotation.interleaved:
        return rotary[..., 0::2], rotary[..., 1::2]
    half = rotation.rotary_dim // 2
    return rotary[..., :half], rotary[..., half:]
