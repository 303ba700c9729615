"""Which runs cover a prompt best: `cover` may leave holes, `chain` may not."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

from semblend_trt.discovery.span_index import Run

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

# What orders pieces of equal length: fewer donors, then the donor that offers most, then name and position.
_Tie: TypeAlias = tuple[bool, int, str, int, int]
_Entry: TypeAlias = tuple[int, int, str, int]


def cover(
    runs: Sequence[Run], begin: int, end: int, min_span: int, used_donors: Collection[str] = frozenset()
) -> list[Run]:
    """Returns disjoint pieces of `runs` inside prompt positions [begin, end), each of at least `min_span` tokens.

    The longest piece is taken first; what it leaves of the others stays in the choice. Among equally long pieces a
    donor already taken (`used_donors` count as taken) goes first, so that few donors are needed. Sorted by position.
    """
    pieces = {piece for run in runs if (piece := run.within(begin, end)) is not None and piece.length >= min_span}
    offered: Counter[str] = Counter()
    for piece in pieces:
        offered[piece.donor_id] += piece.length
    waiting = [_entry(piece) for piece in pieces]
    heapq.heapify(waiting)
    taken = set(used_donors)
    chosen: list[Run] = []
    while waiting:
        ties = _pop_longest(waiting)
        for piece in sorted(ties, key=lambda piece: _tie(piece, taken, offered)):
            free = _free_parts(piece, chosen)
            if free == [piece]:
                insort(chosen, piece, key=lambda run: run.target_start)
                taken.add(piece.donor_id)
                continue
            for part in free:
                if part.length >= min_span:
                    heapq.heappush(waiting, _entry(part))
    return chosen


def chain(runs: Sequence[Run], begin: int, end: int, min_span: int) -> list[Run]:
    """Returns pieces that cover [begin, e) without a hole, each of at least `min_span` tokens, with e <= `end` far out.

    Each step takes the run that reaches furthest from where the last one ended; equally far, the same donor goes on.
    """
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
            ties.append((donor_id != donor, donor_id, position + shift))
        _, donor, donor_start = min(ties)
        chosen.append(Run(donor, donor_start, position, furthest - position))
        position = furthest


def _entry(piece: Run) -> _Entry:
    return (-piece.length, piece.target_start, piece.donor_id, piece.donor_start)


def _tie(piece: Run, taken: Collection[str], offered: Counter[str]) -> _Tie:
    # All pieces of one donor follow each other, so that a donor once taken stays in front.
    return (
        piece.donor_id not in taken,
        -offered[piece.donor_id],
        piece.donor_id,
        piece.target_start,
        piece.donor_start,
    )


def _pop_longest(waiting: list[_Entry]) -> list[Run]:
    """Takes the longest waiting pieces, all of one length; they may overlap what is chosen."""
    longest = waiting[0][0]
    pieces = []
    while waiting and waiting[0][0] == longest:
        negative_length, target_start, donor_id, donor_start = heapq.heappop(waiting)
        pieces.append(Run(donor_id, donor_start, target_start, -negative_length))
    return pieces


def _free_parts(piece: Run, chosen: list[Run]) -> list[Run]:
    """What `chosen` (sorted, disjoint) leaves of a piece."""
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
