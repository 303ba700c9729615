"""ReusePolicy: which runs may be reused, and what a request or a setting may ask of it."""

from __future__ import annotations

import math
from enum import Enum
from typing import Literal

from semblend_trt.errors import ConfigurationError

# The layer whose deviation CacheBlend chooses by.
CACHEBLEND_LAYER = 1


class ReusePolicy(str, Enum):
    """Which token-identical runs are reused, and what of them is computed again.

    OFF: no lookup and no donors. EXACT: only KV that a cold run would produce. VERIFIED: what the model's reuse profile
    justifies; without a matching one, as EXACT. BOUNDARY: any run, its keys rotated to their new positions; layers
    below the recompute boundary compute every token. POSITION_FIX: any run, rotated; nothing is computed again.

    Two published fixed budgets serve for comparison. They are not safe: they compute the same share again whether a
    run's meaning has changed or not. EPIC (arXiv 2410.15332): the first tokens of every run. CACHEBLEND (arXiv
    2405.16444): a fixed share of the tokens, those that deviate most at layer 1."""

    OFF = "off"
    EXACT = "exact"
    VERIFIED = "verified"
    BOUNDARY = "boundary"
    POSITION_FIX = "position_fix"
    EPIC = "epic"
    CACHEBLEND = "cacheblend"


# With this entry in `kv_transfer_params`, a request reuses only what equals a cold run.
EXACT_ONLY = "semblend.exact_only"
# With this entry it reuses and leaves nothing: a cold run to compare an answer with.
COLD = "semblend.cold"
# Reuse profiles, by the SHA-256 of their files, under which the request reuses only what equals a cold run.
BROKEN_PROFILES = "semblend.broken_profiles"


def parse_policy(value: str | ReusePolicy) -> ReusePolicy:
    """Return the policy of this name, in any case; ConfigurationError names this version's policies."""
    name = value.value if isinstance(value, ReusePolicy) else str(value).strip().lower()
    try:
        return ReusePolicy(name)
    except ValueError:
        names = ", ".join(policy.value for policy in ReusePolicy)
        raise ConfigurationError(f"policy {name[:64]!r} is not known; use one of {names}") from None


# What SEMBLEND_MAX_KL may be: nats, twice the rounding floor, or no bound.
MaxKl = float | Literal["rounding", "unbounded"]
_NAMED: dict[str, MaxKl] = {"rounding": "rounding", "unbounded": "unbounded"}


def parse_max_kl(value: object) -> MaxKl:
    """Return the bound that a text or a number names. Raises ConfigurationError for a number that is not above 0."""
    name = str(value).strip().lower()
    if (named := _NAMED.get(name)) is not None:
        return named
    try:
        nats = float(name)
    except ValueError:
        nats = math.nan
    if not 0.0 < nats < math.inf:
        raise ConfigurationError(f"{name[:64]!r} is no number of nats above 0; use one, rounding or unbounded")
    return nats
