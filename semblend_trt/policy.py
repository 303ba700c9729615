"""ReusePolicy: what may be reused, and how much of it is computed again."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from semblend_trt.config import Settings


class ReusePolicy(str, Enum):
    """From nothing to the most that token equality can authorise.

    OFF: no lookup and no donors. EXACT: only KV that a cold run would produce. POSITION_FIX: any token-identical run,
    its keys rotated to their new positions. BOUNDARY: as POSITION_FIX, and the layers below the recompute boundary are
    computed for every token.
    """

    OFF = "off"
    EXACT = "exact"
    POSITION_FIX = "position_fix"
    BOUNDARY = "boundary"


def parse_policy(value: str | ReusePolicy) -> ReusePolicy:
    """Reads a policy's name, whatever its case; raises ConfigurationError naming the policies of this version."""
    name = value.value if isinstance(value, ReusePolicy) else str(value).strip().lower()
    if name in _NAMES:
        return ReusePolicy(name)
    known = ", ".join(_NAMES)
    if name == "verified":
        raise ConfigurationError(f"policy verified is not in this version; use one of {known}")
    raise ConfigurationError(f"policy {name[:64]!r} is not known; use one of {known}")


_NAMES = tuple(policy.value for policy in ReusePolicy)


def allows_reuse(policy: ReusePolicy) -> bool:
    """False when the planner must not even look."""
    return policy is not ReusePolicy.OFF


def allows_approximate(policy: ReusePolicy) -> bool:
    """True when KV that a cold run would not have produced may be placed, for the request itself only."""
    return policy in (ReusePolicy.POSITION_FIX, ReusePolicy.BOUNDARY)


def boundary_for(policy: ReusePolicy, settings: Settings, num_layers: int) -> int:
    """Number of lowest layers that are computed for every token of the prompt, 0..num_layers.

    Only BOUNDARY has any. Raises ConfigurationError when its boundary lies outside 1..num_layers: at 0 it would be
    POSITION_FIX under another name.
    """
    if policy is not ReusePolicy.BOUNDARY:
        return 0
    boundary = settings.recompute_boundary_layer
    if not 1 <= boundary <= num_layers:
        raise ConfigurationError(
            f"SEMBLEND_RECOMPUTE_BOUNDARY_LAYER is {boundary}, outside 1..{num_layers}, the layers of this model; "
            "policy boundary needs it in that range"
        )
    return boundary
