"""Which donor goes first when room is needed: an order by rank, and the ranks of three policies."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from semblend_trt.config import Eviction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(slots=True)
class DonorHistory:
    """One donor's past, the same in every tier; the catalog keeps it.

    `last_use` is a tick of one counter (adding is a use too). `uses` counts the uses after the first."""

    tokens: int
    last_use: int = 0
    uses: int = 0


Rank = tuple[float, ...]
HistoryT_contra = TypeVar("HistoryT_contra", bound=DonorHistory, contravariant=True)


class EvictionPolicy(Generic[HistoryT_contra]):
    """Order the donors of one tier, the first to go first: the lowest rank.

    Not thread safe: the catalog calls it under its own lock, and changes nothing while it walks `candidates`. A donor's
    history is up to date when the policy hears of it. `floor`: the highest first number of an evicted donor's rank."""

    def __init__(self, rank: Callable[[HistoryT_contra], Rank]) -> None:
        """Order donors by `rank`, which is taken at every use."""
        self._rank, self.floor = rank, 0.0
        # A sorted list, in which a change moves some kilobytes for 10,000 names.
        self._order: list[tuple[Rank, str]] = []
        self._ranks: dict[str, Rank] = {}

    def used(self, donor_id: str, history: HistoryT_contra) -> None:
        """Note that the donor came into this tier, was leased, or its text was asked for again."""
        self._discard(donor_id)
        rank = self._ranks[donor_id] = self._rank(history)
        insort(self._order, (rank, donor_id))

    def removed(self, donor_id: str, *, evicted: bool = False) -> None:
        """Remove a donor that left this tier; `evicted` when it had to make room."""
        rank = self._discard(donor_id)
        if evicted and rank is not None:
            self.floor = max(self.floor, rank[0])

    def candidates(self) -> Iterator[str]:
        """Iterate over donors, the first to go first."""
        return (name for _, name in self._order)

    def _discard(self, donor_id: str) -> Rank | None:
        rank = self._ranks.pop(donor_id, None)
        if rank is not None:
            del self._order[bisect_left(self._order, (rank, donor_id))]
        return rank


def policy_of(name: Eviction) -> EvictionPolicy[DonorHistory]:
    """Return the policy of one tier.

    `size_aware` is GreedyDual-Size with a cost of one for every use (Cao and Irani, USITS 1997): a donor's rank is one
    over its tokens, plus the rank of the last evicted donor. Among donors of one size the least recently used goes
    first; a donor of half the tokens may stay unused for twice the evictions."""
    if name is Eviction.LFU:
        return EvictionPolicy(lambda history: (history.uses, history.last_use))
    if name is Eviction.LRU:
        return EvictionPolicy(lambda history: (history.last_use,))
    policy = EvictionPolicy[DonorHistory](lambda history: (policy.floor + 1.0 / history.tokens, history.last_use))
    return policy
