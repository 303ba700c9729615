"""ReusePolicy: which runs may be reused, and ReuseTerms: how those that are not exact are executed under it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from semblend_trt.plan import SpanCheck

# The layer whose deviation CacheBlend chooses by.
CACHEBLEND_LAYER = 1


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
    try:
        return ReusePolicy(name)
    except ValueError:
        names = ", ".join(policy.value for policy in ReusePolicy)
        raise ConfigurationError(f"policy {name[:64]!r} is not known; use one of {names}") from None


@dataclass(frozen=True, slots=True)
class ReuseTerms:
    """How runs that are not exact are executed: the fields of `EngineExecution` that a policy decides.

    Donors up to the generation `generations` are used, and kept.
    """

    boundary: int = 0
    check: SpanCheck | None = None
    head_tokens: int = 0
    generations: int = 0

    @property
    def wrapper_reason(self) -> str | None:
        """Why a stock engine cannot keep to these terms; None when it can."""
        if self.check is not None:
            return "check_needs_wrapper"
        if self.head_tokens:
            return "head_needs_wrapper"
        return "boundary_needs_wrapper" if self.boundary else None

    def expected_reuse(self, length: int) -> int:
        """Tokens of a run of `length` tokens that stay reused, as far as this is known before the check runs."""
        kept = max(0, length - self.head_tokens)
        if self.check is None or self.check.largest_share is None:
            return kept
        return kept - round(self.check.largest_share * kept)
