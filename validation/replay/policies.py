"""Eviction policies that a replay plays: those that serve donors, and three that no donor is served by.

The policies by kind are the SemanticKV system's: one with fixed weights, and one with weights that follow use.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from semblend_trt.config import Eviction
from semblend_trt.donors.eviction import DonorHistory, EvictionPolicy, Rank, Ranking, policy_of
from semblend_trt.fleet.telemetry import BlockKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclass(slots=True)
class BlockHistory(DonorHistory):
    """The past of a held block, which is a donor to a policy.

    `block` is its number and `added` the tick at which it came. `last_seconds` is the trace's time of its last use.
    """

    block: int = 0
    kind: BlockKind = BlockKind.OTHER
    added: int = 0
    last_seconds: float = 0.0


# The SemanticKV system's default weights. It has none for legal evidence, which is retrieved text as well.
DEFAULT_WEIGHTS: Mapping[BlockKind, float] = MappingProxyType(
    {
        BlockKind.SYSTEM_PROMPT: 2.4,
        BlockKind.TEMPLATE: 2.0,
        BlockKind.CODE: 1.6,
        BlockKind.RETRIEVED_CONTEXT: 1.4,
        BlockKind.LEGAL_EVIDENCE: 1.4,
        BlockKind.TOOL_OUTPUT: 1.1,
        BlockKind.ASSISTANT_HISTORY: 1.0,
        BlockKind.OTHER: 0.8,
        BlockKind.USER_QUERY: 0.7,
    }
)

# The time before any gap was seen, which the SemanticKV system fixes. It weighs as much as some gaps, so that no early
# gap decides.
FIRST_SECONDS, _FIRST_GAPS = 60.0, 8
# The weight that an older gap keeps when another comes: about the last thousand count.
MEMORY = 0.999
_LEAST_GAP_SECONDS = 1e-3


class ReturnTimes:
    """The mean time from any moment to the next use, by kind, of blocks that are used again.

    For gaps g between two uses it is sum(g^2) / (2 sum(g)), the mean residual life of renewal theory: a moment falls
    into a long gap more often than into a short one. A kind of which many blocks are used now and then has a long time,
    the turns of a conversation a short one.
    """

    def __init__(self) -> None:
        first = (_FIRST_GAPS * FIRST_SECONDS, _FIRST_GAPS * 2.0 * FIRST_SECONDS**2)
        self._sums = dict.fromkeys(BlockKind, first)

    def seconds(self, kind: BlockKind) -> float:
        """The mean time for blocks of `kind`, above 0."""
        gaps, squares = self._sums[kind]
        return squares / (2.0 * gaps)

    def came_back(self, kind: BlockKind, gap_seconds: float) -> None:
        """A block of `kind` was used, or came back, this long after its last use."""
        gap = max(gap_seconds, _LEAST_GAP_SECONDS)
        gaps, squares = self._sums[kind]
        self._sums[kind] = MEMORY * gaps + gap, MEMORY * squares + gap * gap


# An evicted block that was never used lowers its kind by the SemanticKV system's factor. That system also raises a kind
# on a hit and on a regret, without saying by how much; here a hit outweighs two unused blocks, a regret ten.
UNUSED_FACTOR = 0.995
HIT_FACTOR = 1.01
REGRET_FACTOR = 1.05
# Bounds of a factor, so that neither a flood of one kind nor its absence decides alone.
LEAST, MOST = 0.25, 4.0
MAX_REMEMBERED = 4096


class KindWeights:
    """A factor on each kind's default weight.

    A regret is a block that comes back after it was evicted. The last MAX_REMEMBERED evicted blocks are known.
    `returns` learns the gaps of hits and regrets.
    """

    def __init__(self) -> None:
        self.returns = ReturnTimes()
        self._factors = dict.fromkeys(BlockKind, 1.0)
        self._gone: OrderedDict[int, float] = OrderedDict()

    def factor(self, kind: BlockKind) -> float:
        return self._factors[kind]

    def hit(self, kind: BlockKind, gap_seconds: float) -> None:
        """A block of this kind was used, this long after its last use."""
        self._scale(kind, HIT_FACTOR)
        self.returns.came_back(kind, gap_seconds)

    def evicted(self, history: BlockHistory) -> None:
        """A block had to make room."""
        if not history.uses:
            self._scale(history.kind, UNUSED_FACTOR)
        self._gone[history.block] = history.last_seconds
        if len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)

    def came(self, history: BlockHistory) -> None:
        """A block is held from now on. It is a regret if it was evicted before."""
        last_seconds = self._gone.pop(history.block, None)
        if last_seconds is not None:
            self._scale(history.kind, REGRET_FACTOR)
            self.returns.came_back(history.kind, history.last_seconds - last_seconds)

    def _scale(self, kind: BlockKind, factor: float) -> None:
        self._factors[kind] = min(MOST, max(LEAST, self._factors[kind] * factor))


# A kind's blocks are ranked again when its time has become this much longer or shorter.
_MOVED = math.log(1.1)


class AdaptiveSemanticEviction(EvictionPolicy[BlockHistory]):
    """Lowest score first: weight x (1 + ln(1 + n) + 0.25 n) x e^(-age / t) / t with n uses.

    Weights and the sum over n are the SemanticKV system's. Its fixed time of 60 s and its least freshness are not: t is
    the time that blocks of the kind were seen to wait for their next use. So no count and no weight keeps an overdue
    block for long, and the order is the same at any pace of requests. Size does not count: what a block saves and the
    room that it takes both grow with its tokens.

    Age lowers all blocks of a kind alike, and the kind's factor is common to them. So each kind has a ranking that only
    uses change, `candidates` merges the rankings, and blocks are ranked again only when t has moved.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives the seconds in which `BlockHistory.last_seconds` counts."""
        super().__init__(lambda history: (self._logarithm(history), history.last_use))
        self._weights, self._clock = KindWeights(), clock
        self._last_seconds: dict[str, float] = {}
        self._rankings = {kind: Ranking() for kind in BlockKind}
        self._seconds = dict.fromkeys(BlockKind, FIRST_SECONDS)

    def added(self, donor_id: str, history: BlockHistory) -> None:
        self._weights.came(history)
        super().added(donor_id, history)

    def used(self, donor_id: str) -> None:
        history = self._histories[donor_id]
        self._weights.hit(history.kind, history.last_seconds - self._last_seconds[donor_id])
        super().used(donor_id)

    def removed(self, donor_id: str, *, evicted: bool = False) -> None:
        history = self._histories.pop(donor_id)
        self._rankings[history.kind].discard(donor_id)
        del self._last_seconds[donor_id]
        if evicted:
            self._weights.evicted(history)

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
        self._last_seconds[donor_id] = history.last_seconds
        self._rankings[history.kind].put(donor_id, self._rank(history))

    def _logarithm(self, history: BlockHistory) -> float:
        """The logarithm of the block's score, without the parts that are common to its kind."""
        uses = 1.0 + math.log1p(history.uses) + 0.25 * history.uses
        return math.log(DEFAULT_WEIGHTS[history.kind] * uses) + history.last_seconds / self._seconds[history.kind]

    def _follow(self, kind: BlockKind) -> None:
        """Ranks the kind's blocks again where its time has moved."""
        seconds = self._weights.returns.seconds(kind)
        if abs(math.log(seconds / self._seconds[kind])) > _MOVED:
            self._seconds[kind] = seconds
            for _, donor_id in list(self._rankings[kind].items()):
                self._put(donor_id)


