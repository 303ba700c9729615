"""Line: the figures of one policy under one capacity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.donors.eviction import Eviction
from validation.replay.interval import Interval, ratio_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from validation.replay.latency import LatencyModel
    from validation.replay.simulation import Outcome
    from validation.replay.trace import Trace

BASELINE = Eviction.LRU.value


@dataclass(frozen=True, slots=True)
class Line:
    """`hit_share` and `saved_tokens` are of all prompts' tokens; the TTFT in ms is predicted by the model.

    `extrapolated_share` of the requests lie outside of what the model was fitted to. The differences are the policy's
    minus those of lru with the same rule and capacity, of the hit share and of the mean TTFT in ms.
    """

    rule: str
    policy: str
    capacity_tokens: int
    hit_share: float
    saved_tokens: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    extrapolated_share: float
    evictions: int
    regrets: int
    hit_share_over_lru: Interval | None
    ttft_over_lru_ms: Interval | None


def lines_of(trace: Trace, outcomes: Sequence[Outcome], model: LatencyModel, seed: int) -> list[Line]:
    """One line for each outcome, in their order; those of lru are among them."""
    prompts = np.array(trace.prompt_tokens(), dtype=np.int64)
    predicted = [model.predict(prompts - each.reused, each.reused) for each in outcomes]
    baseline = {
        (each.rule, each.capacity_tokens): (each.reused, ttft)
        for each, ttft in zip(outcomes, predicted, strict=True)
        if each.policy == BASELINE
    }
    lines = []
    for outcome, ttft in zip(outcomes, predicted, strict=True):
        reused = outcome.reused
        lru_reused, lru_ttft = baseline[outcome.rule, outcome.capacity_tokens]
        compared = outcome.policy != BASELINE
        p50, p95, p99 = (float(value) for value in np.quantile(ttft, (0.5, 0.95, 0.99)))
        lines.append(
            Line(
                rule=outcome.rule,
                policy=outcome.policy,
                capacity_tokens=outcome.capacity_tokens,
                hit_share=float(reused.sum() / prompts.sum()),
                saved_tokens=int(reused.sum()),
                ttft_mean_ms=float(ttft.mean()),
                ttft_p50_ms=p50,
                ttft_p95_ms=p95,
                ttft_p99_ms=p99,
                extrapolated_share=float(model.outside(prompts - reused, reused).mean()),
                evictions=outcome.evictions,
                regrets=outcome.regrets,
                hit_share_over_lru=ratio_interval(reused - lru_reused, prompts, seed) if compared else None,
                ttft_over_lru_ms=ratio_interval(ttft - lru_ttft, np.ones_like(ttft), seed) if compared else None,
            )
        )
    return lines
