"""ReuseTerms: how runs that are not exact are executed under a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import SpanCheck
from semblend_trt.policy import ReusePolicy

if TYPE_CHECKING:
    from semblend_trt.config import Settings

# The layer whose deviation CacheBlend chooses by.
CACHEBLEND_LAYER = 1


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


def terms_of(
    policy: ReusePolicy, settings: Settings, num_layers: int, lowest_check_layer: int = 1
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


def _boundary(settings: Settings, num_layers: int) -> int:
    boundary = settings.recompute_boundary_layer
    if not 1 <= boundary <= num_layers:
        raise ConfigurationError(
            f"SEMBLEND_RECOMPUTE_BOUNDARY_LAYER is {boundary}, outside 1..{num_layers}, the layers of this model; "
            "policy boundary needs it in that range"
        )
    return boundary


def _cacheblend_check(settings: Settings, num_layers: int, lowest_check_layer: int) -> SpanCheck:
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
