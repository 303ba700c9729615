"""A confidence interval of the difference between two policies on the same requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

CONFIDENCE = 0.95
RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its bounds at CONFIDENCE."""

    estimate: float
    low: float
    high: float

    @property
    def is_a_difference(self) -> bool:
        """True when 0 lies outside."""
        return self.low > 0.0 or self.high < 0.0


def ratio_interval(numerators: npt.ArrayLike, denominators: npt.ArrayLike, seed: int = 0) -> Interval | None:
    """Sum of `numerators` over sum of `denominators`, numbers [requests] in order; None with fewer than 4 requests.

    A request leaves its blocks to the next ones, so runs of about sqrt(requests) successive requests are drawn with
    replacement, whole (Carlstein 1986); percentiles of RESAMPLES draws. Equal seeds give equal bounds.
    """
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if len(above) < 4:
        return None
    starts = np.arange(0, len(above), math.isqrt(len(above)))
    above, below = np.add.reduceat(above, starts), np.add.reduceat(below, starts)
    drawn = np.random.default_rng(seed).integers(0, len(starts), (RESAMPLES, len(starts)))
    ratios = above[drawn].sum(axis=1) / np.maximum(below[drawn].sum(axis=1), 1e-300)
    low, high = np.quantile(ratios, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Interval(float(above.sum() / below.sum()), float(low), float(high))
