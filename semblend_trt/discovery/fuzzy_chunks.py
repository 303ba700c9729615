"""Fuzzy chunks: text that differs from a donor's in a few tokens, as runs that follow each other in donor and prompt.

Only equal tokens are reused. The tokens that differ are computed. So is a margin after each difference, because those
tokens attend to it most; tokens before a difference do not attend to it at all.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from semblend_trt.discovery.span_index import Run

# Two differences of 8 tokens each, and up to 31 equal tokens between them, which are too few for the index to find.
MAX_GAP = 48
# Around inserted text, the tokens before and after it may be equal by chance; then both runs hold them.
MAX_OVERLAP = 16
# A shorter piece saves less than placing it costs.
LEAST_PIECE = 16
# A run may join only one of the chunks of its donor that grew last: repetitive text starts many.
_OPEN_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class FuzzyChunk:
    """Two or more `runs` of one donor, by position, and their `pieces` that may be reused."""

    runs: tuple[Run, ...]
    pieces: tuple[Run, ...]

    @property
    def donor_id(self) -> str:
        return self.runs[0].donor_id

    @property
    def reusable_tokens(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def explained(self, tokens_reused: int) -> dict[str, Any]:
        """For a plan's diagnostics: `target` is the chunk's range in the prompt, `tokens` its length."""
        begin, end = self.runs[0].target_start, self.runs[-1].target_end
        return {
            "donor_id": self.donor_id,
            "target": [begin, end],
            "runs": len(self.runs),
            "tokens": end - begin,
            "tokens_reused": tokens_reused,
        }


def chunks_of(runs: Iterable[Run], begin: int, end: int, margin: int) -> tuple[list[FuzzyChunk], list[Run]]:
    """Joins `runs` into chunks with pieces in prompt positions [begin, end). Returns the chunks and the other runs.

    A run joins a run of its donor when it follows it in both donor and prompt with at most MAX_GAP tokens between. Of
    several chunks it joins the one with the most similar shift.
    """
    of_donor: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        of_donor[run.donor_id].append(run)
    chunks, alone = [], []
    for donor_id in sorted(of_donor):
        for chain in _chains(of_donor[donor_id]):
            if len(chain) == 1:
                alone.append(chain[0])
            else:
                chunks.append(FuzzyChunk(tuple(chain), _pieces(chain, begin, end, margin)))
    return chunks, alone


def fill(
    chosen: Sequence[Run],
    chunks: Iterable[FuzzyChunk],
    begin: int,
    end: int,
    min_span: int,
    shortest: int,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[list[Run], list[dict[str, Any]]]:
    """Fills prompt positions [begin, end) that `chosen` (disjoint runs) leaves free with pieces, largest chunk first.

    A piece needs at least `shortest` and LEAST_PIECE tokens. A chunk needs `min_span` tokens, counting those that
    `chosen` holds already. Once it `is_over` no chunk is added to others. Returns the runs by position, and of each
    chunk in use what it says in diagnostics.
    """
    placed, shortest, used = sorted(chosen, key=_by_target), max(shortest, LEAST_PIECE), list[dict[str, Any]]()
    sized = [(chunk.reusable_tokens, chunk) for chunk in chunks]
    large = [(-tokens, *_entry(chunk.runs[0]), chunk) for tokens, chunk in sized if tokens >= min_span]
    for *_, chunk in sorted(large, key=lambda each: each[:-1]):
        if placed and is_over():
            break
        free, held = _free_and_held(chunk, placed, begin, end)
        free = [part for part in free if part.length >= shortest]
        tokens = held + sum(part.length for part in free)
        if tokens < min_span:
            continue
        used.append(chunk.explained(tokens))
        for part in free:
            insort(placed, part, key=_by_target)
    return placed, used


def _chains(runs: list[Run]) -> list[list[Run]]:
    """Runs of one donor, each appended to the chain that it continues best."""
    if len(runs) == 1:
        return [runs]
    chains: list[list[Run]] = []
    still_open: deque[list[Run]] = deque(maxlen=_OPEN_CHUNKS)
    for run in sorted(runs, key=lambda run: (run.target_start, run.length, run.donor_start)):
        best, least = None, (MAX_GAP + MAX_OVERLAP + 1, 0)
        for chain in still_open:
            last = chain[-1]
            in_prompt = run.target_start - last.target_start - last.length
            in_donor = run.donor_start - last.donor_start - last.length
            if not -MAX_OVERLAP <= in_prompt <= MAX_GAP or not -MAX_OVERLAP <= in_donor <= MAX_GAP:
                continue
            distance = (abs(in_prompt - in_donor), in_prompt)
            if distance < least and in_prompt + run.length > 0 and run.donor_start > last.donor_start:
                best, least = chain, distance
        if best is None:
            chains.append(best := [])
        else:
            still_open.remove(best)
        best.append(run)
        still_open.append(best)
    return chains


def _pieces(chain: list[Run], begin: int, end: int, margin: int) -> tuple[Run, ...]:
    pieces, equal_from = [], chain[0].target_start
    for run in chain:
        # Where two runs overlap, the difference between them ends where the first does.
        behind = max(run.target_start, equal_from)
        piece = run.within(max(begin, behind + (margin if run is not chain[0] else 0)), end)
        if piece is not None:
            pieces.append(piece)
        equal_from = run.target_end
    return tuple(pieces)


def _free_and_held(chunk: FuzzyChunk, placed: list[Run], begin: int, end: int) -> tuple[list[Run], int]:
    """The parts of a chunk's pieces in [begin, end) that `placed` (sorted, disjoint) leaves free, and how many of the
    chunk's tokens `placed` holds."""
    # An exact run may hold tokens of the chunk before `begin`.
    at = bisect_right(placed, chunk.runs[0].target_start, key=lambda run: run.target_end)
    free: list[Run] = []
    held = 0
    for piece in chunk.pieces:
        piece_end = piece.target_end
        position, stop = max(piece.target_start, begin), min(piece_end, end)
        while at < len(placed) and placed[at].target_end <= piece.target_start:
            at += 1
        for index in range(at, len(placed)):
            other = placed[index]
            if other.target_start >= piece_end:
                break
            if (part := piece.within(position, min(other.target_start, stop))) is not None:
                free.append(part)
            if _continues(piece, other):
                held += min(piece_end, other.target_end) - max(piece.target_start, other.target_start)
            position = max(position, other.target_end)
        if (part := piece.within(position, stop)) is not None:
            free.append(part)
    return free, held


def _continues(piece: Run, other: Run) -> bool:
    """Whether both have the same donor and the same shift."""
    same_shift = piece.donor_start - piece.target_start == other.donor_start - other.target_start
    return same_shift and piece.donor_id == other.donor_id


def _by_target(run: Run) -> int:
    return run.target_start


def _entry(run: Run) -> tuple[str, int, int]:
    return (run.donor_id, run.target_start, run.donor_start)
