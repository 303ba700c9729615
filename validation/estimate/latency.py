"""A model of the time to the first token, by computed and reused tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import files
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
_FEWEST = 5  # observations
_COSTS = ("intercept_ms", "computed_ms", "reused_ms", "pair_ms")


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

    A pair is a computed token and a token that it attends to: c computed tokens after r reused ones make
    c x (r + c / 2). The ranges are those of the observations that the model was fitted to. `check_ms` is what the check
    of a moved token adds, the mean over the checked observations, which are not fitted; None without one.
    """

    source: str
    observations: int
    intercept_ms: float
    computed_ms: float
    reused_ms: float
    pair_ms: float
    computed_range: tuple[int, int]
    reused_range: tuple[int, int]
    check_ms: float | None = None

    @classmethod
    def fitted(cls, observations: Sequence[Observation], source: str) -> LatencyModel:
        """Fit by least squares of the relative errors, no cost below 0: times span orders of magnitude.

        Raises ConfigurationError for too few observations.
        """
        checked = [each for each in observations if each.is_checked]
        observations = [each for each in observations if not each.is_checked]
        computed, reused, ttft = _arrays(observations)
        if len(ttft) < _FEWEST or len(np.unique(computed)) < 3:
            raise ConfigurationError(
                f"{source}: {len(ttft)} times to the first token with {len(np.unique(computed))} different numbers of "
                f"computed tokens; a latency model needs at least {_FEWEST} and 3, name a file that has them."
            )
        costs = _costs(_columns(computed, reused), ttft)
        return cls(
            source=source,
            observations=len(ttft),
            **dict(zip(_COSTS, map(float, costs), strict=True)),
            computed_range=(int(computed.min()), int(computed.max())),
            reused_range=(int(reused.min()), int(reused.max())),
            check_ms=_check_ms(checked, costs),
        )

    def predict(self, computed: Integers, reused: Integers) -> Floats:
        """Milliseconds, float64 [requests], for int64 [requests] of tokens."""
        costs = np.array([getattr(self, name) for name in _COSTS])
        return np.asarray(_columns(computed, reused) @ costs, dtype=np.float64)

    def outside(self, computed: Integers, reused: Integers) -> npt.NDArray[np.bool_]:
        """Where the model extrapolates, bool [requests]."""
        (least_computed, most_computed), (least_reused, most_reused) = self.computed_range, self.reused_range
        inside = (least_computed <= computed) & (computed <= most_computed)
        return ~(inside & (least_reused <= reused) & (reused <= most_reused))

    def sentence(self) -> str:
        """For a report: where it comes from, and what it says."""
        return (
            f"TTFT = {self.intercept_ms:.4g} ms + {self.computed_ms:.4g} ms a computed token + {self.reused_ms:.4g} ms "
            f"a reused token + {self.pair_ms:.4g} ms a pair in attention, fitted to {self.observations} observations "
            f"of {self.source}, {self.computed_range[0]:,} to {self.computed_range[1]:,} tokens computed and "
            f"{self.reused_range[0]:,} to {self.reused_range[1]:,} reused."
        )


def _columns(computed: Integers, reused: Integers) -> Floats:
    c, r = computed.astype(np.float64), reused.astype(np.float64)
    return np.stack([np.ones_like(c), c, r, c * (r + c / 2)], axis=1)


def _costs(columns: Floats, ttft: Floats) -> Floats:
    """The cost of each column; what would be below 0 is left out, the lowest first."""
    relative = columns / ttft[:, None]
    relative = relative / (scale := np.maximum(relative.max(axis=0), 1e-300))
    chosen = list(range(columns.shape[1]))
    while True:
        found = np.linalg.lstsq(relative[:, chosen], np.ones_like(ttft), rcond=None)[0]
        if found.min() >= 0.0:
            break
        del chosen[int(found.argmin())]
    costs = np.zeros(columns.shape[1])
    costs[chosen] = found
    return np.asarray(costs / scale, dtype=np.float64)


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
