"""The bound on what reuse does to answers: which share of a plan is computed at which deviation of its sample.

Nested tables of levels, from tight to loose, are fixed with some of the groups. The others test them in that order, up
to the first that is not shown to hold. That tests a fixed sequence (Angelopoulos et al., Learn then Test, arXiv
2110.01052). If later prompts are exchangeable with these, one bound errs with a probability of at most 1 - CONFIDENCE.
Several bounds are not corrected for each other."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from semblend_trt.plan import BudgetLevel
from semblend_trt.reuse_profile import ProfileBound, ProfileLevel
from validation.cases import grouped
from validation.metrics import CONFIDENCE
from validation.samples import Sample

# The shares that are tried of a plan's checked tokens, and the bounds on KL beside twice the rounding floor, in nats.
SHARES = (0.0, 0.05, 0.15, 0.3, 0.5, 0.7)
MAX_KLS = (0.005, 0.01, 0.02, 0.05, 0.1)
# Smaller values are rounding, and have no logarithm.
LEAST = 1e-6
_TABLES = 100
# The share of a family's prompts that may be over a table's KL.
_OUTLIERS = 0.05

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

    Each table has a KL, and takes a share up to a deviation: above it, in one family, more than _OUTLIERS of the
    prompts are over the KL at that share. What deviates more than all that was observed is computed whole."""
    # What has no deviation is computed whole.
    families = grouped((x for x in observed if math.isfinite(x.deviation)), lambda each: each.family)
    largest = max((each.deviation for own in families.values() for each in own), default=0.0)
    found: list[Table] = []
    for kl in np.geomspace(LEAST, 10.0, _TABLES):
        levels = list[BudgetLevel]()
        for index, share in enumerate(shares):
            limit = largest
            for own in families.values():
                # Of this family's prompts at most _OUTLIERS are over the KL (NaN is) up to the limit.
                over, allowed = sorted(x.deviation for x in own if not x.kl[index] <= kl), int(_OUTLIERS * len(own))
                limit = min(limit, math.nextafter(over[allowed], 0.0) if len(over) > allowed else math.inf)
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
    found = dict[str, Broken]()
    for name, own in grouped(rows, lambda row: row[0]).items():
        groups = grouped(own, lambda row: row[1]).values()
        misses = sum(any(not kl <= max_kl for _, _, kl, _ in group) for group in groups)
        found[name] = Broken(misses, len(groups), math.fsum(share for *_, share in own) / len(own))
    return found


def correlation(deviations: Sequence[float], kl: Sequence[float]) -> float:
    """Return the correlation of the logarithms, -1 where one of them does not vary."""
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