def _shifted(ranking: Ranking, by: float) -> Iterator[tuple[float, float, str]]:
    for (rank, last_use), donor_id in ranking.items():
        yield rank + by, last_use, donor_id


class ReplayPolicy(str, Enum):
    """Names of the policies that a replay plays."""

    FIFO = "fifo"
    LRU = "lru"
    LFU = "lfu"
    SIZE_AWARE = "size_aware"
    STATIC_SEMANTIC = "static_semantic"
    ADAPTIVE_SEMANTIC = "adaptive_semantic"


_RANKS: dict[ReplayPolicy, Callable[[BlockHistory], Rank]] = {
    ReplayPolicy.FIFO: lambda history: (history.added,),
    ReplayPolicy.STATIC_SEMANTIC: lambda history: (DEFAULT_WEIGHTS[history.kind], history.last_use),
}


def replay_policy(name: ReplayPolicy, clock: Callable[[], float]) -> EvictionPolicy[BlockHistory]:
    """Makes the policy of one cache; `clock` gives the trace's time in seconds."""
    if name is ReplayPolicy.ADAPTIVE_SEMANTIC:
        return AdaptiveSemanticEviction(clock)
    return EvictionPolicy(_RANKS[name]) if name in _RANKS else policy_of(Eviction(name.value))
