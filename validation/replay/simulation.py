"""A trace served by a cache of blocks under an eviction policy, or by replicas with a cache each behind a router."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.config import Eviction
from semblend_trt.donors.eviction import EvictionPolicy, policy_of
from semblend_trt.fleet.routing_policy import POLICIES, Holder, Replica, RoutingRequest
from validation.replay.policies import BlockHistory, ReplayPolicy, replay_policy
from validation.replay.trace import NONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from validation.replay.latency import LatencyModel
    from validation.replay.trace import Blocks, Trace


class BlockCache:
    """A cache of `capacity` tokens, in which each held block is one donor to `policy`. Not thread safe.

    A block is held only while its parent is. With `looks_ahead`, for a policy that knows the future, the blocks of a
    served request may be evicted at once. `before`: the block in front of each held one in the request that brought it,
    or NONE.
    """

    def __init__(
        self, blocks: Blocks, policy: EvictionPolicy[BlockHistory], capacity: int, *, looks_ahead: bool = False
    ) -> None:
        self._blocks, self._policy, self._capacity = blocks, policy, capacity
        self._looks_ahead = looks_ahead
        self.before: dict[int, int] = {}
        self._donor_of: dict[int, str] = {}
        self._block_of: dict[str, int] = {}
        self._histories: dict[int, BlockHistory] = {}
        self._children: dict[int, int] = {}  # held ones of each held block
        self._gone: set[int] = set()
        self._tick = self._added = 0
        self.used_tokens = self.evictions = self.regrets = 0

    def __contains__(self, block: object) -> bool:
        return block in self._donor_of

    def serve(self, wanted: Sequence[int], seconds: float) -> frozenset[int]:
        """Serves a request of these blocks at a time in seconds; returns those that were held before.

        Missing blocks that fit beside the request's others are held from then on. The first block counts as
        the last used, so that the end of a prompt is evicted first.
        """
        before: dict[int, int] = {}
        for last, block in pairwise((NONE, *wanted)):
            before.setdefault(block, last)
        request = [block for block in dict.fromkeys(wanted) if self._may_be_held(block)]
        hits = frozenset(block for block in request if block in self._donor_of)
        self.regrets += sum(block in self._gone for block in request)
        ticks = {block: self._tick + len(request) - place for place, block in enumerate(request)}
        self._tick += len(request)
        for block in hits:
            history = self._histories[block]
            history.last_use, history.last_seconds, history.uses = ticks[block], seconds, history.uses + 1
            self._policy.used(self._donor_of[block])
        missing = self._missing(request, hits)
        if not self._looks_ahead:
            self._make_room(sum(self._blocks.tokens[block] for block in missing), hits)
        for block in missing:
            self.before[block] = before[block]
            self._hold(block, ticks[block], seconds)
        self._make_room(0)
        return hits

    def _may_be_held(self, block: int) -> bool:
        return block != NONE and self._blocks.tokens[block] <= self._capacity

    def _missing(self, request: list[int], hits: frozenset[int]) -> list[int]:
        """The blocks to hold, parents first: those that fit beside the request's others, and whose parents do."""
        room = self._capacity - sum(self._blocks.tokens[block] for block in hits)
        chosen: dict[int, None] = {}
        for block in request:
            tokens, parent = self._blocks.tokens[block], self._blocks.parents[block]
            if block in hits or not (parent in hits or parent in chosen or parent == NONE):
                continue
            if self._looks_ahead or tokens <= room:
                chosen[block] = None
                room -= tokens
        return list(chosen)

    def _hold(self, block: int, tick: int, seconds: float) -> None:
        tokens, parent = self._blocks.tokens[block], self._blocks.parents[block]
        # A new id each time: a block that comes back is another donor of the same text.
        self._added += 1
        donor_id = self._donor_of[block] = str(self._added)
        self._block_of[donor_id] = block
        history = self._histories[block] = BlockHistory(
            tokens, tick, block=block, kind=self._blocks.kind(block), added=tick, last_seconds=seconds
        )
        self._children[parent] = self._children.get(parent, 0) + 1
        self._gone.discard(block)
        self.used_tokens += tokens
        self._policy.added(donor_id, history)

    def _make_room(self, tokens: int, pinned: frozenset[int] = frozenset()) -> None:
        """Evicts blocks that are not `pinned` until `tokens` more fit."""
        for block in self._victims(self.used_tokens + tokens - self._capacity, pinned):
            self._evict(block)

    def _victims(self, tokens: int, pinned: frozenset[int]) -> list[int]:
        """Blocks of `tokens` or more in the policy's order; a parent goes after its last child."""
        victims: list[int] = []
        waiting: set[int] = set()
        children: dict[int, int] = {}
        candidates = self._policy.candidates()
        while tokens > 0:
            block = self._block_of[next(candidates)]
            if block not in pinned:
                waiting.add(block)
            while tokens > 0 and block in waiting and not children.setdefault(block, self._children.get(block, 0)):
                victims.append(block)
                tokens -= self._blocks.tokens[block]
                block = self._blocks.parents[block]
                children[block] = children.get(block, self._children[block]) - 1
        return victims

    def _evict(self, block: int) -> None:
        donor_id = self._donor_of.pop(block)
        del self._block_of[donor_id], self._histories[block]
        self._children.pop(block, None)
        self._children[self._blocks.parents[block]] -= 1
        self._gone.add(block)
        self.used_tokens -= self._blocks.tokens[block]
        self.evictions += 1
        self._policy.removed(donor_id, evicted=True)


