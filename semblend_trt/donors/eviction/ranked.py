"""RankedEviction: policies that give each donor a rank that only its own history changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from semblend_trt.donors.block_kind import mean_weight
from semblend_trt.donors.eviction.ranking import Rank, Ranking

if TYPE_CHECKING:
    from collections.abc import Iterator

    from semblend_trt.donors.eviction.policy import DonorHistory


class RankedEviction(ABC):
    """Lowest rank first."""

    def __init__(self) -> None:
        self._histories: dict[str, DonorHistory] = {}
        self._ranking = Ranking()

    @abstractmethod
    def rank(self, history: DonorHistory) -> Rank:
        """The donor's rank, taken when it is added, used or described."""

    def added(self, donor_id: str, history: DonorHistory) -> None:
        self._histories[donor_id] = history
        self._ranking.put(donor_id, self.rank(history))

    def used(self, donor_id: str) -> None:
        self._ranking.put(donor_id, self.rank(self._histories[donor_id]))

    def described(self, donor_id: str) -> None:  # noqa: B027 - most policies have nothing to do
        """Kinds do not count unless a policy says so."""

    def removed(self, donor_id: str, *, evicted: bool = False) -> None:  # noqa: ARG002 - the interface names it
        self._histories.pop(donor_id, None)
        self._ranking.discard(donor_id)

    def candidates(self) -> Iterator[str]:
        return iter(self._ranking)


class FifoEviction(RankedEviction):
    """First in, first out, whatever was used."""

    def rank(self, history: DonorHistory) -> Rank:
        return (history.added,)


class LruEviction(RankedEviction):
    """Least recently used first; a donor counts as used when it is added."""

    def rank(self, history: DonorHistory) -> Rank:
        return (history.last_use,)


class LfuEviction(RankedEviction):
    """Least often used first, of those the least recently used."""

    def rank(self, history: DonorHistory) -> Rank:
        return (history.uses, history.last_use)


class SizeAwareEviction(RankedEviction):
    """Large and long unused first: GreedyDual-Size with a cost of one for every use (Cao and Irani, USITS 1997).

    A use is worth one over the donor's tokens on top of what the last donor that went was worth. Among donors of one
    size that is least recently used first; a donor of half the tokens may stay unused for twice as many evictions.
    """

    def __init__(self) -> None:
        super().__init__()
        self._floor = 0.0

    def rank(self, history: DonorHistory) -> Rank:
        return (self._floor + 1.0 / history.tokens, history.last_use)

    def removed(self, donor_id: str, *, evicted: bool = False) -> None:
        self._histories.pop(donor_id, None)
        rank = self._ranking.discard(donor_id)
        if evicted and rank is not None:
            self._floor = max(self._floor, rank[0])


class StaticSemanticEviction(RankedEviction):
    """Least weight first, by the kinds of the donor's text and fixed weights; of equal ones the least recently used."""

    def rank(self, history: DonorHistory) -> Rank:
        return (mean_weight(history.kinds), history.last_use)

    def described(self, donor_id: str) -> None:
        if donor_id in self._histories:
            self.used(donor_id)
