"""Is an arm's score non-inferior to cold's? A paired bootstrap over groups of questions on the same documents."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import DegenerateDataWarning, bootstrap

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy.typing as npt

# Of the score: an arm may lose this much at most.
MARGIN = 0.01
CONFIDENCE = 0.95
RESAMPLES = 9_999


@dataclass(frozen=True, slots=True)
class NonInferiority:
    """Mean difference of scores, arm minus cold, and its one-sided lower bound at CONFIDENCE.

    `lower` is -inf with fewer than two groups: one group says nothing about others.
    """

    difference: float
    lower: float
    samples: int
    groups: int
    margin: float = MARGIN

    @property
    def holds(self) -> bool:
        """True when the arm is non-inferior: it loses less than the margin, with the confidence stated."""
        return self.lower >= -self.margin

    @property
    def largest_ratio(self) -> float:
        """For log-likelihoods: the largest ratio of the arm's perplexity to cold's that the bound leaves possible."""
        return math.inf if math.isinf(self.lower) else math.exp(-self.lower)

    def sentence(self) -> str:
        """For a report: the difference, its bound and the sizes."""
        return (
            f"difference {self.difference:+.4f}, one-sided {CONFIDENCE:.0%} lower bound {self.lower:+.4f}; "
            f"{self.samples} prompts in {self.groups} groups"
        )


def non_inferiority(
    differences: Sequence[float],
    groups: Sequence[Hashable],
    *,
    margin: float = MARGIN,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> NonInferiority | None:
    """Compares paired scores; None of nothing.

    `differences`: the arm's score minus cold's on the same prompt; `groups`: which prompts share documents. Groups are
    drawn with replacement, whole, since answers on the same documents are not independent; the bound is the percentile
    bootstrap's (Efron 1979). The mean is over prompts, so that large groups count for more. Equal seeds give equal
    bounds. Raises ValueError unless there is one group for each difference, all finite.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) != len(groups):
        raise ValueError(f"{len(values)} differences come with {len(groups)} groups; one for each is needed.")
    if not len(values):
        return None
    if not np.isfinite(values).all():
        raise ValueError("A difference is not finite; a score that was not measured has no place in a comparison.")
    sums, counts = _by_group(values, groups)
    return NonInferiority(
        difference=float(values.mean()),
        lower=_lower_bound(sums, counts, seed, resamples),
        samples=len(values),
        groups=len(sums),
        margin=margin,
    )


def _by_group(
    values: npt.NDArray[np.float64], groups: Sequence[Hashable]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Sum of the values and their number for each group: the mean of a resample needs no more."""
    index: dict[Hashable, int] = {}
    members = np.fromiter((index.setdefault(group, len(index)) for group in groups), dtype=np.int64, count=len(values))
    return np.bincount(members, weights=values).astype(np.float64), np.bincount(members).astype(np.float64)


def _lower_bound(sums: npt.NDArray[np.float64], counts: npt.NDArray[np.float64], seed: int, resamples: int) -> float:
    if len(sums) < 2:
        return -math.inf
    with warnings.catch_warnings():
        # Every group alike: the bound is the difference itself.
        warnings.simplefilter("ignore", DegenerateDataWarning)
        found = bootstrap(
            (sums, counts),
            lambda total, number, axis: total.sum(axis=axis) / number.sum(axis=axis),
            paired=True,
            vectorized=True,
            n_resamples=resamples,
            batch=1_000,
            confidence_level=CONFIDENCE,
            alternative="greater",
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    return float(found.confidence_interval.low)
