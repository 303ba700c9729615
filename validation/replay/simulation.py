"""A trace served by a cache of blocks under an eviction policy, or by a growing fleet.

The policies are those that evict donors, and two that only a replay plays: first in first out, and the SemanticKV
system's fixed weights by kind of text.

A fleet places requests by held text, with and without fetches of what another worker holds. A fetch takes the time of
its bytes on the links of both workers, and the rest of a prompt is computed after it. Before any wait it pays where the
bits a second are above 8 x bytes a token x prefilled tokens a second / MARGIN.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from semblend_trt.config import Eviction
from semblend_trt.donors.eviction import DonorHistory, EvictionPolicy, policy_of
from validation.replay.trace import NONE, BlockKind, Blocks, Trace


@dataclass(slots=True)
class BlockHistory(DonorHistory):
    """A held block's past, a donor to a policy. `added`: its first tick."""

    block: int = 0
    kind: BlockKind = BlockKind.OTHER
    added: int = 0


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


class ReplayPolicy(str, Enum):
    """The policies that a replay plays, by name."""

    FIFO = "fifo"
    LRU = "lru"
    LFU = "lfu"
    SIZE_AWARE = "size_aware"
    STATIC_SEMANTIC = "static_semantic"


def replay_policy(name: ReplayPolicy) -> EvictionPolicy[BlockHistory]:
    """Make the policy of one cache."""
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

    def serve(self, wanted: Sequence[int]) -> frozenset[int]:
        """Serve a request of these blocks; return those that were held before. The first block
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
            history.last_use, history.uses = ticks[block], history.uses + 1
            self._policy.used(str(block))
        missing = self._missing(request, hits)
        if not self._looks_ahead:
            self._make_room(sum(tokens[block] for block in missing), hits)
        for block in missing:
            parent, kind, tick = self.blocks.parents[block], self.blocks.kinds[block], ticks[block]
            history = BlockHistory(tokens[block], tick, block=block, kind=kind, added=tick)
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
        """Evict in the policy's order until `tokens` fit; a parent goes after its last child."""
        victims, waiting, children = list[int](), set[int](), dict[int, int]()
        missing, candidates = self.used_tokens + tokens - self._capacity, self._policy.candidates()
        while missing > 0:
            block = int(next(candidates))
            if block not in pinned:
                waiting.add(block)
            while missing > 0 and block in waiting and not children.setdefault(block, self._children.get(block, 0)):
                victims.append(block)
                missing -= self.blocks.tokens[block]
                block = self.blocks.parents[block]
                children[block] = children.get(block, self._children[block]) - 1
        for block in victims:
            del self._held[block]
            self._children.pop(block, None)
            self._children[self.blocks.parents[block]] -= 1
            self._gone.add(block)
            self.used_tokens -= self.blocks.tokens[block]
            self.evictions += 1
            self._policy.removed(str(block), evicted=True)


def optimum(requests: Iterable[list[int]], request: Callable[[], int]) -> EvictionPolicy[BlockHistory]:
    """Return a policy that evicts the block whose next use is farthest (Belady 1966), for a `BlockCache` that looks
    ahead. `requests`: the blocks of each in order; `request` returns the number of the one that is served.

    No policy has more hits where all blocks have one size; where sizes differ it is no bound."""
    uses: dict[int, list[int]] = {}
    for index, blocks in reversed(list(enumerate(requests))):
        for block in set(blocks):
            uses.setdefault(block, []).append(index)

    def next_use(history: BlockHistory) -> tuple[float, float]:
        later = uses[history.block]
        while later and later[-1] <= request():
            later.pop()
        return -later[-1] if later else -math.inf, history.added

    return EvictionPolicy(next_use)


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
    requests, index = list(trace.requests(as_prefixes=rule.as_prefixes)), 0
    chosen = (
        optimum((blocks for _, blocks, _ in requests), lambda: index)
        if (looks_ahead := policy == OPTIMUM)
        else replay_policy(ReplayPolicy(policy))
    )
    cache = BlockCache(rule.blocks(trace), chosen, capacity_tokens, looks_ahead=looks_ahead)
    reused = np.zeros(len(requests), dtype=np.int64)
    for index, (_, request, tokens) in enumerate(requests):
        reused[index] = rule.reused(request, cache.serve(request), cache, tokens)
    return reused, cache


