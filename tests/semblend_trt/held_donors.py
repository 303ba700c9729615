"""Donors that are held: in a catalog, and in the host tier as a save puts them there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from semblend_trt.donors.catalog import DonorCatalog
from semblend_trt.donors.donor_table import Capacities, TierMoves
from semblend_trt.donors.eviction import Eviction, eviction_factory

if TYPE_CHECKING:
    import torch

    from semblend_trt.donors.device_tier import DeviceTier
    from semblend_trt.donors.host_tier import HostKv, HostTier
    from semblend_trt.donors.store import DonorStore

BYTES_PER_TOKEN = 10
LRU = eviction_factory(Eviction.LRU, time.monotonic)


def catalog_of(host_tokens: int = 100, max_donors: int = 10, eviction: Any = LRU, **limits: int) -> DonorCatalog:
    """A catalog of donors with BYTES_PER_TOKEN a token; `limits` are the other `Capacities`."""
    return DonorCatalog(Capacities(host_tokens * BYTES_PER_TOKEN, BYTES_PER_TOKEN, max_donors, **limits), eviction)


def keep(catalog: DonorCatalog, donor_id: str, tokens: int, text: bytes = b"") -> TierMoves:
    """Has the catalog hold a ready donor; returns what made room for it."""
    moves = catalog.reserve(donor_id, tokens, text)
    catalog.commit(donor_id, tokens)
    return moves


def held_kv(tier: HostTier, donor_id: str) -> HostKv:
    """The donor's KV, valid until it is dropped."""
    with tier.reading(donor_id) as held:
        return held


def held_in(store: DonorStore) -> set[str]:
    """Donors that either tier holds or is being given."""
    return {*store.host._slots, *(() if store.device is None else store.device._donors)}


def used_blocks(tier: DeviceTier) -> int:
    """Blocks of the arena that are not free."""
    return tier._arena.shape[0] - len(tier._free)


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