class Optimum(EvictionPolicy[BlockHistory]):
    """Evicts the block whose next use is farthest (Belady 1966), in a `BlockCache` that looks ahead.

    No policy has more hits where all blocks have one size. Where sizes differ it is no bound.
    """

    def __init__(self, requests: Iterable[list[int]], request: Callable[[], int]) -> None:
        """`requests` are the blocks of each request in order; `request` says which of them is being served."""
        super().__init__(self._next_use)
        self._uses: dict[int, list[int]] = {}
        for index, blocks in enumerate(requests):
            for block in dict.fromkeys(blocks):
                self._uses.setdefault(block, []).append(index)
        for uses in self._uses.values():
            uses.reverse()
        self._request = request

    def _next_use(self, history: BlockHistory) -> tuple[float]:
        later = self._uses[history.block]
        while later and later[-1] <= self._request():
            later.pop()
        return (-later[-1] if later else -math.inf,)


OPTIMUM = "optimum"
EXACT_PREFIX, SPAN = "exact_prefix", "span"


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """Which held blocks are reused. With `as_prefixes` the leading run of held blocks, as in a prefix cache.

    Otherwise spans at any position: runs of held blocks in the order in which they came, of at least `min_tokens`
    tokens, of which the first `recompute_tokens` are computed again. A request's last token is always computed.
    """

    name: str
    as_prefixes: bool
    min_tokens: int = 1
    recompute_tokens: int = 0

    def blocks(self, trace: Trace) -> Blocks:
        """The trace's blocks under this rule."""
        return trace.prefixes if self.as_prefixes else trace.spans

    def sentence(self) -> str:
        """For a report: what counts."""
        if self.as_prefixes:
            return "What counts is the leading run of held blocks, at no cost but that of a reused token."
        return (
            f"What counts is every run of held blocks, wherever it stands, of at least {self.min_tokens:,} tokens that "
            f"stood in this order when they came; its first {self.recompute_tokens:,} tokens are computed again."
        )

    def reused(self, spans: Iterable[int]) -> int:
        """Tokens that are reused of runs of held blocks, given each run's tokens."""
        return sum(max(0, span - self.recompute_tokens) for span in spans if span >= self.min_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """`reused` int64 [requests]: tokens that each request did not compute, in the order of `Trace.requests`.

    `evictions` counts blocks, `regrets` those that were asked for again after they had been evicted.
    """

    rule: str
    policy: str
    capacity_tokens: int
    reused: npt.NDArray[np.int64]
    evictions: int
    regrets: int


def simulate(trace: Trace, rule: ReuseRule, policy: str, capacity_tokens: int) -> Outcome:
    """Serves the requests one after the other, each whole before the next; `policy` is a `ReplayPolicy` or OPTIMUM."""
    blocks, looks_ahead = rule.blocks(trace), policy == OPTIMUM
    index, seconds = 0, 0.0
    cache = BlockCache(
        blocks,
        Optimum((request for _, request in trace.requests(as_prefixes=rule.as_prefixes)), lambda: index)
        if looks_ahead
        else replay_policy(ReplayPolicy(policy), lambda: seconds),
        capacity_tokens,
        looks_ahead=looks_ahead,
    )
    prompt_tokens = trace.prompt_tokens()
    reused = np.zeros(len(prompt_tokens), dtype=np.int64)
    for index, (seconds, request) in enumerate(trace.requests(as_prefixes=rule.as_prefixes)):
        hits = cache.serve(request, seconds)
        reused[index] = min(rule.reused(_spans(request, hits, blocks, cache)), prompt_tokens[index] - 1)
    return Outcome(rule.name, policy, capacity_tokens, reused, cache.evictions, cache.regrets)


def _spans(request: Sequence[int], hits: frozenset[int], blocks: Blocks, cache: BlockCache) -> Iterator[int]:
    """Tokens of each run of held blocks in the order in which they came."""
    span, last = 0, NONE
    for block in request:
        if block not in hits or cache.before[block] != last:
            yield span
            span = 0
        span += blocks.tokens[block] if block in hits else 0
        last = block
    yield span


@dataclass(frozen=True, slots=True, eq=False)
class FleetOutcome:
    """`reused` int64 [requests] and `ttft_ms` float64 [requests], with the time in a queue, in the order of
    `Trace.requests`. `busy_ms` float64 [replicas]: time that each replica computes."""

    policy: str
    capacity_tokens: int
    reused: npt.NDArray[np.int64]
    ttft_ms: npt.NDArray[np.float64]
    busy_ms: npt.NDArray[np.float64]

    @property
    def imbalance(self) -> float:
        """The busiest replica's time over the mean."""
        return float(self.busy_ms.max() / self.busy_ms.mean())


@dataclass(frozen=True, slots=True)
class _Arrival:
    index: int
    seconds: float
    blocks: list[int]
    tokens: int
    expected_tokens: int


class _SimulatedReplica:
    """Prefills one request after the other in the time that `model` predicts. A request's blocks are held from its
    prefill's begin on."""

    def __init__(self, number: int, rule: ReuseRule, model: LatencyModel, cache: BlockCache, blocks: Blocks) -> None:
        self.worker = (number, 0)
        self.load, self.busy_ms, self.free_at = 0, 0.0, -math.inf
        self.ended: list[tuple[int, int, float]] = []  # index of the request, reused tokens, ms to the first token
        self._rule, self._model, self._cache, self._blocks = rule, model, cache, blocks
        self._waiting: deque[_Arrival] = deque()
        self._begun: deque[tuple[float, int]] = deque()  # when it ends, and what it adds to the load until then

    def reused(self, request: Sequence[int], tokens: int) -> int:
        """Tokens of a prompt that this replica would reuse now."""
        hits = frozenset(block for block in request if block in self._cache)
        return min(self._rule.reused(_spans(request, hits, self._blocks, self._cache)), tokens - 1)

    def send(self, arrival: _Arrival) -> None:
        self._waiting.append(arrival)
        self.load += arrival.expected_tokens
        self.advance(arrival.seconds)

    def advance(self, now: float) -> None:
        """Begins and ends what does so until `now`, in seconds."""
        while self._waiting and max(self._waiting[0].seconds, self.free_at) <= now:
            arrival = self._waiting.popleft()
            began = max(arrival.seconds, self.free_at)
            reused = self.reused(arrival.blocks, arrival.tokens)
            self._cache.serve(arrival.blocks, began)
            took = float(self._model.predict(np.array([arrival.tokens - reused]), np.array([reused]))[0])
            self.busy_ms += took
            self.free_at = began + took / 1e3
            self._begun.append((self.free_at, arrival.expected_tokens))
            self.ended.append((arrival.index, reused, (self.free_at - arrival.seconds) * 1e3))
        while self._begun and self._begun[0][0] <= now:
            self.load -= self._begun.popleft()[1]


def simulate_fleet(
    trace: Trace, rule: ReuseRule, policy: str, replicas: int, capacity_tokens: int, model: LatencyModel
) -> FleetOutcome:
    """Sends the requests at their times to `replicas` replicas of `capacity_tokens` each, which evict by lru.

    `policy` is one of the router's `POLICIES`. It is told at once, and exactly, what each replica holds.
    """
    blocks, router = rule.blocks(trace), POLICIES[policy]()
    fleet = [
        _SimulatedReplica(
            number,
            rule,
            model,
            BlockCache(blocks, policy_of(Eviction.LRU), capacity_tokens),
            blocks,
        )
        for number in range(replicas)
    ]
    prompt_tokens = trace.prompt_tokens()
    for index, (seconds, request) in enumerate(trace.requests(as_prefixes=rule.as_prefixes)):
        for each in fleet:
            each.advance(seconds)
        tokens = prompt_tokens[index]
        holders = tuple(Holder(each.worker, each.reused(request, tokens)) for each in fleet)
        asked = RoutingRequest(_token_ids(index, request, tokens, blocks), holders=holders)
        choice = router.choose(asked, [Replica(each.worker, each.load) for each in fleet])
        expected = max(0, tokens - choice.reused_tokens)
        fleet[choice.worker[0]].send(_Arrival(index, seconds, request, tokens, expected))
    for each in fleet:
        each.advance(math.inf)
    ended = sorted(each for replica in fleet for each in replica.ended)
    _, reused, ttft = (np.array(column) for column in zip(*ended, strict=True))
    busy = np.array([each.busy_ms for each in fleet])
    return FleetOutcome(policy, capacity_tokens, reused.astype(np.int64), ttft.astype(np.float64), busy)


def _token_ids(index: int, request: Sequence[int], tokens: int, blocks: Blocks) -> npt.NDArray[np.int64]:
    """Token ids int64 [tokens] that are equal where blocks are; those of blocks that are not shared are the request's
    own."""
    known = [block for block in request if block != NONE]
    ids = np.repeat(np.array(known, dtype=np.int64), [blocks.tokens[block] for block in known])
    return np.concatenate([ids, np.full(tokens - len(ids), NONE - 1 - index, dtype=np.int64)])
