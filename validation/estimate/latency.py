"""A model of the time to the first token, by computed and reused tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import TypeAdapter, ValidationError

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import read_input

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Integers = npt.NDArray[np.int64]

H200_PROFILE = Path(str(files("validation") / "assets" / "h200_ttft.json"))
_COMPUTED, _REUSED, _PAIRS = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Observation:
    """`ttft_ms` milliseconds for a prompt of `computed` and `reused` tokens, which were checked or not."""

    ttft_ms: float
    computed: int
    reused: int
    is_checked: bool = False

    @property
    def is_possible(self) -> bool:
        return 0.0 < self.ttft_ms < math.inf and self.computed >= 1 and self.reused >= 0


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Milliseconds to the first token: `intercept_ms`, and what each computed token, reused token and pair costs.

    A pair is a computed token and a token that it attends to: c computed tokens behind r reused ones make
    c x (r + c / 2). `r2`, the percentiles of absolute residuals in ms, and the ranges are those of the observations
    that the model was fitted to. `check_ms` is what the check of a moved token adds, the mean over the checked
    observations, which are not fitted; None without one.
    """

    source: str
    observations: int
    intercept_ms: float
    computed_ms: float
    reused_ms: float
    pair_ms: float
    r2: float
    residual_p50_ms: float
    residual_p95_ms: float
    computed_range: tuple[int, int]
    reused_range: tuple[int, int]
    check_ms: float | None = None

    @classmethod
    def fitted(cls, observations: Sequence[Observation], source: str) -> LatencyModel:
        """Least squares of the relative errors, no cost below 0.

        Relative errors, since times span orders of magnitude. What has a cost is chosen by the Bayesian information
        criterion (Schwarz 1978). Raises ConfigurationError for too few observations.
        """
        checked = [each for each in observations if each.is_checked]
        observations = [each for each in observations if not each.is_checked]
        computed, reused, ttft = _arrays(observations)
        if len(ttft) <= _PAIRS + 1 or len(np.unique(computed)) < 3:
            raise ConfigurationError(
                f"{source}: {len(ttft)} times to the first token with {len(np.unique(computed))} different numbers of "
                f"computed tokens; a latency model needs at least {_PAIRS + 2} and 3, name result rows that have them "
                "in their place."
            )
        columns = _columns(computed, reused)
        choices = [list(chosen) for count in range(1, _PAIRS + 2) for chosen in combinations(range(_PAIRS + 1), count)]
        fits = (fit for chosen in choices if (fit := _fit(columns, ttft, chosen)) is not None)
        _, costs = min(fits, key=lambda found: found[0])
        residuals = np.abs(ttft - columns @ costs)
        spread = float(((ttft - ttft.mean()) ** 2).sum())
        intercept, computed_ms, reused_ms, pair_ms = (float(cost) for cost in costs)
        return cls(
            source=source,
            observations=len(ttft),
            intercept_ms=intercept,
            computed_ms=computed_ms,
            reused_ms=reused_ms,
            pair_ms=pair_ms,
            r2=1.0 - float((residuals**2).sum()) / spread if spread else 0.0,
            residual_p50_ms=float(np.quantile(residuals, 0.5)),
            residual_p95_ms=float(np.quantile(residuals, 0.95)),
            computed_range=(int(computed.min()), int(computed.max())),
            reused_range=(int(reused.min()), int(reused.max())),
            check_ms=_check_ms(checked, costs),
        )

    def predict(self, computed: Integers, reused: Integers) -> Floats:
        """Milliseconds, float64 [requests], for int64 [requests] of tokens."""
        costs = np.array([self.intercept_ms, self.computed_ms, self.reused_ms, self.pair_ms])
        return np.asarray(_columns(computed, reused) @ costs, dtype=np.float64)

    def outside(self, computed: Integers, reused: Integers) -> npt.NDArray[np.bool_]:
        """Where the model extrapolates, bool [requests]."""
        (least_computed, most_computed), (least_reused, most_reused) = self.computed_range, self.reused_range
        inside = (least_computed <= computed) & (computed <= most_computed)
        return ~(inside & (least_reused <= reused) & (reused <= most_reused))

    def sentence(self) -> str:
        """For a report: where it comes from, what it says, and how well it fits."""
        free = "" if self.reused_range[1] else " No observation has reused tokens: they are taken as free."
        return (
            f"TTFT = {self.intercept_ms:.4g} ms + {self.computed_ms:.4g} ms a computed token + {self.reused_ms:.4g} ms "
            f"a reused token + {self.pair_ms:.4g} ms a pair in attention, fitted to {self.observations} observations "
            f"of {self.source}: r2 {self.r2:.4f}, residuals {self.residual_p50_ms:.3g} ms in the median and "
            f"{self.residual_p95_ms:.3g} ms at the 95th percentile, {self.computed_range[0]:,} to "
            f"{self.computed_range[1]:,} tokens computed and {self.reused_range[0]:,} to {self.reused_range[1]:,} "
            f"reused.{free}"
        )


def _columns(computed: Integers, reused: Integers) -> Floats:
    c, r = computed.astype(np.float64), reused.astype(np.float64)
    return np.stack([np.ones_like(c), c, r, c * (r + c / 2)], axis=1)


def _fit(columns: Floats, ttft: Floats, chosen: list[int]) -> tuple[float, Floats] | None:
    """The Bayesian information criterion, and the costs of all columns, 0 for those that are not chosen; None where a
    chosen one would be below 0."""
    relative = columns[:, chosen] / ttft[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    found = np.linalg.lstsq(relative / scale, np.ones_like(ttft), rcond=None)[0]
    if found.min() < 0.0:
        return None
    costs = np.zeros(columns.shape[1])
    costs[chosen] = found / scale
    count, error = len(ttft), float(np.square(columns @ costs / ttft - 1.0).mean())
    # Errors below a billionth are rounding, and must not choose between fits.
    return count * math.log(max(error, 1e-18)) + len(chosen) * math.log(count), costs


def _check_ms(checked: Sequence[Observation], costs: Floats) -> float | None:
    computed, reused, ttft = _arrays([each for each in checked if each.reused])
    added = (ttft - _columns(computed, reused) @ costs) / reused
    return max(0.0, float(added.mean())) if len(added) else None


def _arrays(observations: Sequence[Observation]) -> tuple[Integers, Integers, Floats]:
    computed = np.array([each.computed for each in observations], dtype=np.int64)
    reused = np.array([each.reused for each in observations], dtype=np.int64)
    return computed, reused, np.array([each.ttft_ms for each in observations], dtype=np.float64)


_OBSERVATIONS = TypeAdapter(list[Observation])


def recorded_observations(path: Path) -> list[Observation]:
    """The observations that a file lists as JSON. Raises ConfigurationError when it holds none."""
    try:
        observations = _OBSERVATIONS.validate_json(read_input(path))
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
        raise ConfigurationError(f"{path} does not hold observations: {reason}.") from None
    wrong = next((each for each in observations if not each.is_possible), None)
    if wrong is not None:
        raise ConfigurationError(f"{path} holds {wrong}, which cannot have been observed; mend the file.")
    return observations
