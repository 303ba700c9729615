"""A trace served by a cache of blocks under an eviction policy.

The policies are those that evict donors, and two that only a replay plays: first in first out, and the SemanticKV
system's fixed weights by kind of text."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from semblend_trt.config import Eviction
from semblend_trt.donors.catalog import DonorHistory, EvictionPolicy, policy_of
from validation.replay.trace import NONE, Trace

# The SemanticKV system's default weights, by the kind of a block's text and by the names of roles that it writes for
# kinds. It has none for legal evidence, which is retrieved text as well. Text of another kind weighs OTHER_WEIGHT.
_KINDS = {
    2.4: ("system_prompt", "system"),
    2.0: ("template",),
    1.6: ("code",),
    1.4: ("retrieved_context", "legal_evidence"),
    1.1: ("tool_output", "tool"),
    1.0: ("assistant_history", "assistant"),
    0.7: ("user_query", "user"),
}
_WEIGHTS = {kind: weight for weight, kinds in _KINDS.items() for kind in kinds}
OTHER_WEIGHT = 0.8


@dataclass(slots=True)
class BlockHistory(DonorHistory):
    """A held block's past, a donor to a policy. `weight`: of its kind. `added`: its first tick. `before`: the block
    before it in the request that brought it, or NONE. `children`: the held blocks whose parent it is."""

    block: int = 0
    weight: float = OTHER_WEIGHT
    added: int = 0
    before: int = NONE
    children: int = 0


# How the policy of one cache is made, by name.
POLICIES: dict[str, Callable[[], EvictionPolicy[BlockHistory]]] = {
    "fifo": lambda: EvictionPolicy(lambda history: (history.added,)),
    **{each.value: partial(policy_of, each) for each in Eviction},
    "static_semantic": lambda: EvictionPolicy(lambda history: (history.weight, history.last_use)),
}
OPTIMUM = "optimum"


class BlockCache:
    """A cache of `capacity` tokens for the blocks of a trace, in which each held block is one donor to `policy`.

    A block is held only while its parent is."""

    def __init__(self, trace: Trace, policy: EvictionPolicy[BlockHistory], capacity: int) -> None:
        self._trace, self._policy, self._capacity = trace, policy, capacity
        self.held: dict[int, BlockHistory] = {}
        self._tick = self.used_tokens = self.evictions = 0

    def serve(self, wanted: Sequence[int]) -> dict[int, BlockHistory]:
        """Serve a request of these blocks; return those that were held before. The first block
        counts as the last used, so that the end of a prompt is evicted first."""
        tokens, before = self._trace.tokens, dict[int, int]()
        for last, block in pairwise((NONE, *wanted)):
            before.setdefault(block, last)
        request = [each for each in dict.fromkeys(wanted) if each != NONE and tokens[each] <= self._capacity]
        hits = {block: self.held[block] for block in request if block in self.held}
        ticks = {block: self._tick + len(request) - place for place, block in enumerate(request)}
        self._tick += len(request)
        for block, history in hits.items():
            history.last_use, history.uses = ticks[block], history.uses + 1
            self._policy.used(str(block), history)
        missing = self._missing(request, hits)
        self._make_room(sum(tokens[block] for block in missing), hits)
        for block in missing:
            tick, weight = ticks[block], _WEIGHTS.get(self._trace.kinds[block].lower(), OTHER_WEIGHT)
            history = BlockHistory(tokens[block], tick, 0, block, weight, tick, before[block])
            self.held[block] = history
            self._count_child(block, 1)
            self.used_tokens += tokens[block]
            self._policy.used(str(block), history)
        return hits

    def _missing(self, request: Sequence[int], hits: Collection[int]) -> list[int]:
        """Return the blocks to hold, parents first: those that fit beside the request's others, as their parents do."""
        room = self._capacity - sum(self._trace.tokens[block] for block in hits)
        chosen: dict[int, None] = {}
        for block in request:
            tokens, parent = self._trace.tokens[block], self._trace.parents[block]
            has_parent = parent in hits or parent in chosen or parent == NONE
            if block not in hits and has_parent and tokens <= room:
                chosen[block] = None
                room -= tokens
        return list(chosen)

    def _make_room(self, tokens: int, pinned: Collection[int]) -> None:
        """Evict in the policy's order until `tokens` fit; a parent goes after its last child."""
        victims, waiting, gone_children = list[int](), set[int](), Counter[int]()
        missing, candidates = self.used_tokens + tokens - self._capacity, self._policy.candidates()
        while missing > 0:
            block = int(next(candidates))
            if block not in pinned:
                waiting.add(block)
            while missing > 0 and block in waiting and self.held[block].children == gone_children[block]:
                victims.append(block)
                missing -= self._trace.tokens[block]
                block = self._trace.parents[block]
                gone_children[block] += 1
        for block in victims:
            del self.held[block]
            self._count_child(block, -1)
            self.used_tokens -= self._trace.tokens[block]
            self.evictions += 1
            self._policy.removed(str(block), evicted=True)

    def _count_child(self, block: int, change: int) -> None:
        if (parent := self._trace.parents[block]) != NONE:
            self.held[parent].children += change


