"""Course: which rows are active in which layers, as far as that is known, and the checkpoint at which it ends.

Active sets only shrink: a row's input to a layer is its output of the layer below, so a row that was dropped cannot
come back. Where a check decides what is dropped, the course ends; what it decides begins the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.deviation import FreshRows, Move, deviation, relative, squares
from kernels.layout import KvGeometry, PagedKv
from kernels.rope import RopeRotation
from kernels.sparse_prefill import SequenceRows
from kernels.sparse_prefill.rows import to_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    from typing_extensions import Self

    from engine_wrapper.sequence_work import SequenceWork
    from semblend_trt.plan import CheckEvidence
    from semblend_trt.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers from `first_layer` to the next stage's: the same rows are active in all of them.

    `keep`: int64 [rows], sorted, the rows of the stage before that stay active; None keeps all of them. `sequences`
    cover the active rows in order.
    """

    first_layer: int
    keep: torch.Tensor | None
    sequences: tuple[SequenceRows, ...]

    @property
    def num_rows(self) -> int:
        """Active rows."""
        return sum(sequence.count for sequence in self.sequences)

    def to(self, device: torch.device | str) -> Stage:
        """The same stage with its tensors on `device`, copied without waiting."""
        keep = None if self.keep is None else to_device(self.keep, device)
        return Stage(self.first_layer, keep, tuple(sequence.to(device) for sequence in self.sequences))


