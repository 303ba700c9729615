"""Divides an iteration into forwards of bounded size: a plan may compute more tokens than the engine has scheduled.

Rows of one sequence are divided in the order of their positions, so that each portion attends to what those before it
have left in the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_wrapper.sequence_work import SequenceWork


@dataclass(slots=True)
class Portion:
    """What one forward runs.

    `owners`: of each of `works`, which work of the iteration it is a part of. `scheduled`: how many of its rows the
    engine has scheduled; at 0 its last row's output, which every work has, is nobody's.
    """

    works: list[SequenceWork] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    scheduled: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(len(work.positions) for work in self.works)

    def add(self, work: SequenceWork, owner: int, scheduled: int) -> None:
        self.works.append(work)
        self.owners.append(owner)
        self.scheduled.append(scheduled)


def portions(works: Sequence[SequenceWork], num_layers: int, max_rows: int | None) -> list[Portion]:
    """`works` in as few forwards as have at most `max_rows` rows each, None for one forward.

    Rows that are compared, or that leave before the last layer, stay together, with one row behind them: where they
    are more than `max_rows`, so is their forward. `engine_wrapper.lowest_layers` leaves none of which they are.
    """
    found = [Portion()]
    for owner, work in enumerate(works):
        rest: SequenceWork | None = work
        while rest is not None:
            room = len(rest.positions) if max_rows is None else max_rows - found[-1].num_rows
            end = _end(rest, num_layers, room)
            if end is None and found[-1].works:
                found.append(Portion())
                continue
            part, scheduled, rest = _divide(rest, end or len(rest.positions))
            found[-1].add(part, owner, scheduled)
    return found


def _end(work: SequenceWork, num_layers: int, room: int) -> int | None:
    """How many of the first rows of `work` go into `room` rows; None when it cannot be divided so."""
    if len(work.positions) <= room:
        return len(work.positions)
    together = work.together(num_layers)
    if not together or room > together.stop or room <= together.start:
        return room if room > 0 else None
    return together.start or None


def _divide(work: SequenceWork, end: int) -> tuple[SequenceWork, int, SequenceWork | None]:
    """The first `end` rows of `work`, how many of them were scheduled, and the other rows."""
    rows = len(work.positions)
    if end == rows:
        return work, work.outputs, None
    scheduled = max(0, end - (rows - work.outputs))
    return work.part(0, end, max(1, scheduled)), scheduled, work.part(end, rows, work.outputs - scheduled)
