"""The bound on what reuse does to answers: which share of a plan is computed at which deviation of its sample.

Nested tables of levels, from tight to loose, are fixed with some of the groups. The others test them in that order, up
to the first that is not shown to hold. That tests a fixed sequence (Angelopoulos et al., Learn then Test, arXiv
2110.01052), so one bound errs with a probability of at most 1 - CONFIDENCE, if later prompts are exchangeable with
these. Several bounds are not corrected for each other."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import betaincinv

from semblend_trt.plan import BudgetLevel
from semblend_trt.reuse_profile import ProfileBound, ProfileLevel
from validation.metrics import CONFIDENCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from validation.samples import Sample

# The shares that are tried of a plan's checked tokens, and the bounds on KL beside twice the rounding floor, in nats.
SHARES = (0.0, 0.05, 0.15, 0.3, 0.5, 0.7)
MAX_KLS = (0.005, 0.01, 0.02, 0.05, 0.1)
# Smaller values are rounding, and have no logarithm.
LEAST = 1e-6
_TABLES = 100
# Standard deviations of the normal distribution's 95 % quantile.
_HIGH = 1.645

Table = tuple[BudgetLevel, ...]


@dataclass(frozen=True, slots=True)
class Observation:
    """One prompt. `deviation`: what the sample estimates. `kl`: nats from cold over its answer, at each share tried.
    Prompts of a family's `group` count as one, and the worst of them decides."""

    family: str
    group: str
    deviation: float
    kl: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """Of `groups` groups of a family, `misses` have a prompt over the KL; `share`: mean share that is computed."""

    misses: int
    groups: int
    share: float = 0.0

    @property
    def upper(self) -> float:
        """The one-sided limit of Clopper and Pearson: the rate of misses is at most this."""
        left = self.groups - self.misses
        return float(betaincinv(self.misses + 1, left, CONFIDENCE)) if left else 1.0

    @property
    def lower(self) -> float:
        """The one-sided limit of Clopper and Pearson: the rate of misses is at least this."""
        left = self.groups - self.misses
        return float(betaincinv(self.misses, left + 1, 1.0 - CONFIDENCE)) if self.misses else 0.0


def bounds_of(
    fit: Sequence[Observation], test: Sequence[Observation], shares: Sequence[float], kls: Iterable[float], risk: float
) -> list[ProfileBound]:
    """Return a bound for each KL, ascending; without levels where nothing is shown to hold.

    `fit` fixes the tables, and `test`, of other groups, decides. `shares` ascend."""
    tables, found = (tables_of(fit, shares) if test else []), []
    for max_kl in sorted(set(kls)):

        def holds(table: Table, max_kl: float = max_kl) -> bool:
            return all(each.upper <= risk for each in what_if(test, shares, table, max_kl).values())

        *_, last = (), *itertools.takewhile(holds, tables)
        levels = [ProfileLevel(deviation=level.deviation, share=level.share) for level in last]
        found.append(ProfileBound(max_kl=max_kl, risk=risk, levels=levels))
    return found


def tables_of(observed: Sequence[Observation], shares: Sequence[float]) -> list[Table]:
    """Return nested tables, the tightest first: at every deviation, each computes no larger share than the one before.

    Log KL is fitted on log deviation for each share, by a line that does not fall. A table takes for a deviation the
    smallest share whose predicted 95 % quantile is below the table's KL. What deviates more than all that was observed
    is computed whole."""
    deviations = np.array([each.deviation for each in observed])
    if not (usable := np.isfinite(deviations)).any():
        return []
    largest, logs = float(deviations[usable].max()), np.log(np.maximum(deviations[usable], LEAST))
    lines = [_fitted(logs, np.log(_kl(observed, index)[usable])) for index in range(len(shares))]
    found: list[Table] = []
    for kl in np.linspace(math.log(LEAST), math.log(10.0), _TABLES):
        levels = list[BudgetLevel]()
        for share, (slope, intercept) in zip(shares, lines, strict=True):
            limit = _deviation_at(kl - intercept, slope, largest)
            if limit > (levels[-1].deviation if levels else 0.0):
                levels.append(BudgetLevel(limit, share))
        if levels and (not found or found[-1] != tuple(levels)):
            found.append(tuple(levels))
    return found


