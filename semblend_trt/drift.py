"""Drift: tests, from spot checks, of what reuse profiles promise. They are valid whenever they are read."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from math import log1p
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# Highest probability that a test ever calls a promise broken which is kept.
ALPHA = 0.01
# Most tests of one process.
MAX_TESTS = 4096
# An answer kept its bound, was over it, was the one that broke the promise, or was one of too many tenants.
CHECK_RESULTS = ("within", "over", "broken", "untested")
# Shares of answers over the bound that are bet on, as multiples of the risk.
_MULTIPLES = (1.5, 2.0, 3.0, 6.0)


class RiskTest:
    """A sequential test of "an answer is over its bound with a probability of at most `risk`", 0 < risk < 1.

    `evidence` is the wealth of bets against that (Waudby-Smith and Ramdas, JRSS B 2023, arXiv 2010.09686). While it
    holds, the evidence ever reaches 1 / a with a probability of at most a (Ville's inequality). Each check puts a part
    of what is left into the bets, so that drift is found late as well as early."""

    def __init__(self, risk: float) -> None:
        rates = np.minimum(np.multiply(_MULTIPLES, risk), (1 + risk) / 2)
        self._factors = (1 - rates) / (1 - risk), rates / risk
        self._bets, self._left, self._checks, self.evidence = np.zeros(len(rates)), 1.0, 0, 1.0

    def add(self, *, is_over: bool) -> None:
        """Settle the bets on one answer."""
        self._checks += 1
        left = 1 / (1 + log1p(self._checks))
        self._bets = (self._bets + self._left - left) * self._factors[is_over]
        self._left, self.evidence = left, float(self._bets.mean()) + left


class BoundedAnswer(BaseModel):
    """The part of a receipt that tells which bound covers the answer; `max_kl` is in nats.

    Raises ValidationError where none does: a bound holds for plans whose deviation was sampled."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    profile: str
    max_kl: Annotated[float, Field(gt=0)]
    risk: Annotated[float, Field(gt=0, lt=1)]
    sampled_tokens: Annotated[int, Field(gt=0)]
    namespace: str | None = None


class DriftMonitor:
    """Tests the promise of each tenant's salt, profile, max KL and risk. Thread safe.

    `count` gets the result of each check, one of CHECK_RESULTS. A broken promise stays so until the process ends."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count, self._lock = count, threading.Lock()
        self._tests: dict[tuple[str | None, str, float, float], RiskTest] = {}
        self._broken: defaultdict[str | None, list[str]] = defaultdict(list)

    def broken(self, salt: str | None) -> list[str]:
        """Return the SHA-256 of each profile whose promise to the tenant is broken."""
        return self._broken.get(salt, [])

    def observe(self, salt: str | None, answer: BoundedAnswer, *, is_over: bool) -> str:
        """Add one spot check; return its result. The one that breaks a promise is logged."""
        key, result = (salt, answer.profile, answer.max_kl, answer.risk), "over" if is_over else "within"
        with self._lock:
            if key not in self._tests and len(self._tests) < MAX_TESTS:
                self._tests[key] = RiskTest(answer.risk)
            if (test := self._tests.get(key)) is None:
                result = "untested"
            elif answer.profile not in self._broken[salt]:
                test.add(is_over=is_over)
                if test.evidence >= 1 / ALPHA:
                    self._broken[salt].append(answer.profile)
                    result = "broken"
        self._count(result)
        if result == "broken":
            text = "answers break the promise of reuse profile %s (%g nats, risk %g); calibrate on this traffic"
            logger.error(text, answer.profile, answer.max_kl, answer.risk)
        return result
