"""A trace served by a cache of blocks under an eviction policy.

The policies are those that evict donors, and three that only a replay plays. Those by kind are the SemanticKV system's:
one with fixed weights, and one with weights that follow use.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from semblend_trt.config import Eviction
from semblend_trt.donors.eviction import DonorHistory, EvictionPolicy, Ranking, policy_of
from validation.replay.trace import NONE, BlockKind, Blocks, Trace


@dataclass(slots=True)
class BlockHistory(DonorHistory):
    """A held block's past, a donor to a policy. `added`: its first tick. `last_seconds`: trace time of its last use."""

    block: int = 0
    kind: BlockKind = BlockKind.OTHER
    added: int = 0
    last_seconds: float = 0.0


# The SemanticKV system's default weights. It has none for legal evidence, which is retrieved text as well.
DEFAULT_WEIGHTS = {
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
# SemanticKV's fixed time, for as long as no gap was seen. It weighs as several gaps, so that no early gap decides.
FIRST_SECONDS, _FIRST_GAPS = 60.0, 8
# The weight that an older gap keeps when another comes: about the last thousand count.
MEMORY = 0.999
_LEAST_GAP_SECONDS = 1e-3
# An evicted block that was never used lowers its kind by the SemanticKV system's factor. That system also raises a kind
# on a hit and on a regret, without saying by how much; here a hit outweighs two unused blocks, a regret ten.
UNUSED_FACTOR = 0.995
HIT_FACTOR = 1.01
REGRET_FACTOR = 1.05
# Bounds of a factor, so that neither a flood of one kind nor its absence decides alone.
LEAST, MOST = 0.25, 4.0
MAX_REMEMBERED = 4096


class KindUse:
    """What uses teach of each kind: a factor on its weight, and how long its blocks wait for their next use. A regret
    is a block that comes back after its eviction; the last MAX_REMEMBERED evicted blocks are known."""

    def __init__(self) -> None:
        self.factors = dict.fromkeys(BlockKind, 1.0)
        self._sums = dict.fromkeys(BlockKind, (_FIRST_GAPS * FIRST_SECONDS, _FIRST_GAPS * 2.0 * FIRST_SECONDS**2))
        self._gone: OrderedDict[int, float] = OrderedDict()

    def seconds(self, kind: BlockKind) -> float:
        """Return the mean time, above 0, from any moment to the next use of blocks of `kind` that are used again. For
        gaps g it is sum(g^2) / (2 sum(g)), the mean residual life of renewal theory: most moments lie in long gaps."""
        gaps, squares = self._sums[kind]
        return squares / (2.0 * gaps)

    def came_back(self, kind: BlockKind, gap_seconds: float, factor: float = HIT_FACTOR) -> None:
        """Learn that a block of `kind` was used `gap_seconds` after its last use, which raises its kind by `factor`."""
        self._scale(kind, factor)
        gap = max(gap_seconds, _LEAST_GAP_SECONDS)
        gaps, squares = self._sums[kind]
        self._sums[kind] = MEMORY * gaps + gap, MEMORY * squares + gap * gap

    def evicted(self, history: BlockHistory) -> None:
        """Learn that a block had to make room."""
        if not history.uses:
            self._scale(history.kind, UNUSED_FACTOR)
        self._gone[history.block] = history.last_seconds
        if len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)

    def came(self, history: BlockHistory) -> None:
        """Learn that a block is held now. It is a regret if it was evicted before."""
        last_seconds = self._gone.pop(history.block, None)
        if last_seconds is not None:
            self.came_back(history.kind, history.last_seconds - last_seconds, REGRET_FACTOR)

    def _scale(self, kind: BlockKind, factor: float) -> None:
        self.factors[kind] = min(MOST, max(LEAST, self.factors[kind] * factor))


# A kind's blocks are ranked again when its time has become this much longer or shorter.
_MOVED = math.log(1.1)


