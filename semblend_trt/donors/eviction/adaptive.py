"""AdaptiveSemanticEviction: the SemanticKV system's score, kept in order while time passes and weights move."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from semblend_trt.donors.block_kind import BlockKind, main_kind, mean_weight
from semblend_trt.donors.eviction.ranking import Ranking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from semblend_trt.donors.eviction.kind_weights import KindWeights
    from semblend_trt.donors.eviction.policy import DonorHistory

AGE_SECONDS = 60.0
LEAST_FRESHNESS = 0.05
TOKEN_EXPONENT = 0.15
# From this age on a donor's freshness stays at the least.
_OLD_SECONDS = AGE_SECONDS * math.log(1.0 / LEAST_FRESHNESS)


def worth(history: DonorHistory) -> float:
    """Logarithm of the score without freshness and without the kinds' factors.

    The score is weight x (1 + ln(1 + n) + 0.25 n) x max(0.05, e^(-age / 60 s)) x saved / tokens^0.15 with n uses. What
    a donor saves is the prefill of its tokens: a factor common to all donors changes no order, so it counts in tokens.
    """
    uses = 1.0 + math.log1p(history.uses) + 0.25 * history.uses
    return math.log(mean_weight(history.kinds) * uses) + (1.0 - TOKEN_EXPONENT) * math.log(history.tokens)


class AdaptiveSemanticEviction:
    """Lowest score first.

    Freshness falls alike for all donors until it stays at its least, and a kind's factor is common to its donors. So
    each kind has two rankings that time does not disturb, of fresh and of old donors, and `candidates` merges them.
    """

    def __init__(self, weights: KindWeights, clock: Callable[[], float]) -> None:
        """`clock` gives the seconds in which `DonorHistory.last_seconds` counts."""
        self._weights, self._clock = weights, clock
        self._histories: dict[str, DonorHistory] = {}
        self._kind_of: dict[str, BlockKind] = {}
        self._fresh = {kind: Ranking() for kind in BlockKind}
        self._old = {kind: Ranking() for kind in BlockKind}
        self._by_age = Ranking()  # of the fresh donors, the longest unused in front

    def added(self, donor_id: str, history: DonorHistory) -> None:
        self._histories[donor_id] = history
        self._weights.came(donor_id, history.text)
        self._enter(donor_id)

    def used(self, donor_id: str) -> None:
        self._weights.hit(self._histories[donor_id].kinds)
        self._enter(donor_id)

    def described(self, donor_id: str) -> None:
        if donor_id in self._histories:
            self._enter(donor_id)

    def removed(self, donor_id: str, *, evicted: bool = False) -> None:
        history = self._histories.pop(donor_id, None)
        if history is None:
            return
        self._leave(donor_id)
        if evicted:
            self._weights.evicted(donor_id, history.text, history.kinds, was_used=history.uses > 0)

    def candidates(self) -> Iterator[str]:
        now = self._clock()
        self._let_age(now)
        orders = []
        for kind in BlockKind:
            factor = math.log(self._weights.factor(kind))
            # A fresh donor's rank is worth + last use / 60 s; less now / 60 s it is the logarithm of its score.
            orders.append(_shifted(self._fresh[kind], factor - now / AGE_SECONDS))
            orders.append(_shifted(self._old[kind], factor + math.log(LEAST_FRESHNESS)))
        return (donor_id for _, _, donor_id in heapq.merge(*orders))

    def _enter(self, donor_id: str) -> None:
        self._leave(donor_id)
        history = self._histories[donor_id]
        kind = self._kind_of[donor_id] = main_kind(history.kinds)
        rank = worth(history) + history.last_seconds / AGE_SECONDS
        self._fresh[kind].put(donor_id, (rank, history.last_use))
        self._by_age.put(donor_id, (history.last_seconds,))

    def _leave(self, donor_id: str) -> None:
        kind = self._kind_of.pop(donor_id, None)
        if kind is not None:
            self._fresh[kind].discard(donor_id)
            self._old[kind].discard(donor_id)
            self._by_age.discard(donor_id)

    def _let_age(self, now: float) -> None:
        """Moves donors whose freshness has reached its least; each only once after its last use."""
        while self._by_age:
            donor_id = next(iter(self._by_age))
            history = self._histories[donor_id]
            if now - history.last_seconds < _OLD_SECONDS:
                return
            kind = self._kind_of[donor_id]
            self._by_age.discard(donor_id)
            self._fresh[kind].discard(donor_id)
            self._old[kind].put(donor_id, (worth(history), history.last_use))


def _shifted(ranking: Ranking, by: float) -> Iterator[tuple[float, float, str]]:
    for (rank, last_use), donor_id in ranking.items():
        yield rank + by, last_use, donor_id
