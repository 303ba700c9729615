"""What a plan may be: its kind, who executes it, how its rows attend, and whether its KV may be published."""

from __future__ import annotations

from enum import Enum


class EngineMode(str, Enum):
    """Who executes a plan. A plan made for one mode is wrong in the other."""

    STOCK = "stock"
    WRAPPER = "wrapper"


class PlanKind(str, Enum):
    """What a plan does. Only the request-local kinds may place KV that a cold run would not have produced."""

    DISCOVERY_ONLY = "discovery_only"
    EXACT_PREFIX = "exact_prefix"
    REQUEST_LOCAL_PREFIX = "request_local_prefix"
    REQUEST_LOCAL_SEGMENTED = "request_local_segmented"


class PublicationPolicy(str, Enum):
    """Whether blocks that hold the placed KV may enter the engine's exact reuse tree."""

    EXACT_CACHE = "exact_cache"
    REQUEST_LOCAL = "request_local"


class AttentionMode(str, Enum):
    """Which prompt positions attend in the forward that executes the plan."""

    FULL_PREFILL = "full_prefill"
    SUFFIX_ONLY = "suffix_only_after_prefix"
    HOLES_AND_SUFFIX = "holes_and_suffix"
