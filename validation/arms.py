"""The arms of a comparison: engines over the same weights that differ only in what they may reuse."""

from __future__ import annotations

from dataclasses import dataclass

COLD = "cold"
COLD_AGAIN = "cold_again"
EXACT_PREFIX = "exact_prefix"
POSITION_FIX = "position_fix"
BOUNDARY = "boundary"


@dataclass(frozen=True, slots=True)
class Arm:
    """`policy` None runs without the connector. An arm with `isolated` groups gives each group its own cache salt:
    its first request is computed from nothing, further questions on the same documents find that request's exact KV.
    """

    name: str
    policy: str | None = None
    serves_donors: bool = True
    isolated: bool = False


ARMS = (
    Arm(COLD, serves_donors=False, isolated=True),
    Arm(COLD_AGAIN, serves_donors=False, isolated=True),
    Arm(EXACT_PREFIX),
    Arm(POSITION_FIX, policy="position_fix"),
    Arm(BOUNDARY, policy="boundary"),
)
REUSE_ARMS = tuple(arm.name for arm in ARMS if arm.policy is not None)
