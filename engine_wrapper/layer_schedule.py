"""Which positions are computed in which layer, for every request of one iteration: the rows of layer 0 and a course."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_wrapper.course import Course, Stage, course_of, lowest_course
from engine_wrapper.sequence_work import work_of
from kernels.sparse_prefill.rows import to_device
from semblend_trt.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_wrapper.sequence_work import SequenceWork
    from semblend_trt.plan import SemanticKvPlan

__all__ = [
    "LayerSchedule",
    "SequenceSlice",
    "Stage",
    "build_schedule",
    "lowest_schedule",
    "schedule_of",
    "works_of",
]


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """What the executor schedules of one request in one iteration: positions begin .. begin + len(token_ids) - 1.

    `block_ids` are all blocks of the request so far. `plan` is executed by this slice, so only the first slice of a
    request carries one.
    """

    request_id: int
    begin: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    plan: SemanticKvPlan | None = None

    @property
    def end(self) -> int:
        return self.begin + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class LayerSchedule(Course):
    """One forward, up to its first checkpoint where it has one.

    `token_ids` and `positions`: int64 [rows of stages[0]], the rows that enter layer 0.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor

    def to(self, device: torch.device | str) -> LayerSchedule:
        """The same schedule with its tensors on `device`, copied without waiting."""
        token_ids, positions = to_device(self.token_ids, device), to_device(self.positions, device)
        return replace(Course.to(self, device), token_ids=token_ids, positions=positions)

    def last_rows(self, lengths: Sequence[int]) -> LayerSchedule:
        """The same schedule with the last output row of each slice only; `lengths` are the slices' tokens."""
        checkpoint = None if self.checkpoint is None else self.checkpoint.last_rows()
        return replace(self, output_rows=self.output_rows[np.cumsum(lengths) - 1], checkpoint=checkpoint)


def build_schedule(
    slices: Sequence[SequenceSlice], num_layers: int, device: torch.device | str = "cpu"
) -> LayerSchedule:
    """Builds the schedule of one iteration, its index tensors on `device`.

    A slice without a plan computes its own positions in every layer. With a plan, the layers below the recompute
    boundary and below the check's layer run on all positions from `num_computed_tokens` on, and the others on holes,
    heads of spans, slice and what the check finds. Exact spans are computed in no layer.

    Raises PlanError when there is nothing to run, when a slice is empty, or when a plan does not fit the model or its
    slice.
    """
    schedule = schedule_of(works_of(slices, num_layers), num_layers)
    return schedule if torch.device(device).type == "cpu" else schedule.to(device)


def works_of(slices: Sequence[SequenceSlice], num_layers: int, keys_per_row: int = 0) -> list[SequenceWork]:
    """What each slice computes. Raises PlanError as `build_schedule` does.

    For attention that reads all keys before a run of neighbouring rows once for the run, `keys_per_row` of them in the
    time of one more row: a gap between two runs whose rows are cheaper computed than skipped is computed. 0: none is.
    """
    if not slices:
        raise PlanError("no_slices", "an iteration without a slice has nothing to run")
    return [work_of(piece, num_layers, keys_per_row) for piece in slices]


def schedule_of(works: Sequence[SequenceWork], num_layers: int) -> LayerSchedule:
    """The schedule of one forward over `works`, its index tensors on the host."""
    return _entering(course_of(works, 0, num_layers), works)


def lowest_schedule(work: SequenceWork, layer: int, num_layers: int) -> LayerSchedule:
    """The schedule of `lowest_course`, its index tensors on the host."""
    return _entering(lowest_course(work, layer, num_layers), [work])


def _entering(course: Course, works: Sequence[SequenceWork]) -> LayerSchedule:
    return LayerSchedule(
        course.stages,
        course.output_rows,
        course.checkpoint,
        token_ids=torch.from_numpy(np.concatenate([work.token_ids for work in works])),
        positions=torch.from_numpy(np.concatenate([work.positions for work in works])),
    )
