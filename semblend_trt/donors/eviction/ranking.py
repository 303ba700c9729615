"""Ranking: names in the order of their ranks, changed in logarithmic time and walked without sorting."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Rank = tuple[float, ...]
# Places that are no longer valid stay until they are most of the heap; below this many nobody minds.
_STALE_FLOOR = 64


class Ranking:
    """A heap of (rank, name). Walking it takes O(k log k) for the first k names, of which none is moved."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, str]] = []
        self._ranks: dict[str, Rank] = {}

    def put(self, name: str, rank: Rank) -> None:
        """Gives `name` this rank, whether it had one or not."""
        if self._ranks.get(name) != rank:
            self._ranks[name] = rank
            heapq.heappush(self._heap, (rank, name))
            self._tidy()

    def discard(self, name: str) -> Rank | None:
        """Takes `name` out and returns the rank that it had."""
        rank = self._ranks.pop(name, None)
        self._tidy()
        return rank

    def __iter__(self) -> Iterator[str]:
        return (name for _, name in self.items())

    def items(self) -> Iterator[tuple[Rank, str]]:
        """(rank, name), lowest rank first; the ranking must not change meanwhile."""
        heap, shown = self._heap, set[str]()
        # A heap of places in the heap: a place's two children are not lower than it, so they come in when it is taken.
        front = [(heap[0], 0)] if heap else []
        while front:
            (rank, name), place = heapq.heappop(front)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heapq.heappush(front, (heap[child], child))
            if self._ranks.get(name) == rank and name not in shown:
                shown.add(name)
                yield rank, name

    def __contains__(self, name: object) -> bool:
        return name in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._ranks) + _STALE_FLOOR:
            self._heap = [(rank, name) for name, rank in self._ranks.items()]
            heapq.heapify(self._heap)
