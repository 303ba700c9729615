"""The KV pool, one tensor laid out as TensorRT-LLM's primary pool, and the owner of its blocks.

Every block is in exactly one place: free, private to one sequence (which may write it), or in the reuse tree (read by
any number of sequences, written by none). Sources: TensorRT-LLM's V1 `KVCacheManager` and its block reuse
(`cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp`); for `KvCacheLayout`, the V2 cache manager's description of the
pool, `tensorrt_llm/_torch/pyexecutor/connectors/kv_cache_layout.py`."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from semblend_trt.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_wrapper.embedded.llm_args import KvCacheConfig, LlmArgs
    from kernels.layout import KvGeometry
    from semblend_trt.runtime import ActivePlans

DEFAULT_POOL_BYTES = 1 << 30


# -- the pool ---------------------------------------------------------------------------------------------------------


def pool_of(
    args: LlmArgs, max_seq_len: int, geometry: KvGeometry, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the pool, [blocks, layers, kv_factor, kv_heads * block_size * head_dim]: K then V, or latent rows alone.

    It holds `kv_cache_config.max_tokens` rounded down, by default `max_batch_size` sequences of `max_seq_len` tokens in
    at most DEFAULT_POOL_BYTES. Raises CapacityError when that is no block, or when there is no memory for it."""
    block_size, wanted = geometry.block_size, args.kv_cache_config.max_tokens
    if wanted is not None and wanted < block_size:
        raise CapacityError(
            f"kv_cache_config.max_tokens {wanted} holds no block of {block_size} tokens; give at least {block_size}"
        )
    affordable = DEFAULT_POOL_BYTES // (geometry.bytes_per_token(dtype) * block_size)
    if wanted is None and affordable < 1:
        raise CapacityError(
            f"one block of this model needs more than the default pool of {DEFAULT_POOL_BYTES} bytes; "
            "set kv_cache_config.max_tokens"
        )
    by_default = min(args.max_batch_size * geometry.blocks_for(max_seq_len), affordable)
    blocks = by_default if wanted is None else wanted // block_size
    shape = (blocks, geometry.num_layers, geometry.kv_factor, geometry.row_elements)
    try:
        # Zeros: attention masks rows that no request has written, but a masked NaN would still spread.
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise CapacityError(
            f"a KV pool of {blocks} blocks of {block_size} tokens does not fit into the memory of {device}; "
            "lower kv_cache_config.max_tokens"
        ) from error


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose blocks share one space of ids; `window_size` None is full attention."""

    layer_ids: tuple[int, ...]
    window_size: int | None = None


@dataclass(frozen=True, slots=True)
class KvCacheLayout:
    """The layer groups of `pool`, [blocks, layers, 2, row]."""

    pool: torch.Tensor
    tokens_per_block: int
    groups: tuple[LayerGroup, ...]

    def as_single_pool_tensor(self) -> torch.Tensor | None:
        """Return the pool as V1 registers it; None for several groups."""
        return self.pool if len(self.groups) == 1 else None


def cache_layout(pool: torch.Tensor, tokens_per_block: int) -> KvCacheLayout:
    """Describe `pool`, whose layers are one group."""
    return KvCacheLayout(pool, tokens_per_block, (LayerGroup(tuple(range(pool.shape[1]))),))


# -- the reuse tree ---------------------------------------------------------------------------------------------------


class RootKey(NamedTuple):
    """Keeps prefixes apart: the adapter's task id and the request's salt, each None if absent."""

    lora_task_id: int | None = None
    cache_salt: str | None = None


@dataclass(eq=False, slots=True)
class BlockNode:
    """One full block, a child of the one before it, with `references` readers. A root: its key as tokens, block -1."""

    tokens: tuple[Any, ...]
    block_id: int
    parent: BlockNode | None
    children: dict[tuple[int, ...], BlockNode] = field(default_factory=dict)
    references: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest reusable prefix: whole blocks, then the first `partial_tokens` tokens of `partial`."""

    nodes: tuple[BlockNode, ...] = ()
    partial: BlockNode | None = None
    partial_tokens: int = 0


