"""The eviction policy that a user chose, for the tiers of one catalog."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from semblend_trt.donors.eviction.adaptive import AdaptiveSemanticEviction
from semblend_trt.donors.eviction.kind_weights import KindWeights
from semblend_trt.donors.eviction.ranked import (
    FifoEviction,
    LfuEviction,
    LruEviction,
    SizeAwareEviction,
    StaticSemanticEviction,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from semblend_trt.donors.eviction.policy import EvictionPolicy


class Eviction(str, Enum):
    """Names of the policies, as SEMBLEND_EVICTION takes them."""

    FIFO = "fifo"
    LRU = "lru"
    LFU = "lfu"
    SIZE_AWARE = "size_aware"
    STATIC_SEMANTIC = "static_semantic"
    ADAPTIVE_SEMANTIC = "adaptive_semantic"

    @property
    def reads_kinds(self) -> bool:
        """True when the kinds of donors' text count."""
        return self in (Eviction.STATIC_SEMANTIC, Eviction.ADAPTIVE_SEMANTIC)


def eviction_factory(name: Eviction, clock: Callable[[], float]) -> Callable[[], EvictionPolicy]:
    """What makes the order of one tier; the orders of one factory share what they learn."""
    if name is Eviction.ADAPTIVE_SEMANTIC:
        weights = KindWeights()
        return lambda: AdaptiveSemanticEviction(weights, clock)
    return {
        Eviction.FIFO: FifoEviction,
        Eviction.LRU: LruEviction,
        Eviction.LFU: LfuEviction,
        Eviction.SIZE_AWARE: SizeAwareEviction,
        Eviction.STATIC_SEMANTIC: StaticSemanticEviction,
    }[name]
