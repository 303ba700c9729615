"""ReusePolicy: which runs may be reused, and how much of them is computed again."""

from __future__ import annotations

from enum import Enum

from semblend_trt.errors import ConfigurationError


class ReusePolicy(str, Enum):
    """Which token-identical runs are reused, and what of them is computed again.

    OFF: no lookup and no donors. EXACT: only KV that a cold run would produce. VERIFIED: what the model's reuse profile
    justifies; without one that matches, as EXACT. BOUNDARY: any run, its keys rotated to their new positions, with the
    layers below the recompute boundary computed for every token. POSITION_FIX: any run, rotated, and nothing computed
    again.

    Two published fixed budgets are there to be compared with, not because they are safe: they compute the same share
    again whether a run's meaning has changed or not. EPIC (arXiv 2410.15332): the first tokens of every run. CACHEBLEND
    (arXiv 2405.16444): a fixed share of the tokens, those that deviate most at layer 1.
    """

    OFF = "off"
    EXACT = "exact"
    VERIFIED = "verified"
    BOUNDARY = "boundary"
    POSITION_FIX = "position_fix"
    EPIC = "epic"
    CACHEBLEND = "cacheblend"


# The entry of a request's `kv_transfer_params` by which nothing is reused for it that differs from a cold run.
EXACT_ONLY = "semblend.exact_only"
# The entry by which nothing at all is reused for it, and nothing of it is kept: a cold run to compare an answer with.
COLD = "semblend.cold"


def parse_policy(value: str | ReusePolicy) -> ReusePolicy:
    """Reads a policy's name in upper or lower case; raises ConfigurationError naming the policies of this version."""
    name = value.value if isinstance(value, ReusePolicy) else str(value).strip().lower()
    if name in _NAMES:
        return ReusePolicy(name)
    raise ConfigurationError(f"policy {name[:64]!r} is not known; use one of {', '.join(_NAMES)}")


_NAMES = tuple(policy.value for policy in ReusePolicy)


def allows_reuse(policy: ReusePolicy) -> bool:
    """False when the planner must not even look."""
    return policy is not ReusePolicy.OFF
