"""KindWeights: how the weight of each kind of text follows what happens to donors of that kind."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from semblend_trt.donors.block_kind import BlockKind, KindMix, main_kind
from semblend_trt.donors.eviction.return_times import ReturnTimes

if TYPE_CHECKING:
    from semblend_trt.donors.eviction.policy import DonorHistory

# An unused donor that had to go lowers its kind by the SemanticKV system's factor. That system also raises a kind on a
# hit and on a regret, without saying by how much: a hit outweighs two unused donors, a regret ten.
UNUSED_FACTOR = 0.995
HIT_FACTOR = 1.01
REGRET_FACTOR = 1.05
# Neither a flood of one kind nor its absence may decide alone.
LEAST, MOST = 0.25, 4.0
MAX_REMEMBERED = 4096


class KindWeights:
    """A factor on each kind's default weight, shared by the tiers of one catalog.

    A regret is text that becomes a donor again after its donor had to go, among the last MAX_REMEMBERED such texts.
    `returns` are the times that hits and regrets were waited for.
    """

    def __init__(self) -> None:
        self.returns = ReturnTimes()
        self._factors = dict.fromkeys(BlockKind, 1.0)
        self._gone: OrderedDict[bytes, tuple[str, BlockKind, float]] = OrderedDict()

    def factor(self, kind: BlockKind) -> float:
        return self._factors[kind]

    def hit(self, kinds: KindMix, gap_seconds: float) -> None:
        """A donor of these kinds was used, so long after its last use."""
        kind = main_kind(kinds)
        self._scale(kind, HIT_FACTOR)
        self.returns.came_back(kind, gap_seconds)

    def evicted(self, donor_id: str, history: DonorHistory) -> None:
        """A donor had to make room."""
        kind = main_kind(history.kinds)
        if not history.uses:
            self._scale(kind, UNUSED_FACTOR)
        if history.text:
            self._gone[history.text] = donor_id, kind, history.last_seconds
            self._gone.move_to_end(history.text)
            if len(self._gone) > MAX_REMEMBERED:
                self._gone.popitem(last=False)

    def came(self, donor_id: str, text: bytes, seconds: float) -> None:
        """A donor is ready, last used at `seconds`. It is a regret when another donor of its text had to go, none when
        it only moved."""
        gone = self._gone.pop(text, None)
        if gone is not None and gone[0] != donor_id:
            _, kind, last_seconds = gone
            self._scale(kind, REGRET_FACTOR)
            self.returns.came_back(kind, seconds - last_seconds)

    def _scale(self, kind: BlockKind, factor: float) -> None:
        self._factors[kind] = min(MOST, max(LEAST, self._factors[kind] * factor))