class AdaptiveSemanticEviction(EvictionPolicy[BlockHistory]):
    """Lowest score first: weight x (1 + ln(1 + n) + 0.25 n) x e^(-age / t) / t with n uses.

    Weights and the sum over n are the SemanticKV system's. Its fixed time of 60 s is not: t is how long blocks of the
    kind were seen to wait for their next use. So nothing keeps an overdue block for long, and the order is the same at
    any pace. Size does not count: what a block saves and the room that it takes both grow with its tokens.

    Age and the kind's factor are common to the blocks of a kind. So each kind has a ranking that only uses change,
    `candidates` merges the rankings, and blocks are ranked again only when t has moved."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Rank by a `clock`, which gives the seconds in which `BlockHistory.last_seconds` counts."""
        super().__init__(self._logarithm)
        self._use, self._clock = KindUse(), clock
        self._last_seconds: dict[str, float] = {}
        self._rankings = {kind: Ranking() for kind in BlockKind}
        self._seconds = dict.fromkeys(BlockKind, FIRST_SECONDS)

    def added(self, donor_id: str, history: BlockHistory) -> None:
        self._use.came(history)
        super().added(donor_id, history)

    def used(self, donor_id: str) -> None:
        history = self._histories[donor_id]
        self._use.came_back(history.kind, history.last_seconds - self._last_seconds[donor_id])
        super().used(donor_id)

    def removed(self, donor_id: str, *, evicted: bool = False) -> None:
        history = self._histories.pop(donor_id)
        self._rankings[history.kind].discard(donor_id)
        del self._last_seconds[donor_id]
        if evicted:
            self._use.evicted(history)

    def candidates(self) -> Iterator[str]:
        now, orders = self._clock(), []
        for kind, ranking in self._rankings.items():
            seconds = self._use.seconds(kind)
            if abs(math.log(seconds / self._seconds[kind])) > _MOVED:
                self._seconds[kind] = seconds
                for _, donor_id in list(ranking.items()):
                    self._put(donor_id)
            # Less now / t, a rank is the logarithm of the score without the kind's factor.
            seconds = self._seconds[kind]
            orders.append(_shifted(ranking, math.log(self._use.factors[kind] / seconds) - now / seconds))
        return (donor_id for _, _, donor_id in heapq.merge(*orders))

    def _put(self, donor_id: str) -> None:
        history = self._histories[donor_id]
        self._last_seconds[donor_id] = history.last_seconds
        self._rankings[history.kind].put(donor_id, self._rank(history))

    def _logarithm(self, history: BlockHistory) -> tuple[float, float]:
        """Return the logarithm of the block's score, without what is common to its kind, and its last use."""
        uses = 1.0 + math.log1p(history.uses) + 0.25 * history.uses
        score = math.log(DEFAULT_WEIGHTS[history.kind] * uses) + history.last_seconds / self._seconds[history.kind]
        return score, history.last_use


def _shifted(ranking: Ranking, by: float) -> Iterator[tuple[float, float, str]]:
    for (rank, last_use), donor_id in ranking.items():
        yield rank + by, last_use, donor_id


class ReplayPolicy(str, Enum):
    """The policies that a replay plays, by name."""

    FIFO = "fifo"
    LRU = "lru"
    LFU = "lfu"
    SIZE_AWARE = "size_aware"
    STATIC_SEMANTIC = "static_semantic"
    ADAPTIVE_SEMANTIC = "adaptive_semantic"


def replay_policy(name: ReplayPolicy, clock: Callable[[], float]) -> EvictionPolicy[BlockHistory]:
    """Make the policy of one cache; `clock` gives the trace's time in seconds."""
    if name is ReplayPolicy.ADAPTIVE_SEMANTIC:
        return AdaptiveSemanticEviction(clock)
    if name is ReplayPolicy.FIFO:
        return EvictionPolicy(lambda history: (history.added,))
    if name is ReplayPolicy.STATIC_SEMANTIC:
        return EvictionPolicy(lambda history: (DEFAULT_WEIGHTS[history.kind], history.last_use))
    return policy_of(Eviction(name.value))