# In the middle fifth of the requests, one in three asks about one document instead.
HOT_TOKENS, HOT_QUESTION_TOKENS, HOT_EVERY = 16_384, 512, 3
# A fetch takes at most this share of the time to the first token without it.
MARGIN = 0.9


@dataclass(frozen=True, slots=True)
class Fleet:
    """`first` workers serve a third of the requests, `last` the others. A worker holds `capacity_tokens`, prefills one
    prompt after the other at `tokens_per_s`, and its KV has `token_bytes` a token."""

    first: int
    last: int
    capacity_tokens: int
    tokens_per_s: float
    token_bytes: int


class Served(NamedTuple):
    """By request, int64 [requests]: the prompt's tokens, those that were not computed, and those that were fetched. And
    the seconds to the first token, float64 [requests]."""

    tokens: npt.NDArray[np.int64]
    reused: npt.NDArray[np.int64]
    fetched: npt.NDArray[np.int64]
    ttft: npt.NDArray[np.float64]


@dataclass(slots=True)
class _Worker:
    """`free` and `link`: the seconds at which its prefills and its transfers have ended."""

    cache: BlockCache
    free: float = 0.0
    link: float = 0.0


class _Way(NamedTuple):
    """How a worker would serve a prompt: `fetched` tokens come from `source`, and the first token at `ttft`."""

    ttft: float
    worker: _Worker
    reused: int
    fetched: int = 0
    fetched_at: float = 0.0
    source: _Worker | None = None


def serve_fleet(trace: Trace, rule: ReuseRule, fleet: Fleet, gbits: float = 0.0) -> Served:
    """Serve all requests, each where its first token comes first; workers fetch at `gbits` Gb/s, not at all at 0."""
    blocks = rule.blocks(trace)
    hot = blocks.number(("hot document",), HOT_TOKENS, BlockKind.RETRIEVED_CONTEXT)
    workers = [_Worker(BlockCache(blocks, policy_of(Eviction.LRU), fleet.capacity_tokens)) for _ in range(fleet.last)]
    served = list[tuple[int, int, int, float]]()
    for index, (seconds, request, tokens) in enumerate(trace.requests(as_prefixes=rule.as_prefixes)):
        if 2 * len(trace) <= 5 * index < 3 * len(trace) and index % HOT_EVERY == 0:
            request, tokens = [hot, NONE], HOT_TOKENS + HOT_QUESTION_TOKENS
        active = workers[: fleet.first if 3 * index < len(trace) else fleet.last]
        held = [rule.reused(request, each.cache.held(request), each.cache, tokens) for each in active]
        most = max(zip(active, held, strict=True), key=lambda each: each[1])
        ways = [
            _way(worker, own, seconds, tokens, fleet, gbits, most) for worker, own in zip(active, held, strict=True)
        ]
        best = min(ways, key=lambda way: (way.ttft, way.worker.free))
        best.worker.free = best.ttft
        if best.source is not None:
            best.worker.link = best.source.link = best.fetched_at
        best.worker.cache.serve(request)
        served.append((tokens, best.reused, best.fetched, best.ttft - seconds))
    return Served(*map(np.array, zip(*served, strict=True)))


def _way(
    worker: _Worker, own: int, seconds: float, tokens: int, fleet: Fleet, gbits: float, most: tuple[_Worker, int]
) -> _Way:
    """Return the faster of what a worker can do: compute all that it does not hold, or fetch from who holds most."""
    begin = max(seconds, worker.free)
    alone = _Way(begin + (tokens - own) / fleet.tokens_per_s, worker, own)
    source, theirs = most
    if not gbits or theirs <= own:
        return alone
    ready = max(seconds, worker.link, source.link) + (theirs - own) * fleet.token_bytes * 8e-9 / gbits
    ttft = max(begin, ready) + (tokens - theirs) / fleet.tokens_per_s
    if ttft - begin > MARGIN * (alone.ttft - begin):
        return alone
    return _Way(ttft, worker, theirs, theirs - own, ready, source)
