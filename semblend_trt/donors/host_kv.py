"""HostKv: one donor's KV in host memory, in one part or in several that follow one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.layout import ContiguousKv


@dataclass(frozen=True, slots=True)
class HostKv:
    """`parts`: [layers, kv_factor, kv_heads, tokens of the part, head_dim] each, in the order of their tokens."""

    parts: tuple[ContiguousKv, ...]

    @property
    def capacity(self) -> int:
        """Positions of all parts together."""
        return sum(part.capacity for part in self.parts)

    @property
    def tensor(self) -> torch.Tensor:
        """All of it as [layers, kv_factor, kv_heads, tokens, head_dim]: the memory of a single part, else a copy."""
        tensors = [part.tensor for part in self.parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=3)

    def pieces(self, start: int, length: int) -> Iterator[tuple[ContiguousKv, int, int]]:
        """Where positions `start .. start + length - 1` lie: each part of them, its first index there, and how many."""
        first, end = 0, start + length
        for part in self.parts:
            begin, stop = max(start, first), min(end, first + part.capacity)
            if begin < stop:
                yield part, begin - first, stop - begin
            first += part.capacity