class BlockCache:
    """A cache of `capacity` tokens, in which each held block is one donor to `policy`. Not thread safe.

    A block is held only while its parent is. With `looks_ahead`, for a policy that knows the future, blocks of a served
    request may go at once. `before`: the block before each held one in the request that brought it, or NONE."""

    def __init__(
        self, blocks: Blocks, policy: EvictionPolicy[BlockHistory], capacity: int, *, looks_ahead: bool = False
    ) -> None:
        self.blocks, self._policy, self._capacity = blocks, policy, capacity
        self._looks_ahead = looks_ahead
        self.before: dict[int, int] = {}
        self._held: dict[int, BlockHistory] = {}
        self._children: dict[int, int] = {}  # held ones of each held block
        self._gone: set[int] = set()
        self._tick = self.used_tokens = self.evictions = self.regrets = 0

    def __contains__(self, block: object) -> bool:
        return block in self._held

    def held(self, wanted: Iterable[int]) -> frozenset[int]:
        """Return those of these blocks that are held."""
        return frozenset(self._held.keys() & set(wanted))

    def serve(self, wanted: Sequence[int], seconds: float) -> frozenset[int]:
        """Serve a request of these blocks at a time in seconds; return those that were held before. The first block
        counts as the last used, so that the end of a prompt is evicted first."""
        before: dict[int, int] = {}
        for last, block in pairwise((NONE, *wanted)):
            before.setdefault(block, last)
        tokens = self.blocks.tokens
        request = [each for each in dict.fromkeys(wanted) if each != NONE and tokens[each] <= self._capacity]
        hits = self.held(request)
        self.regrets += sum(block in self._gone for block in request)
        ticks = {block: self._tick + len(request) - place for place, block in enumerate(request)}
        self._tick += len(request)
        for block in hits:
            history = self._held[block]
            history.last_use, history.last_seconds, history.uses = ticks[block], seconds, history.uses + 1
            self._policy.used(str(block))
        missing = self._missing(request, hits)
        if not self._looks_ahead:
            self._make_room(sum(tokens[block] for block in missing), hits)
        for block in missing:
            parent, kind, tick = self.blocks.parents[block], self.blocks.kinds[block], ticks[block]
            history = BlockHistory(tokens[block], tick, block=block, kind=kind, added=tick, last_seconds=seconds)
            self._held[block], self.before[block] = history, before[block]
            self._children[parent] = self._children.get(parent, 0) + 1
            self._gone.discard(block)
            self.used_tokens += tokens[block]
            self._policy.added(str(block), history)
        self._make_room(0)
        return hits

    def _missing(self, request: list[int], hits: frozenset[int]) -> list[int]:
        """Return the blocks to hold, parents first: those that fit beside the request's others, as their parents do."""
        room = self._capacity - sum(self.blocks.tokens[block] for block in hits)
        chosen: dict[int, None] = {}
        for block in request:
            tokens, parent = self.blocks.tokens[block], self.blocks.parents[block]
            has_parent = parent in hits or parent in chosen or parent == NONE
            if block not in hits and has_parent and (self._looks_ahead or tokens <= room):
                chosen[block] = None
                room -= tokens
        return list(chosen)

    def _make_room(self, tokens: int, pinned: frozenset[int] = frozenset()) -> None:
        for block in self._victims(self.used_tokens + tokens - self._capacity, pinned):
            del self._held[block]
            self._children.pop(block, None)
            self._children[self.blocks.parents[block]] -= 1
            self._gone.add(block)
            self.used_tokens -= self.blocks.tokens[block]
            self.evictions += 1
            self._policy.removed(str(block), evicted=True)

    def _victims(self, tokens: int, pinned: frozenset[int]) -> list[int]:
        """Return blocks of `tokens` or more in the policy's order; a parent goes after its last child."""
        victims: list[int] = []
        waiting: set[int] = set()
        children: dict[int, int] = {}
        candidates = self._policy.candidates()
        while tokens > 0:
            block = int(next(candidates))
            if block not in pinned:
                waiting.add(block)
            while tokens > 0 and block in waiting and not children.setdefault(block, self._children.get(block, 0)):
                victims.append(block)
                tokens -= self.blocks.tokens[block]
                block = self.blocks.parents[block]
                children[block] = children.get(block, self._children[block]) - 1
        return victims


