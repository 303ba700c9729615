"""Blocks: the distinct pieces of the prompts of a trace, numbered from 0."""

from __future__ import annotations

from array import array
from types import MappingProxyType
from typing import TYPE_CHECKING

from semblend_trt.donors.block_kind import BlockKind

if TYPE_CHECKING:
    from collections.abc import Hashable

    from semblend_trt.donors.block_kind import KindMix

_KINDS = tuple(BlockKind)
_PURE = {kind: MappingProxyType({kind: 1.0}) for kind in BlockKind}
NONE = -1


class Blocks:
    """`tokens` and `parents` of each block; a block without a parent, or one that nobody shares, has NONE."""

    def __init__(self) -> None:
        self.tokens, self.parents = array("q"), array("q")
        self._kinds = array("b")
        self._numbers: dict[Hashable, int] = {}

    def number(self, name: Hashable, tokens: int, kind: BlockKind, parent: int = NONE) -> int:
        """The number of the block of this name; the kind that it came with first stays."""
        found = self._numbers.setdefault(name, len(self.tokens))
        if found == len(self.tokens):
            self.tokens.append(tokens)
            self.parents.append(parent)
            self._kinds.append(_KINDS.index(kind))
        return found

    def mix(self, block: int) -> KindMix:
        return _PURE[_KINDS[self._kinds[block]]]

    def __len__(self) -> int:
        return len(self.tokens)
