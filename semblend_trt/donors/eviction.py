"""Which donor goes first when room is needed: one interface, six policies."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from semblend_trt.donors.block_kind import UNREAD, BlockKind, KindMix, main_kind, mean_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(slots=True)
class DonorHistory:
    """One donor's past, the same in every tier; the catalog keeps it.

    `added` and `last_use` are ticks of one counter (adding is a use too). `last_seconds` is the time of the last use by
    the catalog's clock, `uses` counts the uses after the first. `text` names the donor's text, empty where unknown.
    """

    tokens: int
    added: int = 0
    last_use: int = 0
    last_seconds: float = 0.0
    uses: int = 0
    text: bytes = b""
    kinds: KindMix = field(default_factory=lambda: UNREAD)


Rank = tuple[float, ...]


class Ranking:
    """Names in the order of their ranks: a sorted list, in which a change moves some kilobytes for 10,000 names."""

    def __init__(self) -> None:
        self._order: list[tuple[Rank, str]] = []
        self._ranks: dict[str, Rank] = {}

    def put(self, name: str, rank: Rank) -> None:
        """Gives `name` this rank, whether it had one or not."""
        self.discard(name)
        self._ranks[name] = rank
        insort(self._order, (rank, name))

    def discard(self, name: str) -> Rank | None:
        """Takes `name` out and returns the rank that it had."""
        rank = self._ranks.pop(name, None)
        if rank is not None:
            del self._order[bisect_left(self._order, (rank, name))]
        return rank

    def items(self) -> Iterator[tuple[Rank, str]]:
        """(rank, name), the lowest rank first; the ranking must not change meanwhile."""
        return iter(self._order)


class EvictionPolicy:
    """Names the donors of one tier in the order in which they should go, the lowest rank first.

    Few calls look at all of them. Not thread safe: the catalog calls it under its own lock, and changes nothing while
    it walks `candidates`. A donor's history is up to date when the policy hears of it.
    """

    def __init__(self, rank: Callable[[DonorHistory], Rank]) -> None:
        """`rank` is taken when a donor is added, used or described."""
        self._rank = rank
        self._histories: dict[str, DonorHistory] = {}
        self._ranking = Ranking()

    def added(self, donor_id: str, history: DonorHistory) -> None:
        """The donor is ready in this tier from now on; it may have been in another before."""
        self._histories[donor_id] = history
        self._put(donor_id)

    def used(self, donor_id: str) -> None:
        """The donor was leased, or its text was asked for again."""
        self._put(donor_id)

    def described(self, donor_id: str) -> None:
        """The kinds of the donor's text have become known."""
        if donor_id in self._histories:
            self._put(donor_id)

    def removed(self, donor_id: str, *, evicted: bool = False) -> None:  # noqa: ARG002 - other policies read it
        """The donor has left this tier; `evicted` when it had to make room."""
        self._histories.pop(donor_id, None)
        self._ranking.discard(donor_id)

    def candidates(self) -> Iterator[str]:
        """Donors, the one to go first in front."""
        return (name for _, name in self._ranking.items())

    def _put(self, donor_id: str) -> None:
        self._ranking.put(donor_id, self._rank(self._histories[donor_id]))


class SizeAwareEviction(EvictionPolicy):
    """Large and long unused first: GreedyDual-Size with a cost of one for every use (Cao and Irani, USITS 1997).

    A donor's rank is one over its tokens, on top of the rank of the last donor that was evicted. Among donors of one
    size the least recently used goes first; a donor of half the tokens may stay unused for twice as many evictions.
    """

    def __init__(self) -> None:
        super().__init__(lambda history: (self._floor + 1.0 / history.tokens, history.last_use))
        self._floor = 0.0

    def described(self, donor_id: str) -> None:
        """Kinds do not count, and this is no use."""

    def removed(self, donor_id: str, *, evicted: bool = False) -> None:
        self._histories.pop(donor_id, None)
        rank = self._ranking.discard(donor_id)
        if evicted and rank is not None:
            self._floor = max(self._floor, rank[0])


# The time before any gap was seen, which the SemanticKV system fixes. It weighs as much as some gaps, so that no early
# gap decides.
FIRST_SECONDS, _FIRST_GAPS = 60.0, 8
# The weight that an older gap keeps when another comes: about the last thousand count.
MEMORY = 0.999
_LEAST_GAP_SECONDS = 1e-3