class RadixTree:
    """Reusable blocks of one engine: exact prefixes by token, one tree for each adapter and salt. Not thread safe.

    `unreferenced` nodes are in least-recently-used order, children before their parents: the first is always a leaf.
    That holds because a sequence that references a node references all nodes above it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[RootKey, BlockNode] = {}
        self.unreferenced: OrderedDict[BlockNode, None] = OrderedDict()

    def match(self, key: RootKey, tokens: Sequence[int], *, partial: bool = True) -> PrefixMatch:
        """Return the longest prefix of `tokens` that the tree holds below `key`; change nothing.

        The last token is never matched: its row has to run, for its logits. With `partial`, the match also names the
        child that shares the longest beginning with the rest, the first of several."""
        node, nodes, size = self._roots.get(key), list[BlockNode](), self._block_size
        if node is None:
            return PrefixMatch()
        rest = tuple(tokens[: min(size, len(tokens) - 1)])
        while (child := node.children.get(rest)) is not None:
            nodes.append(child)
            node, start = child, len(nodes) * size
            rest = tuple(tokens[start : min(start + size, len(tokens) - 1)])
        # Of thousands of children, few stay after the first tokens.
        left, length = list(node.children) if partial else [], 0
        while length < len(rest) and (fitting := [each for each in left if each[length] == rest[length]]):
            left, length = fitting, length + 1
        return PrefixMatch(tuple(nodes), node.children[left[0]] if length else None, length)

    def child(self, key: RootKey, parent: BlockNode | None, tokens: tuple[int, ...]) -> BlockNode | None:
        """Return the node of the block `tokens` below `parent`, or below the root of `key`."""
        above = parent or self._roots.get(key)
        return None if above is None else above.children.get(tokens)

    def insert(self, key: RootKey, parent: BlockNode | None, tokens: tuple[int, ...], block_id: int) -> BlockNode:
        """Give a written block to the tree, below a referenced node or the root; the caller has one reference."""
        above = parent or self._roots.setdefault(key, BlockNode(key, -1, None))
        node = above.children[tokens] = BlockNode(tokens, block_id, above, references=1)
        return node

    def acquire(self, path: Sequence[BlockNode]) -> None:
        """Reference each node of `path`, which starts below a root."""
        for node in path:
            node.references += 1
            self.unreferenced.pop(node, None)

    def release(self, path: Sequence[BlockNode]) -> None:
        """Take the references back, from the deepest node up, so that leaves are evicted before their parents."""
        for node in reversed(path):
            node.references -= 1
            if node.references == 0:
                self.unreferenced[node] = None

    def touch(self, node: BlockNode) -> None:
        """Make an unreferenced node and those above it the most recently used."""
        step: BlockNode | None = node
        while step is not None and step in self.unreferenced:
            self.unreferenced.move_to_end(step)
            step = step.parent

    def evict(self) -> int | None:
        """Remove the least recently used unreferenced leaf and return its block; None without such a leaf."""
        if not self.unreferenced:
            return None
        node, _ = self.unreferenced.popitem(last=False)
        parent = cast("BlockNode", node.parent)
        del parent.children[node.tokens]
        if parent.parent is None and not parent.children:
            del self._roots[cast("RootKey", parent.tokens)]
        return node.block_id


# -- the blocks -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sequence:
    """`path`: the tree nodes of the leading blocks. A leading block other than its node's is a private duplicate."""

    key: RootKey
    total_blocks: int
    path: list[BlockNode]
    block_ids: list[int]


