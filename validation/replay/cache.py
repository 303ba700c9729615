"""BlockCache: blocks of prompts held under a capacity in tokens, which an eviction policy decides about."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from semblend_trt.donors.eviction import DonorHistory
from validation.replay.blocks import NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from semblend_trt.donors.eviction import EvictionPolicy
    from validation.replay.blocks import Blocks


class BlockCache:
    """Each held block is one donor to `policy`. Not thread safe; a request is served whole before the next.

    A block with a parent is held only while its parent is, one of more than `capacity` tokens never. With `looks_ahead`
    the blocks of the request itself may go as well once it is served, which no policy that does not know the future
    should do. `before` is the block that stood before each held one in the request that brought it, or NONE.
    """

    def __init__(self, blocks: Blocks, policy: EvictionPolicy, capacity: int, *, looks_ahead: bool = False) -> None:
        self._blocks, self._policy, self._capacity = blocks, policy, capacity
        self._looks_ahead = looks_ahead
        self.before: dict[int, int] = {}
        self._donor_of: dict[int, str] = {}
        self._block_of: dict[str, int] = {}
        self._histories: dict[int, DonorHistory] = {}
        self._children: dict[int, int] = {}  # held ones of each held block
        self._gone: set[int] = set()
        self._tick = self._added = 0
        self.used_tokens = self.evictions = self.regrets = 0

    def __contains__(self, block: object) -> bool:
        return block in self._donor_of

    def serve(self, wanted: Sequence[int], seconds: float) -> frozenset[int]:
        """Serves a request of these blocks and returns those that were held when it came.

        What was missing is held from then on, as far as there is room beside the request's other blocks. `seconds` is
        the time by the policy's clock. The first block counts as the last used: of a prompt, the end should go first.
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
        """What is to be held now, parents first: what fits beside the rest of the request, and whose parent does."""
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
        # Another id each time the block comes back: to a policy that remembers, it is another donor of the same text.
        self._added += 1
        donor_id = self._donor_of[block] = str(self._added)
        self._block_of[donor_id] = block
        history = self._histories[block] = DonorHistory(
            tokens, tick, tick, seconds, text=block.to_bytes(8, "little"), kinds=self._blocks.mix(block)
        )
        self._children[parent] = self._children.get(parent, 0) + 1
        self._gone.discard(block)
        self.used_tokens += tokens
        self._policy.added(donor_id, history)

    def _make_room(self, tokens: int, pinned: frozenset[int] = frozenset()) -> None:
        """Evicts until `tokens` more fit; what is not `pinned` suffices for that."""
        for block in self._victims(self.used_tokens + tokens - self._capacity, pinned):
            self._evict(block)

    def _victims(self, tokens: int, pinned: frozenset[int]) -> list[int]:
        """Blocks of `tokens` or more in the policy's order; a parent waits until its last child has gone."""
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
