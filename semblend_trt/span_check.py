"""SpanCheck: at which layer fresh KV is compared with the donor's, and what the comparison decides."""

from __future__ import annotations

import math
from dataclasses import dataclass

from semblend_trt.errors import PlanError

# Tokens of a window, counted from the first checked token of a span; its last window may be shorter.
WINDOW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SpanCheck:
    """Layers below `layer` run on all tokens; in `layer` fresh K and V of every token are compared with its donor's.

    A token's deviation is the larger one of K's and V's, each ||fresh - donor|| / ||donor|| over heads and channels.
    Tokens that deviate by more than `threshold` are computed in all layers; or, with `largest_share` instead, that
    share of the checked tokens which deviates most (CacheBlend, arXiv 2405.16444). Windows whose mean deviation is
    above `window_threshold` are computed as well: where the text means something else, many tokens deviate by little.

    A span of which more than `max_span_share` deviates is computed whole. A plan that would save less than
    `min_saved_share` of its promised tokens is dropped: everything is computed.

    Raises PlanError when a field is out of range, or unless exactly one of `threshold` and `largest_share` is given.
    """

    layer: int
    threshold: float | None = None
    largest_share: float | None = None
    max_span_share: float = 1.0
    min_saved_share: float = 0.0
    window_threshold: float | None = None

    def __post_init__(self) -> None:
        if self.layer < 0:
            raise PlanError("check_outside_model", f"check layer {self.layer} is negative; the lowest layer is 0")
        if (self.threshold is None) == (self.largest_share is None):
            raise PlanError(
                "check_incomplete",
                f"a check has threshold {self.threshold} and largest_share {self.largest_share}; give exactly one",
            )
        for name in ("threshold", "window_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise PlanError("check_threshold_range", f"check {name} is {value}; it must be finite and at least 0")
        for name in ("largest_share", "max_span_share", "min_saved_share"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise PlanError("check_share_range", f"check {name} is {share}; it must be within 0..1")