class ReturnTimes:
    """The mean time from any moment to the next use, by kind, of donors that are used again.

    For gaps g between two uses it is sum(g^2) / (2 sum(g)), the mean residual life of renewal theory: a moment falls
    into a long gap more often than into a short one. A kind of which many donors are used now and then has a long time,
    the turns of a conversation a short one.
    """

    def __init__(self) -> None:
        first = (_FIRST_GAPS * FIRST_SECONDS, _FIRST_GAPS * 2.0 * FIRST_SECONDS**2)
        self._sums = dict.fromkeys(BlockKind, first)

    def seconds(self, kind: BlockKind) -> float:
        """The mean time for donors of `kind`, above 0."""
        gaps, squares = self._sums[kind]
        return squares / (2.0 * gaps)

    def came_back(self, kind: BlockKind, gap_seconds: float) -> None:
        """A donor of `kind` was used, or its text became one again, so long after its last use."""
        gap = max(gap_seconds, _LEAST_GAP_SECONDS)
        gaps, squares = self._sums[kind]
        self._sums[kind] = MEMORY * gaps + gap, MEMORY * squares + gap * gap


# An evicted donor that was never used lowers its kind by the SemanticKV system's factor. That system also raises a kind
# on a hit and on a regret, without saying by how much; here a hit outweighs two unused donors, a regret ten.
UNUSED_FACTOR = 0.995
HIT_FACTOR = 1.01
REGRET_FACTOR = 1.05
# Bounds of a factor, so that neither a flood of one kind nor its absence decides alone.
LEAST, MOST = 0.25, 4.0
MAX_REMEMBERED = 4096


class KindWeights:
    """A factor on each kind's default weight, shared by the tiers of one catalog.

    A regret is a text that becomes a donor again after its donor was evicted; the last MAX_REMEMBERED evicted texts are
    known. `returns` learns the gaps of hits and regrets.
    """

    def __init__(self) -> None:
        self.returns = ReturnTimes()
        self._factors = dict.fromkeys(BlockKind, 1.0)
        self._gone: OrderedDict[bytes, tuple[str, BlockKind, float]] = OrderedDict()

    def factor(self, kind: BlockKind) -> float:
        return self._factors[kind]

    def hit(self, kinds: KindMix, gap_seconds: float) -> None:
        """A donor of these kinds was used, so long after its last use."""
        kind = main_kind(kinds)
        self._scale(kind, HIT_FACTOR)
        self.returns.came_back(kind, gap_seconds)

    def evicted(self, donor_id: str, history: DonorHistory) -> None:
        """A donor had to make room."""
        kind = main_kind(history.kinds)
        if not history.uses:
            self._scale(kind, UNUSED_FACTOR)
        if history.text:
            self._gone[history.text] = donor_id, kind, history.last_seconds
            self._gone.move_to_end(history.text)
            if len(self._gone) > MAX_REMEMBERED:
                self._gone.popitem(last=False)

    def came(self, donor_id: str, text: bytes, seconds: float) -> None:
        """A donor is ready, last used at `seconds`. It is a regret when another donor of its text was evicted; a donor
        that only moved is none."""
        gone = self._gone.pop(text, None)
        if gone is not None and gone[0] != donor_id:
            _, kind, last_seconds = gone
            self._scale(kind, REGRET_FACTOR)
            self.returns.came_back(kind, seconds - last_seconds)

    def _scale(self, kind: BlockKind, factor: float) -> None:
        self._factors[kind] = min(MOST, max(LEAST, self._factors[kind] * factor))


# A kind's donors are ranked anew when its time has become so much longer or shorter.
_MOVED = math.log(1.1)


