"""Text that a donor holds up to a few tokens: runs that follow each other there and in the prompt, as one chunk.

A chunk is never placed as a whole. Its pieces hold equal tokens only; what differs between them is computed, and so is
a margin of tokens behind each difference, the first that see it. Tokens before a difference do not see it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from semblend_trt.discovery.run import Run

# Two differences of 8 tokens, and between them up to 31 equal ones, which are too few to be found as a run.
MAX_GAP = 48
# Runs beside an insertion may both hold the tokens that stand on either side of it, and overlap by them.
MAX_OVERLAP = 16
# A shorter piece saves less than the work of placing it.
LEAST_PIECE = 16
# Chunks of one donor that a run may still join; text that repeats itself opens many.
_OPEN_CHUNKS = 8
# Chunks that a plan may be made of, the largest first.
MAX_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class FuzzyChunk:
    """Two or more `runs` of one donor, by position, and the `pieces` that the margin leaves of them."""

    runs: tuple[Run, ...]
    pieces: tuple[Run, ...]

    @property
    def donor_id(self) -> str:
        return self.runs[0].donor_id

    @property
    def reusable_tokens(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def tokens_in(self, chosen: Iterable[Run]) -> int:
        """Tokens of `chosen` runs that lie on this chunk's own runs."""
        places: dict[int, list[Run]] = defaultdict(list)
        for run in self.runs:
            places[_shift(run)].append(run)
        total = 0
        for piece in chosen:
            if piece.donor_id != self.donor_id:
                continue
            same = places.get(_shift(piece), [])
            first = bisect_right(same, piece.target_start, key=lambda run: run.target_end)
            for run in islice(same, first, None):
                if run.target_start >= piece.target_end:
                    break
                total += min(run.target_end, piece.target_end) - max(run.target_start, piece.target_start)
        return total

    def explained(self, chosen: Iterable[Run]) -> dict[str, Any]:
        """What diagnostics say: the prompt's range, and how many of its tokens `chosen` reuses from this chunk."""
        begin, end = self.runs[0].target_start, max(run.target_end for run in self.runs)
        return {
            "donor_id": self.donor_id,
            "target": [begin, end],
            "runs": len(self.runs),
            "tokens": end - begin,
            "tokens_reused": self.tokens_in(chosen),
        }


def chunks_of(runs: Iterable[Run], begin: int, end: int, margin: int) -> list[FuzzyChunk]:
    """Joins `runs` into chunks, their pieces cut to prompt positions [begin, end); a run alone is in none.

    Two runs of a donor are joined when the second follows the first, in donor and prompt, with at most MAX_GAP tokens
    between them. A run belongs to one chunk at most, that whose shift is nearest to its own.
    """
    of_donor: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        of_donor[run.donor_id].append(run)
    return [
        FuzzyChunk(tuple(chain), _pieces(chain, begin, end, margin))
        for donor_id in sorted(of_donor)
        for chain in _chains(of_donor[donor_id])
        if len(chain) > 1
    ]


def fill(
    chosen: Sequence[Run], chunks: Iterable[FuzzyChunk], begin: int, end: int, min_span: int, shortest: int
) -> tuple[list[Run], list[FuzzyChunk]]:
    """Adds to `chosen` (disjoint runs) what chunks hold of positions [begin, end) that are free, the largest first.

    A piece needs `shortest` tokens, and at least LEAST_PIECE; a chunk needs `min_span`, those already chosen of it
    among them. Returns the runs by position, and the chunks that are in use.
    """
    placed = sorted(chosen, key=lambda run: run.target_start)
    of_donor: dict[str, list[Run]] = defaultdict(list)
    for run in placed:
        of_donor[run.donor_id].append(run)
    used = []
    for chunk in nsmallest(MAX_CHUNKS, chunks, key=lambda chunk: (-chunk.reusable_tokens, *_entry(chunk.runs[0]))):
        inside = [part for piece in chunk.pieces if (part := piece.within(begin, end)) is not None]
        free = [part for piece in inside for part in _free_parts(piece, placed)]
        free = [part for part in free if part.length >= max(shortest, LEAST_PIECE)]
        held = chunk.tokens_in(of_donor[chunk.donor_id])
        if held + sum(part.length for part in free) < min_span:
            continue
        for part in free:
            insort(placed, part, key=lambda run: run.target_start)
        of_donor[chunk.donor_id].extend(free)
        if free or held:
            used.append(chunk)
    return placed, used


def _chains(runs: list[Run]) -> list[list[Run]]:
    """Runs of one donor, each behind the one that it continues best."""
    chains: list[list[Run]] = []
    still_open: deque[list[Run]] = deque(maxlen=_OPEN_CHUNKS)
    for run in sorted(runs, key=lambda run: (run.target_start, run.target_end, run.donor_start)):
        best = min(
            (chain for chain in still_open if _follows(chain[-1], run)),
            key=lambda chain: (abs(_shift(chain[-1]) - _shift(run)), run.target_start - chain[-1].target_end),
            default=None,
        )
        if best is None:
            chains.append([run])
            still_open.append(chains[-1])
        else:
            best.append(run)
    return chains


def _follows(first: Run, second: Run) -> bool:
    in_prompt = second.target_start - first.target_end
    in_donor = second.donor_start - (first.donor_start + first.length)
    if not all(-MAX_OVERLAP <= gap <= MAX_GAP for gap in (in_prompt, in_donor)):
        return False
    return second.target_end > first.target_end and second.donor_start > first.donor_start


def _shift(run: Run) -> int:
    return run.target_start - run.donor_start


def _entry(run: Run) -> tuple[str, int, int]:
    return (run.donor_id, run.target_start, run.donor_start)


def _pieces(chain: list[Run], begin: int, end: int, margin: int) -> tuple[Run, ...]:
    pieces, equal_from = [], chain[0].target_start
    for run in chain:
        # A difference ends where the later of the two runs beside it lets it end.
        behind = max(run.target_start, equal_from)
        piece = run.within(max(begin, behind + (margin if run is not chain[0] else 0)), end)
        if piece is not None:
            pieces.append(piece)
        equal_from = run.target_end
    return tuple(pieces)


def _free_parts(piece: Run, placed: list[Run]) -> list[Run]:
    """What `placed` (sorted, disjoint) leaves of a piece."""
    parts, position = [], piece.target_start
    for index in range(bisect_left(placed, piece.target_start, key=lambda run: run.target_end), len(placed)):
        run = placed[index]
        if run.target_start >= piece.target_end:
            break
        if (part := piece.within(position, run.target_start)) is not None:
            parts.append(part)
        position = max(position, run.target_end)
    if (part := piece.within(position, piece.target_end)) is not None:
        parts.append(part)
    return parts
