"""Donors that are put into the host tier as a save puts them there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from semblend_trt.donors.host_tier import HostKv, HostTier


def save(tier: HostTier, donor_id: str, tensor: torch.Tensor) -> None:
    """Copies `tensor`, [layers, 2, kv_heads, tokens, head_dim] on any device and of any strides, into the tier."""
    with tier.writing(donor_id, tensor.shape, tensor.dtype) as held:
        fill(held, tensor)


def fill(held: HostKv, tensor: torch.Tensor) -> None:
    """Copies `tensor`, of as many tokens as `held` has, into its parts."""
    first = 0
    for part in held.parts:
        part.tensor.copy_(tensor[:, :, :, first : first + part.capacity])
        first += part.capacity