class AdaptiveSemanticEviction(EvictionPolicy):
    """Lowest score first: weight x (1 + ln(1 + n) + 0.25 n) x e^(-age / t) / t with n uses.

    Weights and the sum over n are the SemanticKV system's. Its fixed time of 60 s and its least freshness are not: t is
    the time that donors of the kind were seen to wait for their next use. So no count and no weight keeps an overdue
    donor for long, and the order is the same at any pace of requests. Size does not count: what a donor saves and the
    room that it takes both grow with its tokens.

    Age lowers all donors of a kind alike, and the kind's factor is common to them. So each kind has a ranking that only
    uses change, `candidates` merges the rankings, and donors are ranked anew only when t has moved.
    """

    def __init__(self, weights: KindWeights, clock: Callable[[], float]) -> None:
        """`clock` gives the seconds in which `DonorHistory.last_seconds` counts."""
        super().__init__(lambda history: (self._logarithm(history), history.last_use))
        self._weights, self._clock = weights, clock
        self._kind_of: dict[str, BlockKind] = {}
        self._last_seconds: dict[str, float] = {}
        self._rankings = {kind: Ranking() for kind in BlockKind}
        self._seconds = dict.fromkeys(BlockKind, FIRST_SECONDS)

    def added(self, donor_id: str, history: DonorHistory) -> None:
        self._weights.came(donor_id, history.text, history.last_seconds)
        super().added(donor_id, history)

    def used(self, donor_id: str) -> None:
        history = self._histories[donor_id]
        self._weights.hit(history.kinds, history.last_seconds - self._last_seconds[donor_id])
        super().used(donor_id)

    def removed(self, donor_id: str, *, evicted: bool = False) -> None:
        history = self._histories.pop(donor_id, None)
        if history is not None:
            self._rankings[self._kind_of.pop(donor_id)].discard(donor_id)
            del self._last_seconds[donor_id]
            if evicted:
                self._weights.evicted(donor_id, history)

    def candidates(self) -> Iterator[str]:
        now, orders = self._clock(), []
        for kind, ranking in self._rankings.items():
            self._follow(kind)
            # Less now / t, a rank is the logarithm of the score without the kind's factor.
            seconds = self._seconds[kind]
            by = math.log(self._weights.factor(kind) / seconds) - now / seconds
            orders.append(_shifted(ranking, by))
        return (donor_id for _, _, donor_id in heapq.merge(*orders))

    def _put(self, donor_id: str) -> None:
        history = self._histories[donor_id]
        kind = main_kind(history.kinds)
        last_kind = self._kind_of.get(donor_id, kind)
        if last_kind is not kind:
            self._rankings[last_kind].discard(donor_id)
        self._kind_of[donor_id] = kind
        self._last_seconds[donor_id] = history.last_seconds
        self._rankings[kind].put(donor_id, self._rank(history))

    def _logarithm(self, history: DonorHistory) -> float:
        """The logarithm of the donor's score, without the parts that are common to its kind."""
        uses = 1.0 + math.log1p(history.uses) + 0.25 * history.uses
        seconds = self._seconds[main_kind(history.kinds)]
        return math.log(mean_weight(history.kinds) * uses) + history.last_seconds / seconds

    def _follow(self, kind: BlockKind) -> None:
        """Ranks the kind's donors anew where its time has moved."""
        seconds = self._weights.returns.seconds(kind)
        if abs(math.log(seconds / self._seconds[kind])) > _MOVED:
            self._seconds[kind] = seconds
            for _, donor_id in list(self._rankings[kind].items()):
                self._put(donor_id)


def _shifted(ranking: Ranking, by: float) -> Iterator[tuple[float, float, str]]:
    for (rank, last_use), donor_id in ranking.items():
        yield rank + by, last_use, donor_id


class Eviction(str, Enum):
    """Names of the policies, as SEMBLEND_EVICTION takes them."""

    FIFO = "fifo"
    LRU = "lru"
    LFU = "lfu"
    SIZE_AWARE = "size_aware"
    STATIC_SEMANTIC = "static_semantic"
    ADAPTIVE_SEMANTIC = "adaptive_semantic"

    @property
    def reads_kinds(self) -> bool:
        """True when the kinds of donors' text count."""
        return self in (Eviction.STATIC_SEMANTIC, Eviction.ADAPTIVE_SEMANTIC)


_RANKS: dict[Eviction, Callable[[DonorHistory], Rank]] = {
    Eviction.FIFO: lambda history: (history.added,),
    Eviction.LRU: lambda history: (history.last_use,),
    Eviction.LFU: lambda history: (history.uses, history.last_use),
    Eviction.STATIC_SEMANTIC: lambda history: (mean_weight(history.kinds), history.last_use),
}


def eviction_factory(name: Eviction, clock: Callable[[], float]) -> Callable[[], EvictionPolicy]:
    """Makes the policy of one tier at each call; the policies of one factory share what they learn."""
    if name is Eviction.ADAPTIVE_SEMANTIC:
        weights = KindWeights()
        return lambda: AdaptiveSemanticEviction(weights, clock)
    if name is Eviction.SIZE_AWARE:
        return SizeAwareEviction
    return lambda: EvictionPolicy(_RANKS[name])
