"""Optimum: the policy that knows every future request and lets go what is asked for last (Belady 1966)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from semblend_trt.donors.eviction import Ranking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from semblend_trt.donors.eviction import DonorHistory


class Optimum:
    """An `EvictionPolicy` for a `BlockCache` that looks ahead.

    No policy finds more blocks held where all are of one size. Where sizes differ it is a good order but no bound: the
    best choice is then a knapsack.
    """

    def __init__(self, requests: Iterable[list[int]], request: Callable[[], int]) -> None:
        """`requests` are the blocks of each request in order; `request` says which of them is being served."""
        self._uses: dict[int, list[int]] = {}
        for index, blocks in enumerate(requests):
            for block in dict.fromkeys(blocks):
                self._uses.setdefault(block, []).append(index)
        for uses in self._uses.values():
            uses.reverse()
        self._request = request
        self._block_of: dict[str, int] = {}
        self._ranking = Ranking()

    def added(self, donor_id: str, history: DonorHistory) -> None:
        self._block_of[donor_id] = int.from_bytes(history.text, "little")
        self.used(donor_id)

    def used(self, donor_id: str) -> None:
        later = self._uses[self._block_of[donor_id]]
        while later and later[-1] <= self._request():
            later.pop()
        self._ranking.put(donor_id, (-later[-1] if later else -math.inf,))

    def described(self, donor_id: str) -> None:
        """What kind a block is does not count."""

    def removed(self, donor_id: str, *, evicted: bool = False) -> None:  # noqa: ARG002 - the interface names it
        self._block_of.pop(donor_id, None)
        self._ranking.discard(donor_id)

    def candidates(self) -> Iterator[str]:
        return iter(self._ranking)