def what_if(
    observed: Iterable[Observation], shares: Sequence[float], table: Sequence[BudgetLevel | ProfileLevel], max_kl: float
) -> dict[str, Broken]:
    """Return by family what the table would have done. A plan that is computed whole is never over the KL."""
    limits, found = np.array([level.deviation for level in table]), []
    for each in observed:
        # NaN comes after all limits.
        number = int(np.searchsorted(limits, each.deviation))
        share = 1.0 if number == len(table) else table[number].share
        found.append((each.family, each.group, 0.0 if share == 1.0 else each.kl[shares.index(share)], share))
    return _counted(found, max_kl)


def broken_of(samples: Iterable[Sample], max_kl: float) -> dict[str, Broken]:
    """Return by family what became of the prompts of which a check compared something."""
    compared = (each for each in samples if each.sampled_tokens or each.checked_tokens)
    rows = ((each.workload, each.group, distance_of(each), each.computed_share) for each in compared)
    return _counted(rows, max_kl)


def distance_of(sample: Sample) -> float:
    """Return the KL from cold, in nats over cold's answer; infinite where it is unknown."""
    return math.inf if sample.answer_kl is None else sample.answer_kl


def _counted(rows: Iterable[tuple[str, str, float, float]], max_kl: float) -> dict[str, Broken]:
    """Return by family its groups of which a prompt is over the KL (NaN is). A row: family, group, KL, share."""
    worst, shares = dict[str, dict[str, bool]](), dict[str, list[float]]()
    for name, group, kl, share in rows:
        groups = worst.setdefault(name, {})
        groups[group] = groups.get(group, False) or not kl <= max_kl
        shares.setdefault(name, []).append(share)
    return {
        name: Broken(sum(groups.values()), len(groups), math.fsum(shares[name]) / len(shares[name]))
        for name, groups in worst.items()
    }


def correlation(deviations: Sequence[float], kl: Sequence[float]) -> float:
    """Return the correlation of the logarithms, -1 where there is none."""
    x, y = (np.log(np.maximum(np.nan_to_num(each, nan=1e3, posinf=1e3), LEAST)) for each in (deviations, kl))
    if x.size < 2 or min(float(x.std()), float(y.std())) < 1e-9:
        return -1.0
    return float(np.corrcoef(x, y)[0, 1])


def groups_needed(risk: float) -> int:
    """Return how many groups of a family, none over the KL, show the risk: 59 for 0.05."""
    return math.ceil(math.log(1.0 - CONFIDENCE) / math.log(1.0 - risk))


def missing_groups(tested: Mapping[str, int], risk: float) -> dict[str, int]:
    """Return the families that have too few groups for any bound, and how many each is short of."""
    needed = groups_needed(risk)
    return {family: needed - count for family, count in tested.items() if count < needed}


def _kl(observed: Sequence[Observation], index: int) -> npt.NDArray[np.float64]:
    values = np.array([each.kl[index] for each in observed], dtype=np.float64)
    return np.maximum(np.nan_to_num(values, nan=1e3, posinf=1e3), LEAST)


def _fitted(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return slope, at least 0, and intercept of the line below which 95 % of normal residuals lie."""
    variance = float(x.var())
    slope = max(0.0, float(np.mean((x - x.mean()) * (y - y.mean()))) / variance) if variance > 0.0 else 0.0
    residuals = y - slope * x
    return slope, float(residuals.mean() + _HIGH * residuals.std())


def _deviation_at(above: float, slope: float, largest: float) -> float:
    """Return the largest deviation at which a line of this slope is at most `above` its intercept, in logarithms."""
    if slope * math.log(max(largest, LEAST)) <= above:
        return largest
    return math.exp(above / slope) if slope > 0.0 else 0.0
