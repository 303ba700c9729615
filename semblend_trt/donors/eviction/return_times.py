"""ReturnTimes: how long donors of each kind of text wait for their next use."""

from __future__ import annotations

from semblend_trt.donors.block_kind import BlockKind

# Before anything is seen: the SemanticKV system's fixed time. It is worth some gaps, so that no early one decides.
FIRST_SECONDS, _FIRST_GAPS = 60.0, 8
# What an older gap keeps of its worth when another comes: about the last thousand count.
MEMORY = 0.999
_LEAST_GAP_SECONDS = 1e-3


class ReturnTimes:
    """The mean time from any moment to the next use, of donors that are used again, by kind.

    Of gaps g between two uses it is sum(g^2) / (2 sum(g)): a moment falls into a long gap more often than into a short
    one (the mean residual life of renewal theory). A kind of which few donors are asked for all the time and many now
    and then has a long one, the turns of a conversation a short one.
    """

    def __init__(self) -> None:
        first = (_FIRST_GAPS * FIRST_SECONDS, _FIRST_GAPS * 2.0 * FIRST_SECONDS**2)
        self._sums = dict.fromkeys(BlockKind, first)

    def seconds(self, kind: BlockKind) -> float:
        """The mean time for donors of `kind`, above 0."""
        gaps, squares = self._sums[kind]
        return squares / (2.0 * gaps)

    def came_back(self, kind: BlockKind, gap_seconds: float) -> None:
        """A donor of `kind` was used, or its text became one again, so long after its last use."""
        gap = max(gap_seconds, _LEAST_GAP_SECONDS)
        gaps, squares = self._sums[kind]
        self._sums[kind] = MEMORY * gaps + gap, MEMORY * squares + gap * gap