class Optimum(EvictionPolicy[BlockHistory]):
    """Evicts the block whose next use is farthest (Belady 1966), in a `BlockCache` that looks ahead. No policy has more
    hits where all blocks have one size; where sizes differ it is no bound."""

    def __init__(self, requests: Iterable[list[int]], request: Callable[[], int]) -> None:
        """Read `requests`, the blocks of each in order. `request` returns the number of the one that is served."""
        super().__init__(self._next_use)
        self._uses: dict[int, list[int]] = {}
        for index, blocks in enumerate(requests):
            for block in set(blocks):
                self._uses.setdefault(block, []).append(index)
        for uses in self._uses.values():
            uses.reverse()
        self._request = request

    def _next_use(self, history: BlockHistory) -> tuple[float, float]:
        later = self._uses[history.block]
        while later and later[-1] <= self._request():
            later.pop()
        return -later[-1] if later else -math.inf, history.added


OPTIMUM = "optimum"
EXACT_PREFIX, SPAN = "exact_prefix", "span"


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """Which held blocks are reused. With `as_prefixes` the leading run of held blocks, as in a prefix cache. Otherwise
    all runs of held blocks in the order of their arrival, of at least `min_tokens` tokens. Their first
    `recompute_tokens` are computed again. A request's last token is always computed."""

    name: str
    as_prefixes: bool
    min_tokens: int = 1
    recompute_tokens: int = 0

    def blocks(self, trace: Trace) -> Blocks:
        """Return the trace's blocks under this rule."""
        return trace.prefixes if self.as_prefixes else trace.spans

    def reused(self, request: Sequence[int], hits: frozenset[int], cache: BlockCache, tokens: int) -> int:
        """Return how many of a prompt's `tokens` are not computed if the cache holds `hits`."""
        spans, last = [0], NONE
        for block in request:
            if block not in hits or cache.before[block] != last:
                spans.append(0)
            spans[-1] += cache.blocks.tokens[block] if block in hits else 0
            last = block
        kept = sum(max(0, span - self.recompute_tokens) for span in spans if span >= self.min_tokens)
        return min(kept, tokens - 1)

    def sentence(self) -> str:
        """Return what counts, for a report."""
        if self.as_prefixes:
            return "What counts is the leading run of held blocks, at no cost but that of a reused token."
        return (
            f"What counts is every run of held blocks, at any place, of at least {self.min_tokens:,} tokens that "
            f"were in this order when they came; its first {self.recompute_tokens:,} tokens are computed again."
        )


def simulate(
    trace: Trace, rule: ReuseRule, policy: str, capacity_tokens: int
) -> tuple[npt.NDArray[np.int64], BlockCache]:
    """Serve the requests one after the other, each whole before the next; `policy` is a `ReplayPolicy` or OPTIMUM.

    Return the tokens that each request did not compute, int64 [requests], and the cache, which counts."""
    requests, looks_ahead, index, seconds = (
        list(trace.requests(as_prefixes=rule.as_prefixes)),
        policy == OPTIMUM,
        0,
        0.0,
    )
    chosen = (
        Optimum((blocks for _, blocks, _ in requests), lambda: index)
        if looks_ahead
        else replay_policy(ReplayPolicy(policy), lambda: seconds)
    )
    cache = BlockCache(rule.blocks(trace), chosen, capacity_tokens, looks_ahead=looks_ahead)
    reused = np.zeros(len(requests), dtype=np.int64)
    for index, (seconds, request, tokens) in enumerate(requests):
        reused[index] = rule.reused(request, cache.serve(request, seconds), cache, tokens)
    return reused, cache
