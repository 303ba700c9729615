"""TierOrders: what the scheduler decided about the tiers between two iterations, for every rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierOrders:
    """Carried out in this order. `drops` go from every tier. `releases` leave memory; their files stay. `demotions`
    move from the device to the host, and get a file if they are among `writes`. `fetches` are read back from their
    files to the host. `lifts` are copied from the host to the device and then leave the host."""

    drops: tuple[str, ...] = ()
    demotions: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    fetches: tuple[str, ...] = ()
    lifts: tuple[str, ...] = ()