@dataclass(frozen=True, slots=True)
class Course:
    """The stages up to the next checkpoint, or to the last layer where there is none.

    `output_rows`: int64 [executor rows], into the last stage's rows, in the order in which the executor scheduled them.
    """

    stages: tuple[Stage, ...]
    output_rows: torch.Tensor
    checkpoint: Checkpoint | None

    def layers_of_stages(self, num_layers: int) -> Iterator[tuple[Stage, range]]:
        """Each stage with its layers below the checkpoint; the last stage may have none of them."""
        end = num_layers if self.checkpoint is None else self.checkpoint.layer
        bounds = [*(stage.first_layer for stage in self.stages), end]
        for stage, (first, last) in zip(self.stages, pairwise(bounds), strict=True):
            yield stage, range(first, last)

    def to(self, device: torch.device | str) -> Self:
        """The same course with its tensors on `device`, copied without waiting."""
        stages = tuple(stage.to(device) for stage in self.stages)
        return replace(self, stages=stages, output_rows=to_device(self.output_rows, device))


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The layer in which fresh K and V of some rows are compared with what lies in the pool at their positions.

    All active rows have K and V of that layer computed and written. Which of them go on to its attention and to the
    layers above is decided once for all requests whose check it is, from one small read off the device. `works` are
    the batch's.
    """

    layer: int
    num_layers: int
    works: tuple[SequenceWork, ...]

    def deviations(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        pool: torch.Tensor,
        geometry: KvGeometry,
        ranks: Ranks | None = None,
    ) -> torch.Tensor:
        """Deviation of each checked token, float32 [tokens], on the pool's device; nothing waits for it.

        `keys`, `values`: [active rows, kv_heads, head_dim], rotated, not in the pool yet; any strides. Where `ranks`
        share the KV heads it is the deviation over the heads of all, with the same bits on each, so that every rank
        decides alike. Raises ValueError when a position lies beyond its request's blocks.
        """
        moves = []
        for work, first_row, active in self._places():
            if work.open_check is None or work.open_check.check.layer != self.layer:
                continue
            donor = PagedKv(pool, work.block_ids, geometry)
            places = first_row + np.cumsum(active) - active
            moves += [
                Move(donor, int(work.positions[rows.start]), int(places[rows.start]), len(rows), turn=0)
                for rows in work.open_check.rows
            ]
        if not moves:
            return torch.empty(0, dtype=torch.float32, device=pool.device)
        # What lies in the pool was rotated when it was placed there: nothing turns.
        planes = geometry.head_dim // 2
        still = RopeRotation((0.0,) * planes, 2 * planes)
        fresh = FreshRows(keys, values)
        if ranks is None or ranks.size == 1:
            return deviation(moves, fresh, self.layer, still).amax(0)
        return relative(ranks.total(squares(moves, fresh, self.layer, still))).amax(0)

    def decide(self, deviations: torch.Tensor) -> tuple[Course, tuple[CheckEvidence, ...]]:
        """The course from this layer on, its tensors on the host, and what the checks leave as evidence.

        Waits for `deviations` of this checkpoint. The first stage's `keep` are the active rows that go on.
        """
        read = deviations.cpu().numpy()
        works, evidence = [], []
        for work in self.works:
            if work.open_check is not None and work.open_check.check.layer == self.layer:
                own, read = np.split(read, [work.open_check.num_tokens])
                work, found = work.decide(own)
                evidence.append(found)
            works.append(work)
        before = [work.active(self.layer) for work in self.works]
        return course_of(works, self.layer, self.num_layers, before), tuple(evidence)

    def last_rows(self) -> Checkpoint:
        """The same checkpoint, whose courses put out the last row of each request only."""
        return replace(self, works=tuple(replace(work, outputs=1) for work in self.works))

    def _places(self) -> Iterator[tuple[SequenceWork, int, npt.NDArray[np.bool_]]]:
        """Each work, the first of its active rows in the batch, and which of its rows are active."""
        first_row = 0
        for work in self.works:
            active = work.active(self.layer)
            yield work, first_row, active
            first_row += int(np.count_nonzero(active))


def course_of(
    works: Sequence[SequenceWork],
    first_layer: int,
    num_layers: int,
    before: Sequence[npt.NDArray[np.bool_]] | None = None,
) -> Course:
    """The course from `first_layer` on, its tensors on the host. `before`: of each work, which rows were active up to
    there; without it, at the start of a forward, all."""
    checks = [work.open_check.check.layer for work in works if work.open_check is not None]
    end = min(checks, default=num_layers - 1)
    drops = {int(layer) for work in works for layer in np.unique(work.drops_at)}
    before = before or [np.ones(len(work.positions), dtype=bool) for work in works]
    stages = []
    for layer in (first_layer, *sorted(layer for layer in drops if first_layer < layer <= end)):
        active = [work.active(layer) for work in works]
        stays = np.concatenate([now[was] for now, was in zip(active, before, strict=True)])
        keep = None if stays.all() else torch.from_numpy(np.flatnonzero(stays))
        positions = [work.positions[rows] for work, rows in zip(works, active, strict=True)]
        stages.append(Stage(layer, keep, _sequence_rows(positions, works)))
        before = active
    ends = np.cumsum([np.count_nonzero(rows) for rows in before])
    outputs = [np.arange(end - work.outputs, end) for end, work in zip(ends, works, strict=True)]
    checkpoint = Checkpoint(min(checks), num_layers, tuple(works)) if checks else None
    return Course(tuple(stages), torch.from_numpy(np.concatenate(outputs)), checkpoint)


def lowest_course(work: SequenceWork, layer: int, num_layers: int) -> Course:
    """All rows of `work` up to K and V of `layer`, where those that its check names are compared; it puts nothing out,
    and its tensors are on the host."""
    stage = Stage(0, None, _sequence_rows([work.positions], [work]))
    return Course((stage,), torch.empty(0, dtype=torch.int64), Checkpoint(layer, num_layers, (work,)))


def _sequence_rows(
    positions: Sequence[npt.NDArray[np.int64]], works: Sequence[SequenceWork]
) -> tuple[SequenceRows, ...]:
    first_rows = np.cumsum([0, *map(len, positions)])
    return tuple(
        SequenceRows(int(first_row), torch.from_numpy(own), work.block_ids)
        for first_row, own, work in zip(first_rows, positions, works, strict=False)
    )
