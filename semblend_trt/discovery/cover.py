"""Chooses the runs that cover a prompt. `cover` may leave holes between them, `chain` may not.

A piece is a run, or the part of a run, that can be reused.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from semblend_trt.discovery.span_index import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

_Tie: TypeAlias = tuple[int, bool, bool, bool, int, str, int, int]


@dataclass(frozen=True, slots=True)
class Preference:
    """Which of several pieces is taken: the one of most `weight`, and which of several of equal weight.

    Preferred are, in this order: donors of a low generation (`generations` holds those above 0), near donors
    (`is_near`: the KV is on the GPU), donors in use already, shifts by whole blocks of `block_size` tokens, the donor
    that offers most tokens, and the lowest donor id.
    """

    is_near: Callable[[str], bool] = lambda _donor_id: False
    block_size: int = 1
    generations: Mapping[str, int] = field(default_factory=dict)

    def weight(self, piece: Run) -> int:
        """The piece's length; from a donor of generation g the part of it by g + 1."""
        return piece.length // (1 + self.generations.get(piece.donor_id, 0)) if self.generations else piece.length

    def is_aligned(self, piece: Run) -> bool:
        """Whether the piece's tokens have the same offsets in their blocks in donor and prompt."""
        return (piece.donor_start - piece.target_start) % self.block_size == 0


def cover(
    runs: Iterable[Run],
    begin: int,
    end: int,
    min_span: int,
    used_donors: Collection[str] = frozenset(),
    preference: Preference | None = None,
) -> list[Run]:
    """Covers prompt positions [begin, end) with disjoint pieces of `runs`, of at least `min_span` tokens each, sorted.

    The piece of most weight is taken first, which is the longest one where all donors are of one generation; the free
    parts of pieces that it cuts are considered again. `preference` says what a piece weighs and decides between equal
    ones, and `used_donors` are in use already. The order of `runs` does not matter.
    """
    preference = preference or Preference()
    pieces = {piece for run in runs if (piece := run.within(begin, end)) is not None and piece.length >= min_span}
    offered: Counter[str] = Counter()
    for piece in pieces:
        offered[piece.donor_id] += piece.length
    waiting = [(-preference.weight(piece), piece) for piece in pieces]
    heapq.heapify(waiting)
    taken = set(used_donors)
    chosen: list[Run] = []
    while waiting:
        for piece in sorted(_pop_heaviest(waiting), key=lambda piece: _tie(piece, taken, offered, preference)):
            free = _free_parts(piece, chosen)
            if free == [piece]:
                insort(chosen, piece, key=lambda run: run.target_start)
                taken.add(piece.donor_id)
                continue
            for part in free:
                if part.length >= min_span:
                    heapq.heappush(waiting, (-preference.weight(part), part))
    return chosen


def chain(runs: Sequence[Run], begin: int, end: int, min_span: int, preference: Preference | None = None) -> list[Run]:
    """Covers prompt positions from `begin` on without a hole, up to `end` or as far as the runs reach.

    Each piece starts where the last one ended and has at least `min_span` tokens. Of the runs that hold this position,
    the one that reaches furthest is taken; of equally far ones that of the lowest generation, then a near donor's, then
    the last piece's donor's.
    """
    preference = preference or Preference()
    later = sorted(runs, key=lambda run: run.target_start, reverse=True)
    reaching: list[tuple[int, str, int]] = []
    chosen: list[Run] = []
    position, donor = begin, ""
    while True:
        while later and later[-1].target_start <= position:
            run = later.pop()
            heapq.heappush(reaching, (-min(run.target_end, end), run.donor_id, run.donor_start - run.target_start))
        furthest = -reaching[0][0] if reaching else position
        if furthest - position < max(min_span, 1):
            return chosen
        ties = []
        while reaching and -reaching[0][0] == furthest:
            _, donor_id, shift = heapq.heappop(reaching)
            generation = preference.generations.get(donor_id, 0)
            ties.append((generation, not preference.is_near(donor_id), donor_id != donor, donor_id, position + shift))
        *_, donor, donor_start = min(ties)
        chosen.append(Run(donor, donor_start, position, furthest - position))
        position = furthest


def _tie(piece: Run, taken: Collection[str], offered: Counter[str], preference: Preference) -> _Tie:
    # The donor id comes before positions, so that one donor's pieces are taken together.
    return (
        preference.generations.get(piece.donor_id, 0),
        not preference.is_near(piece.donor_id),
        piece.donor_id not in taken,
        not preference.is_aligned(piece),
        -offered[piece.donor_id],
        piece.donor_id,
        piece.target_start,
        piece.donor_start,
    )


def _pop_heaviest(waiting: list[tuple[int, Run]]) -> list[Run]:
    """Takes all pieces of the greatest weight from the heap."""
    heaviest, pieces = waiting[0][0], []
    while waiting and waiting[0][0] == heaviest:
        pieces.append(heapq.heappop(waiting)[1])
    return pieces


def _free_parts(piece: Run, chosen: list[Run]) -> list[Run]:
    """The parts of a piece that `chosen` (sorted, disjoint) leaves free."""
    parts: list[Run] = []
    position = piece.target_start
    for index in range(bisect_left(chosen, piece.target_start, key=lambda run: run.target_end), len(chosen)):
        run = chosen[index]
        if run.target_start >= piece.target_end:
            break
        if (part := piece.within(position, run.target_start)) is not None:
            parts.append(part)
        position = max(position, run.target_end)
    if (part := piece.within(position, piece.target_end)) is not None:
        parts.append(part)
    return parts
