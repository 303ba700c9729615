"""Who owns which block of the pool: sequences, the reuse tree, or nobody.

Every block is in exactly one place: free, private to one sequence (which may write it), or in the reuse tree (read by
any number of sequences, written by none). Shaped after TensorRT-LLM's V1 `KVCacheManager`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine_wrapper.embedded.radix_tree import BlockNode, PrefixMatch, RadixTree, RootKey
from semblend_trt.errors import CapacityError, SemBlendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Publication(Protocol):
    """Decides how much of a request may enter the reuse tree; None in its place lets everything in."""

    def publishable(self, request_id: int, tokens: int) -> int:
        """Leading tokens, at most `tokens`, whose KV equals a cold run's."""
        ...

    def released(self, request_id: int) -> None:
        """The request's blocks have been let go of."""
        ...


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """Which reuse the block manager offers; the fields are those of `KvCacheConfig`."""

    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True


@dataclass(slots=True)
class _Sequence:
    """Blocks in order of position. `path` are the tree nodes referenced for its leading blocks; a block of the path
    that is not the node's own is a private duplicate of it."""

    key: RootKey
    total_blocks: int
    path: list[BlockNode]
    block_ids: list[int]


class BlockManager:
    """Allocates blocks, finds exact prefixes, publishes finished blocks.

    Admission follows GUARANTEED_NO_EVICT: a sequence enters only if all the blocks it may ever need can be had, so a
    running sequence is never paused. With `guarantees` off nothing is kept back for running sequences, and whoever
    grows them has to see to the room (V2). `replaces`: an equal block that nobody reads makes place for a published
    one; off, as in TensorRT-LLM, the tree keeps its own. `copy_block(source, target)` copies one block's KV of all
    layers. `publication` may be set at any time before a request is published.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        copy_block: Callable[[int, int], None],
        rules: ReuseRules | None = None,
        *,
        guarantees: bool = True,
        replaces: bool = True,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise CapacityError(
                f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing; both must be >= 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.publication: Publication | None = None
        self._copy_block = copy_block
        self._rules = rules or ReuseRules()
        self._guarantees = guarantees
        self._replaces = replaces
        self._tree = RadixTree(block_size)
        self._free: deque[int] = deque(range(num_blocks))
        self._sequences: dict[int, _Sequence] = {}
        self._pins: dict[int, list[BlockNode]] = {}

    # -- capacity -------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds: free ones, and reusable ones that nobody reads."""
        return len(self._free) + self._tree.num_evictable

    @property
    def num_reusable_blocks(self) -> int:
        """Blocks in the reuse tree."""
        return len(self._tree)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits(self, match: PrefixMatch, total_tokens: int) -> bool:
        """True when a sequence of `total_tokens` with this match can run to its end beside those admitted already."""
        shared = sum(node.references > 0 for node in match.nodes)
        return self.blocks_for(total_tokens) - shared <= self._num_unpromised_blocks

    # -- a sequence's life ----------------------------------------------------------------------------------------

    def match(self, key: RootKey, tokens: Sequence[int]) -> PrefixMatch:
        """The longest exact prefix held, never the last token of `tokens`; changes nothing."""
        if not self._rules.enable_block_reuse:
            return PrefixMatch()
        match = self._tree.match(key, tokens, partial=self._rules.enable_partial_reuse)
        source = match.partial
        if source is not None and not self._rules.copy_on_partial_reuse and (source.references or source.children):
            return PrefixMatch(match.nodes)
        return match

    def add_sequence(self, request_id: int, key: RootKey, match: PrefixMatch, total_tokens: int) -> int:
        """Admits a request on a fresh `match` and returns its matched tokens. Blocks follow with `allocate`."""
        if request_id in self._sequences:
            raise SemBlendError(f"request {request_id} already has blocks; a request is added once")
        if self._guarantees and not self.fits(match, total_tokens):
            raise CapacityError(
                f"request {request_id} needs {self.blocks_for(total_tokens)} blocks for {total_tokens} tokens; "
                f"{self.num_free_blocks} are free, part of them promised to running requests"
            )
        self._tree.acquire(match.nodes)
        blocks = [node.block_id for node in match.nodes]
        sequence = self._sequences[request_id] = _Sequence(
            key, self.blocks_for(total_tokens), list(match.nodes), blocks
        )
        if match.partial is not None:
            self._take_partial(sequence, match.partial)
        return len(match.nodes) * self.block_size + match.partial_tokens

    def room_for(self, request_id: int) -> int:
        """Most tokens that the sequence's blocks, and all that could be had now, hold."""
        return (len(self._sequence(request_id).block_ids) + self.num_free_blocks) * self.block_size

    def allocate(self, request_id: int, num_tokens: int) -> list[int]:
        """Grows the sequence to hold `num_tokens` and returns all its block ids in order of position."""
        sequence = self._sequence(request_id)
        needed = self.blocks_for(num_tokens)
        if needed > sequence.total_blocks:
            raise CapacityError(
                f"request {request_id} asks for {needed} blocks; it was admitted with {sequence.total_blocks}"
            )
        blocks, free = sequence.block_ids, self._free
        blocks += [free.popleft() for _ in range(min(needed - len(blocks), len(free)))]
        while len(blocks) < needed:
            blocks.append(self._take_block())
        return list(blocks)

    def block_ids(self, request_id: int) -> list[int]:
        """Blocks of the sequence in order of position. Raises SemBlendError for an unknown request."""
        return list(self._sequence(request_id).block_ids)

    def holds(self, request_id: int) -> bool:
        return request_id in self._sequences

    def publish(self, request_id: int, tokens: Sequence[int]) -> int:
        """Offers the full blocks of `tokens`, the request's leading tokens whose KV is written, for reuse.

        Returns the tokens now reusable. Where an equal block is in the tree, that one stays as long as somebody reads
        it; otherwise ours takes its place, so that publishing costs no block. Where the tree keeps its own all the
        same, publication stops at the first that would cost a block promised to others.
        """
        sequence = self._sequence(request_id)
        if not self._rules.enable_block_reuse:
            return 0
        limit = len(tokens) if self.publication is None else self.publication.publishable(request_id, len(tokens))
        full_blocks = min(limit, len(tokens)) // self.block_size
        for index in range(len(sequence.path), full_blocks):
            block = tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
            if not self._publish_block(sequence, index, block):
                return index * self.block_size
        return full_blocks * self.block_size

    def stop_growing(self, request_id: int) -> None:
        """Gives up the blocks promised but not allocated: the sequence is done and only held."""
        sequence = self._sequence(request_id)
        sequence.total_blocks = len(sequence.block_ids)

    def release(self, request_id: int) -> None:
        """Lets go of the sequence: private blocks become free, reusable ones lose a reader."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        shared = zip(sequence.path, sequence.block_ids, strict=False)
        self._free += [block_id for node, block_id in shared if node.block_id != block_id]
        self._free += sequence.block_ids[len(sequence.path) :]
        self._tree.release(sequence.path)
        if self.publication is not None:
            self.publication.released(request_id)

    def pin(self, request_id: int) -> None:
        """Lets go of the sequence, but what it reads of the reuse tree stays there until `unpin`. Its own blocks are
        free, duplicates of those in the tree among them."""
        self._pins[request_id] = path = self._sequence(request_id).path
        self._tree.acquire(path)
        self.release(request_id)

    def unpin(self, request_id: int) -> None:
        """Takes the request's pins away, where it has any."""
        self._tree.release(self._pins.pop(request_id, []))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _sequence(self, request_id: int) -> _Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise SemBlendError(f"request {request_id} has no blocks; it was never added or has been released")
        return sequence

    @property
    def _num_unpromised_blocks(self) -> int:
        """Blocks that can be had beside what running sequences may still need."""
        if not self._guarantees:
            return self.num_free_blocks
        promised = sum(max(0, s.total_blocks - len(s.block_ids)) for s in self._sequences.values())
        return self.num_free_blocks - promised

    def _take_block(self) -> int:
        if self._free:
            return self._free.popleft()
        evicted = self._tree.evict()
        if evicted is None:
            raise CapacityError(f"all {self.num_blocks} blocks are held by running requests")
        return evicted

    def _take_partial(self, sequence: _Sequence, source: BlockNode) -> None:
        if not self._rules.copy_on_partial_reuse:
            self._tree.remove(source)
            sequence.block_ids.append(source.block_id)
            return
        # Last to be evicted; if even so it is the only block left, its KV is already where it is needed.
        self._tree.touch(source)
        target = self._take_block()
        if target != source.block_id:
            self._copy_block(source.block_id, target)
        sequence.block_ids.append(target)

    def _publish_block(self, sequence: _Sequence, index: int, tokens: tuple[int, ...]) -> bool:
        """Hands a block over to the tree, or references its equal there; False when that would cost too much."""
        parent = sequence.path[index - 1] if index else None
        block_id = sequence.block_ids[index]
        node = self._tree.child(sequence.key, parent, tokens)
        if node is None:
            sequence.path.append(self._tree.insert(sequence.key, parent, tokens, block_id))
            return True
        if not node.references and not self._replaces and self._num_unpromised_blocks < 1:
            return False
        if not node.references and self._replaces:
            self._free.append(node.block_id)
            node.block_id = block_id
        self._tree.acquire([node])
        sequence.path.append(node)
        return True
