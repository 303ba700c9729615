"""The tree of reusable KV blocks: exact prefixes by token, apart for every adapter and salt.

Shaped after TensorRT-LLM's block reuse (`cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp`): a node is one full block,
keyed by its own tokens below the node of the block before it. The tree owns the blocks of its nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class RootKey(NamedTuple):
    """What keeps prefixes apart: the adapter's task id and the request's salt, None where there is none."""

    lora_task_id: int | None = None
    cache_salt: str | None = None


@dataclass(eq=False, slots=True)
class BlockNode:
    """One full block of tokens. `references` counts the sequences that read it; a root has block id -1."""

    tokens: tuple[int, ...]
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
    """Reusable blocks of one engine; not thread safe.

    Unreferenced nodes are kept in least-recently-used order, children before their parents, so that the first of them
    is always a leaf. That holds because whoever references a node references all nodes above it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[RootKey, BlockNode] = {}
        self._keys: dict[BlockNode, RootKey] = {}
        self._unreferenced: OrderedDict[BlockNode, None] = OrderedDict()
        self._num_nodes = 0

    def __len__(self) -> int:
        """Blocks owned by the tree."""
        return self._num_nodes

    @property
    def num_evictable(self) -> int:
        """Blocks that `evict` could give back, one after another."""
        return len(self._unreferenced)

    def match(self, key: RootKey, tokens: Sequence[int], *, partial: bool = True) -> PrefixMatch:
        """Returns the longest prefix of `tokens` that the tree holds below `key`; changes nothing.

        The last token is never matched: its row has to run so that logits come out. With `partial`, the child that
        shares the longest beginning with the rest is named too.
        """
        node = self._roots.get(key)
        nodes: list[BlockNode] = []
        limit = len(tokens) - 1
        while node is not None:
            start = len(nodes) * self._block_size
            rest = tuple(tokens[start : min(start + self._block_size, limit)])
            child = node.children.get(rest) if len(rest) == self._block_size else None
            if child is None:
                source, length = _longest_beginning(node, rest) if partial else (None, 0)
                return PrefixMatch(tuple(nodes), source, length)
            nodes.append(child)
            node = child
        return PrefixMatch(tuple(nodes))

    def child(self, key: RootKey, parent: BlockNode | None, tokens: tuple[int, ...]) -> BlockNode | None:
        """The node of the block `tokens` below `parent`, or below the root of `key`."""
        above = parent if parent is not None else self._roots.get(key)
        return None if above is None else above.children.get(tokens)

    def insert(self, key: RootKey, parent: BlockNode | None, tokens: tuple[int, ...], block_id: int) -> BlockNode:
        """Hands a written block over to the tree; the new node comes with one reference, the caller's."""
        if len(tokens) != self._block_size:
            raise SemBlendError(
                f"block {block_id} holds {len(tokens)} tokens; only full blocks of {self._block_size} can be published"
            )
        if parent is not None and not parent.references:
            raise SemBlendError(f"block {block_id} is published below block {parent.block_id}, which nobody references")
        above = parent if parent is not None else self._root(key)
        if tokens in above.children:
            raise SemBlendError(f"block {block_id} repeats a prefix that block {above.children[tokens].block_id} holds")
        node = above.children[tokens] = BlockNode(tokens, block_id, above, references=1)
        self._num_nodes += 1
        return node

    def acquire(self, path: Sequence[BlockNode]) -> None:
        """References each node of `path`, which starts below a root."""
        for node in path:
            node.references += 1
            self._unreferenced.pop(node, None)

    def release(self, path: Sequence[BlockNode]) -> None:
        """Takes the references back, from the deepest node up, so that leaves are evicted before their parents."""
        for node in reversed(path):
            node.references -= 1
            if node.references == 0:
                self._unreferenced[node] = None

    def touch(self, node: BlockNode) -> None:
        """Makes an unreferenced node and those above it the most recently used."""
        step: BlockNode | None = node
        while step is not None and step in self._unreferenced:
            self._unreferenced.move_to_end(step)
            step = step.parent

    def evict(self) -> int | None:
        """Removes the least recently used unreferenced leaf and returns its block, None when there is none."""
        if not self._unreferenced:
            return None
        node = next(iter(self._unreferenced))
        self.remove(node)
        return node.block_id

    def remove(self, node: BlockNode) -> None:
        """Takes an unreferenced leaf out of the tree; its block belongs to the caller from now on."""
        if node.references or node.children or node.parent is None:
            raise SemBlendError(
                f"block {node.block_id} has {node.references} readers and {len(node.children)} children; "
                "only an unreferenced leaf can leave the tree"
            )
        del self._unreferenced[node]
        del node.parent.children[node.tokens]
        self._num_nodes -= 1
        if node.parent in self._keys and not node.parent.children:
            del self._roots[self._keys.pop(node.parent)]

    def walk(self) -> Iterator[tuple[RootKey, BlockNode]]:
        """All nodes with the key of their root, parents first."""
        for key, root in self._roots.items():
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                yield key, node
                stack.extend(node.children.values())

    def _root(self, key: RootKey) -> BlockNode:
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = BlockNode((), -1, None)
            self._keys[root] = key
        return root


def _longest_beginning(node: BlockNode, rest: tuple[int, ...]) -> tuple[BlockNode | None, int]:
    best, longest = None, 0
    for tokens, child in node.children.items():
        length = common_length(tokens, rest)
        if length > longest:
            best, longest = child, length
    return best, longest


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading tokens that both have in common."""
    for index, (left, right) in enumerate(zip(first, second)):  # noqa: B905 - the shorter one ends the comparison
        if left != right:
            return index
    return min(len(first), len(second))