def optimum(trace: Trace, request: Callable[[], int]) -> EvictionPolicy[BlockHistory]:
    """Return a policy that evicts the block whose next use is farthest (Belady 1966).
    `request` returns the number of the request that is served."""
    uses: dict[int, list[int]] = {}
    for index, (_, blocks) in reversed(list(enumerate(trace.requests))):
        for block in set(blocks):
            uses.setdefault(block, []).append(index)

    def next_use(history: BlockHistory) -> tuple[float, float]:
        later = uses[history.block]
        while later and later[-1] <= request():
            later.pop()
        return -later[-1] if later else -math.inf, history.added

    return EvictionPolicy(next_use)


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """Which held blocks are reused: all runs of them in the order of their arrival, of at least `min_tokens` tokens.
    Their first `recompute_tokens` are computed again, and so is a request's last token.

    Of the blocks of a trace's `prefixes`, that is the leading run alone."""

    name: str
    min_tokens: int = 1
    recompute_tokens: int = 0

    def serve(self, request: Sequence[int], tokens: int, cache: BlockCache) -> int:
        """Serve a prompt of `tokens` tokens; return how many of them are not computed."""
        hits, spans, last = cache.serve(request), [0], NONE
        for block in request:
            hit = hits.get(block)
            if hit is None or hit.before != last:
                spans.append(0)
            spans[-1] += 0 if hit is None else hit.tokens
            last = block
        kept = sum(max(0, span - self.recompute_tokens) for span in spans if span >= self.min_tokens)
        return min(kept, tokens - 1)

    def sentence(self) -> str:
        """Return what counts, for a report."""
        if self == EXACT_PREFIX:
            return "What counts is the leading run of held blocks, at no cost but that of a reused token."
        return (
            f"What counts is every run of held blocks, at any place, of at least {self.min_tokens:,} tokens that "
            f"were in this order when they came; its first {self.recompute_tokens:,} tokens are computed again."
        )


EXACT_PREFIX = ReuseRule("exact_prefix")


def simulate(trace: Trace, rule: ReuseRule, policy: str, capacity_tokens: int) -> tuple[list[int], BlockCache]:
    """Serve the requests one after the other, each whole before the next; `policy` is one of POLICIES or OPTIMUM.

    `trace` has the rule's blocks. Return the tokens that each request did not compute, and the cache, which counts."""
    reused = list[int]()
    chosen = optimum(trace, lambda: len(reused)) if policy == OPTIMUM else POLICIES[policy]()
    cache = BlockCache(trace, chosen, capacity_tokens)
    for tokens, request in trace.requests:
        reused.append(rule.serve(request, tokens, cache))
    return reused, cache
