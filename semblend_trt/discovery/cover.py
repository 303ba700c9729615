"""Chooses the runs that cover a prompt: `cover` may leave holes between them, `chain` may not."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from semblend_trt.discovery.span_index import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

_Tie: TypeAlias = tuple[bool, bool, bool, int, str, int, int]
_Entry: TypeAlias = tuple[int, int, str, int]


@dataclass(frozen=True, slots=True)
class Preference:
    """The order among pieces of equal length.

    First come donors that are near (`is_near`: their KV is on the GPU), then donors that are used already, then shifts
    by whole blocks of `block_size` tokens, then the donor that offers most tokens, then the donor's name.
    """

    is_near: Callable[[str], bool] = lambda _donor_id: False
    block_size: int = 1

    def is_aligned(self, piece: Run) -> bool:
        """Whether the piece's tokens have the same places in their blocks on both sides."""
        return (piece.donor_start - piece.target_start) % self.block_size == 0


@dataclass(frozen=True, slots=True)
class Cover:
    """Disjoint `pieces` of runs, sorted by position, and how they were chosen.

    `considered` counts the pieces that were long enough to choose from. A longer piece that was chosen before them
    covered some (`covered`) and cut others (`cut`); `dropped_short` counts the remains that were too short. `ties`
    counts choices between equally long pieces, `near` and `aligned` the chosen pieces with these preferences.
    """

    pieces: tuple[Run, ...] = ()
    considered: int = 0
    covered: int = 0
    cut: int = 0
    dropped_short: int = 0
    ties: int = 0
    near: int = 0
    aligned: int = 0

    def explained(self) -> dict[str, int]:
        """The same in plain numbers, for a plan's diagnostics."""
        return {
            "pieces": len(self.pieces),
            "tokens": sum(piece.length for piece in self.pieces),
            "donors": len({piece.donor_id for piece in self.pieces}),
            "considered": self.considered,
            "covered": self.covered,
            "cut": self.cut,
            "dropped_short": self.dropped_short,
            "ties": self.ties,
            "near": self.near,
            "aligned": self.aligned,
        }


def cover(
    runs: Iterable[Run],
    begin: int,
    end: int,
    min_span: int,
    used_donors: Collection[str] = frozenset(),
    preference: Preference | None = None,
) -> Cover:
    """Covers prompt positions [begin, end) by disjoint pieces of `runs`, each of at least `min_span` tokens.

    The longest piece is taken first. What it leaves of the others can be taken later. `preference` decides between
    equally long pieces; `used_donors` are in use already. The order of `runs` does not matter.
    """
    preference = preference or Preference()
    pieces = {piece for run in runs if (piece := run.within(begin, end)) is not None and piece.length >= min_span}
    offered: Counter[str] = Counter()
    for piece in pieces:
        offered[piece.donor_id] += piece.length
    waiting = [_entry(piece) for piece in pieces]
    heapq.heapify(waiting)
    taken = set(used_donors)
    chosen: list[Run] = []
    counts: Counter[str] = Counter()
    while waiting:
        equally_long = _pop_longest(waiting)
        counts["ties"] += len(equally_long) > 1
        for piece in sorted(equally_long, key=lambda piece: _tie(piece, taken, offered, preference)):
            free = _free_parts(piece, chosen)
            if free == [piece]:
                insort(chosen, piece, key=lambda run: run.target_start)
                taken.add(piece.donor_id)
                continue
            counts["cut" if free else "covered"] += 1
            for part in free:
                if part.length >= min_span:
                    heapq.heappush(waiting, _entry(part))
                else:
                    counts["dropped_short"] += 1
    return Cover(
        pieces=tuple(chosen),
        considered=len(pieces),
        near=sum(preference.is_near(piece.donor_id) for piece in chosen),
        aligned=sum(preference.is_aligned(piece) for piece in chosen),
        **counts,
    )


def chain(runs: Sequence[Run], begin: int, end: int, min_span: int, preference: Preference | None = None) -> list[Run]:
    """Covers prompt positions from `begin` on without a hole, up to `end` or as far as the runs reach.

    Each step takes the run that reaches furthest from the end of the last piece; of equally far ones that of a near
    donor, then that of the last piece's donor. Every piece has at least `min_span` tokens.
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
            ties.append((not preference.is_near(donor_id), donor_id != donor, donor_id, position + shift))
        *_, donor, donor_start = min(ties)
        chosen.append(Run(donor, donor_start, position, furthest - position))
        position = furthest


def _entry(piece: Run) -> _Entry:
    return (-piece.length, piece.target_start, piece.donor_id, piece.donor_start)


def _tie(piece: Run, taken: Collection[str], offered: Counter[str], preference: Preference) -> _Tie:
    # All pieces of one donor follow each other, so that a donor once taken stays in front.
    return (
        not preference.is_near(piece.donor_id),
        piece.donor_id not in taken,
        not preference.is_aligned(piece),
        -offered[piece.donor_id],
        piece.donor_id,
        piece.target_start,
        piece.donor_start,
    )


def _pop_longest(waiting: list[_Entry]) -> list[Run]:
    """Takes all waiting pieces of the greatest length out of the heap."""
    longest = waiting[0][0]
    pieces = []
    while waiting and waiting[0][0] == longest:
        negative_length, target_start, donor_id, donor_start = heapq.heappop(waiting)
        pieces.append(Run(donor_id, donor_start, target_start, -negative_length))
    return pieces


def _free_parts(piece: Run, chosen: list[Run]) -> list[Run]:
    """The parts of a piece that no run in `chosen` (sorted, disjoint) covers."""
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
