"""AdaptiveSemanticEviction: what a donor's room is expected to save a second, from what was seen of its kind."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from semblend_trt.donors.block_kind import BlockKind, main_kind, mean_weight
from semblend_trt.donors.eviction.ranking import Ranking
from semblend_trt.donors.eviction.return_times import FIRST_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from semblend_trt.donors.eviction.kind_weights import KindWeights
    from semblend_trt.donors.eviction.policy import DonorHistory

# A kind's donors are ranked anew when its time has become so much longer or shorter.
_MOVED = math.log(1.1)


def worth(history: DonorHistory) -> float:
    """Logarithm of the score without its time and without the kinds' factors."""
    return math.log(mean_weight(history.kinds) * (1.0 + math.log1p(history.uses) + 0.25 * history.uses))


class AdaptiveSemanticEviction:
    """Lowest score first: weight x (1 + ln(1 + n) + 0.25 n) x e^(-age / t) / t with n uses.

    Weights and the sum over n are the SemanticKV system's. Its time of 60 s and its least freshness are not: t is what
    donors of the kind were seen to wait for their next use, so that no count and no weight keeps one for long that is
    overdue, and the order is the same at any pace of requests. Size does not count: what a donor saves and the room
    that it takes both grow with its tokens.

    Time takes all donors of a kind down alike, and its factor is common to them. So each kind has a ranking that only
    uses change, `candidates` merges them, and donors are ranked anew in the rare case that t has moved.
    """

    def __init__(self, weights: KindWeights, clock: Callable[[], float]) -> None:
        """`clock` gives the seconds in which `DonorHistory.last_seconds` counts."""
        self._weights, self._clock = weights, clock
        self._histories: dict[str, DonorHistory] = {}
        self._kind_of: dict[str, BlockKind] = {}
        self._last_seconds: dict[str, float] = {}
        self._rankings = {kind: Ranking() for kind in BlockKind}
        self._seconds = dict.fromkeys(BlockKind, FIRST_SECONDS)

    def added(self, donor_id: str, history: DonorHistory) -> None:
        self._histories[donor_id] = history
        self._weights.came(donor_id, history.text, history.last_seconds)
        self._enter(donor_id)

    def used(self, donor_id: str) -> None:
        history = self._histories[donor_id]
        self._weights.hit(history.kinds, history.last_seconds - self._last_seconds[donor_id])
        self._enter(donor_id)

    def described(self, donor_id: str) -> None:
        if donor_id in self._histories:
            self._enter(donor_id)

    def removed(self, donor_id: str, *, evicted: bool = False) -> None:
        history = self._histories.pop(donor_id, None)
        if history is None:
            return
        self._rankings[self._kind_of.pop(donor_id)].discard(donor_id)
        del self._last_seconds[donor_id]
        if evicted:
            self._weights.evicted(donor_id, history)

    def candidates(self) -> Iterator[str]:
        now, orders = self._clock(), []
        for kind, ranking in self._rankings.items():
            self._follow(kind)
            # A rank is worth + last use / t; less now / t it is the logarithm of what time leaves of the worth.
            seconds = self._seconds[kind]
            by = math.log(self._weights.factor(kind) / seconds) - now / seconds
            orders.append(_shifted(ranking, by))
        return (donor_id for _, _, donor_id in heapq.merge(*orders))

    def _enter(self, donor_id: str) -> None:
        history = self._histories[donor_id]
        kind = main_kind(history.kinds)
        last_kind = self._kind_of.get(donor_id, kind)
        if last_kind is not kind:
            self._rankings[last_kind].discard(donor_id)
        self._kind_of[donor_id] = kind
        self._last_seconds[donor_id] = history.last_seconds
        self._rank(donor_id, kind)

    def _rank(self, donor_id: str, kind: BlockKind) -> None:
        history = self._histories[donor_id]
        self._rankings[kind].put(
            donor_id, (worth(history) + history.last_seconds / self._seconds[kind], history.last_use)
        )

    def _follow(self, kind: BlockKind) -> None:
        seconds = self._weights.returns.seconds(kind)
        if abs(math.log(seconds / self._seconds[kind])) > _MOVED:
            self._seconds[kind] = seconds
            for donor_id in list(self._rankings[kind]):
                self._rank(donor_id, kind)


def _shifted(ranking: Ranking, by: float) -> Iterator[tuple[float, float, str]]:
    for (rank, last_use), donor_id in ranking.items():
        yield rank + by, last_use, donor_id