class BlockManager:
    """Allocates blocks, finds exact prefixes, publishes finished blocks.

    V1 lets a sequence enter only if it can get all blocks that it may ever need (GUARANTEED_NO_EVICT), so it is never
    paused. For V2 the scheduler checks for room before it grows a sequence. Of two equal blocks the tree keeps its own.
    V2 then gives the sequence the tree's block in the place of its own, which becomes free.
    `copy_block(source, target)` copies one block's KV of all layers. `publication` may be set at any time before a
    request is published. `reset_reuse_state` calls `on_reset` when it has freed all reusable blocks."""

    def __init__(
        self, num_blocks: int, config: KvCacheConfig, copy_block: Callable[[int, int], object], *, is_v2: bool = False
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, config.tokens_per_block
        self.publication: ActivePlans | None = None
        self.on_reset: Callable[[], None] | None = None
        self._config, self._copy_block, self._is_v2 = config, copy_block, is_v2
        self._tree = RadixTree(self.block_size)
        self._free: deque[int] = deque(range(num_blocks))
        self._sequences: dict[int, _Sequence] = {}
        self._pins: dict[int, list[BlockNode]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds: free ones, and reusable ones without a reader."""
        return len(self._free) + len(self._tree.unreferenced)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits(self, match: PrefixMatch, total_tokens: int) -> bool:
        """Return whether a sequence of `total_tokens` with this match can run to its end beside the admitted ones."""
        shared = sum(node.references > 0 for node in match.nodes)
        return self.blocks_for(total_tokens) - shared <= self._num_unpromised_blocks

    def match(self, key: RootKey, tokens: Sequence[int]) -> PrefixMatch:
        """Return the longest exact prefix held, never the last token of `tokens`; change nothing."""
        if not self._config.enable_block_reuse:
            return PrefixMatch()
        return self._tree.match(key, tokens, partial=self._config.enable_partial_reuse)

    def add_sequence(self, request_id: int, key: RootKey, match: PrefixMatch, total_tokens: int) -> int:
        """Admit a request on a fresh `match` that fits; return its matched tokens. `allocate` gives it blocks later."""
        self._tree.acquire(match.nodes)
        blocks = [node.block_id for node in match.nodes]
        self._sequences[request_id] = _Sequence(key, self.blocks_for(total_tokens), list(match.nodes), blocks)
        if match.partial is not None:
            # Evicted last. If it is the only block left, its KV is already in place.
            self._tree.touch(match.partial)
            blocks.append(self._take_block())
            if blocks[-1] != match.partial.block_id:
                self._copy_block(match.partial.block_id, blocks[-1])
        return len(match.nodes) * self.block_size + match.partial_tokens

    def room_for(self, request_id: int) -> int:
        """Return the tokens that the sequence's blocks and all blocks that can be had now would hold."""
        return (len(self._sequences[request_id].block_ids) + self.num_free_blocks) * self.block_size

    def allocate(self, request_id: int, num_tokens: int) -> list[int]:
        """Grow the sequence to hold `num_tokens` and return all its block ids in order of position."""
        blocks = self._sequences[request_id].block_ids
        blocks += [self._take_block() for _ in range(self.blocks_for(num_tokens) - len(blocks))]
        return list(blocks)

    def block_ids(self, request_id: int) -> list[int]:
        """Return the blocks of the sequence in order of position."""
        return list(self._sequences[request_id].block_ids)

    def publish(self, request_id: int, tokens: Sequence[int]) -> None:
        """Offer the full blocks of `tokens`, the request's leading tokens whose KV is written, for reuse.

        Publication stops at the first block that would cost one promised to others."""
        sequence, tree, size = self._sequences[request_id], self._tree, self.block_size
        if not self._config.enable_block_reuse:
            return
        end = len(tokens) if self.publication is None else self.publication.publishable(request_id, len(tokens))
        for index in range(len(sequence.path), end // size):
            block = tuple(tokens[index * size : (index + 1) * size])
            parent = sequence.path[index - 1] if index else None
            if (node := tree.child(sequence.key, parent, block)) is None:
                node = tree.insert(sequence.key, parent, block, sequence.block_ids[index])
            else:
                if not node.references and self._num_unpromised_blocks < 1:
                    return
                tree.acquire([node])
                if self._is_v2 and node.block_id != sequence.block_ids[index]:
                    self._free.append(sequence.block_ids[index])
                    sequence.block_ids[index] = node.block_id
            sequence.path.append(node)

    def reset_reuse_state(self) -> bool:
        """Free all reusable blocks. Returns False, and frees none, while there is a sequence or a pin."""
        if self._sequences or self._pins:
            return False
        while (block := self._tree.evict()) is not None:
            self._free.append(block)
        if self.on_reset is not None:
            self.on_reset()
        return True

    def stop_growing(self, request_id: int) -> None:
        """Give up the blocks promised but not allocated: the sequence is done and only held."""
        sequence = self._sequences[request_id]
        sequence.total_blocks = len(sequence.block_ids)

    def release(self, request_id: int) -> None:
        """Drop the sequence or the pins, if there are any: private blocks become free, reusable ones lose a reader."""
        if (sequence := self._sequences.pop(request_id, None)) is None:
            self._tree.release(self._pins.pop(request_id, []))
            return
        shared = zip(sequence.path, sequence.block_ids, strict=False)
        self._free += [block_id for node, block_id in shared if node.block_id != block_id]
        self._free += sequence.block_ids[len(sequence.path) :]
        self._tree.release(sequence.path)
        if self.publication is not None:
            self.publication.released(request_id)

    def pin(self, request_id: int) -> None:
        """Release the sequence and its private blocks, duplicates too; pin what it reads until the next `release`."""
        self._pins[request_id] = path = self._sequences[request_id].path
        self._tree.acquire(path)
        self.release(request_id)

    @property
    def _num_unpromised_blocks(self) -> int:
        """Free blocks that no running sequence may still need."""
        if self._is_v2:
            return self.num_free_blocks
        promised = sum(max(0, s.total_blocks - len(s.block_ids)) for s in self._sequences.values())
        return self.num_free_blocks - promised

    def _take_block(self) -> int:
        block = self._free.popleft() if self._free else self._tree.evict()
        assert block is not None, "the scheduler has checked for room"
        return block
