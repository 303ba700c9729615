"""KindWeights: how the weight of each kind of text follows what happens to donors of that kind."""

from __future__ import annotations

from collections import OrderedDict

from semblend_trt.donors.block_kind import BlockKind, KindMix, main_kind

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
    """

    def __init__(self) -> None:
        self._factors = dict.fromkeys(BlockKind, 1.0)
        self._gone: OrderedDict[bytes, tuple[str, BlockKind]] = OrderedDict()

    def factor(self, kind: BlockKind) -> float:
        return self._factors[kind]

    def hit(self, kinds: KindMix) -> None:
        """A donor of these kinds was used."""
        self._scale(main_kind(kinds), HIT_FACTOR)

    def evicted(self, donor_id: str, text: bytes, kinds: KindMix, *, was_used: bool) -> None:
        """A donor had to make room."""
        kind = main_kind(kinds)
        if not was_used:
            self._scale(kind, UNUSED_FACTOR)
        if text:
            self._gone[text] = donor_id, kind
            self._gone.move_to_end(text)
            if len(self._gone) > MAX_REMEMBERED:
                self._gone.popitem(last=False)

    def came(self, donor_id: str, text: bytes) -> None:
        """A donor is ready. It is a regret when another donor of its text had to go, none when it only moved."""
        gone_id, kind = self._gone.pop(text, (donor_id, BlockKind.OTHER))
        if gone_id != donor_id:
            self._scale(kind, REGRET_FACTOR)

    def _scale(self, kind: BlockKind, factor: float) -> None:
        self._factors[kind] = min(MOST, max(LEAST, self._factors[kind] * factor))
