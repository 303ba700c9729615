"""Which donor goes first when room is needed: one interface, six policies."""

from semblend_trt.donors.eviction.choice import Eviction, eviction_factory
from semblend_trt.donors.eviction.policy import DonorHistory, EvictionPolicy
from semblend_trt.donors.eviction.ranked import (
    FifoEviction,
    LfuEviction,
    LruEviction,
    SizeAwareEviction,
    StaticSemanticEviction,
)

__all__ = [
    "DonorHistory",
    "Eviction",
    "EvictionPolicy",
    "FifoEviction",
    "LfuEviction",
    "LruEviction",
    "SizeAwareEviction",
    "StaticSemanticEviction",
    "eviction_factory",
]
