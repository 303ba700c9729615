"""ReusePolicy: which runs may be reused, and ReuseTerms: how those that are not exact are executed under it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from semblend_trt.errors import ConfigurationError
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
    if name in _NAMES:
        return ReusePolicy(name)
    raise ConfigurationError(f"policy {name[:64]!r} is not known; use one of {', '.join(_NAMES)}")


_NAMES = tuple(policy.value for policy in ReusePolicy)


def allows_reuse(policy: ReusePolicy) -> bool:
    """False when the planner must not even look."""
    return policy is not ReusePolicy.OFF


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


class PolicySettings(Protocol):
    """The settings that a policy reads."""

    @property
    def recompute_boundary_layer(self) -> int: ...

    @property
    def epic_tokens(self) -> int: ...

    @property
    def cacheblend_share(self) -> float: ...


def terms_of(
    policy: ReusePolicy, settings: PolicySettings, num_layers: int, lowest_check_layer: int = 1
) -> ReuseTerms | None:
    """The terms that the settings alone give; None where they allow exact spans only.

    VERIFIED is among those: its terms come from a reuse profile. Raises ConfigurationError when the policy needs a
    layer that the model of `num_layers` layers does not have, a check below `lowest_check_layer`, or a boundary that is
    not set: at 0 BOUNDARY would be POSITION_FIX under another name.
    """
    if policy is ReusePolicy.POSITION_FIX:
        return ReuseTerms()
    if policy is ReusePolicy.BOUNDARY:
        return ReuseTerms(boundary=_boundary(settings, num_layers))
    if policy is ReusePolicy.EPIC:
        return ReuseTerms(head_tokens=settings.epic_tokens)
    if policy is ReusePolicy.CACHEBLEND:
        return ReuseTerms(check=_cacheblend_check(settings, num_layers, lowest_check_layer))
    return None


def _boundary(settings: PolicySettings, num_layers: int) -> int:
    boundary = settings.recompute_boundary_layer
    if not 1 <= boundary <= num_layers:
        raise ConfigurationError(
            f"SEMBLEND_RECOMPUTE_BOUNDARY_LAYER is {boundary}, outside 1..{num_layers}, the layers of this model; "
            "policy boundary needs it in that range"
        )
    return boundary


def _cacheblend_check(settings: PolicySettings, num_layers: int, lowest_check_layer: int) -> SpanCheck:
    if num_layers <= CACHEBLEND_LAYER:
        raise ConfigurationError(
            f"policy cacheblend chooses tokens at layer {CACHEBLEND_LAYER}, and this model has {num_layers} layer; "
            "use another policy"
        )
    if lowest_check_layer > CACHEBLEND_LAYER:
        raise ConfigurationError(
            f"policy cacheblend chooses tokens at layer {CACHEBLEND_LAYER}, and this model's layers below "
            f"{lowest_check_layer} see no further than a window; use another policy"
        )
    return SpanCheck(layer=CACHEBLEND_LAYER, largest_share=settings.cacheblend_share)
