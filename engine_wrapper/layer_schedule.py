"""Which positions are computed in which layer, for every request of one iteration.

Active sets only shrink: a row's input to a layer is its output of the layer below, so a row that was dropped cannot
come back. A schedule is therefore the rows of layer 0 and, at a few layers, which of them go on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.sparse_prefill import SequenceRows
from kernels.sparse_prefill.rows import to_device
from semblend_trt.errors import PlanError
from semblend_trt.plan import PlanKind, SemanticKvPlan

if TYPE_CHECKING:
    from collections.abc import Sequence


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
class LayerSchedule:
    """One forward. `token_ids` and `positions`: int64 [rows of stages[0]], the rows that enter layer 0.

    `output_rows`: int64 [executor rows], into the last stage's rows, in the order in which the executor scheduled them.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    stages: tuple[Stage, ...]
    output_rows: torch.Tensor

    def to(self, device: torch.device | str) -> LayerSchedule:
        """The same schedule with its tensors on `device`, copied without waiting."""
        token_ids, positions, output_rows = (
            to_device(tensor, device) for tensor in (self.token_ids, self.positions, self.output_rows)
        )
        return LayerSchedule(token_ids, positions, tuple(stage.to(device) for stage in self.stages), output_rows)

    def last_rows(self, lengths: Sequence[int]) -> LayerSchedule:
        """The same schedule with the last output row of each slice only; `lengths` are the slices' tokens."""
        return replace(self, output_rows=self.output_rows[np.cumsum(lengths) - 1])


@dataclass(frozen=True, slots=True)
class _SequenceWork:
    """One slice's rows: all of them below layer `narrows_at`, those marked in `stays` from it on (None: all)."""

    token_ids: np.ndarray
    positions: np.ndarray
    narrows_at: int
    stays: np.ndarray | None


def build_schedule(
    slices: Sequence[SequenceSlice], num_layers: int, device: torch.device | str = "cpu"
) -> LayerSchedule:
    """Builds the schedule of one iteration, its index tensors on `device`.

    A slice without a plan computes its own positions in every layer. With a plan, the layers below the recompute
    boundary run on all positions from `num_computed_tokens` on, and the others on holes and slice only.

    Raises PlanError when there is nothing to run, when a slice is empty, or when a plan does not fit the model or its
    slice.
    """
    if not slices:
        raise PlanError("no_slices", "an iteration without a slice has nothing to run")
    works = [_work_of(piece, num_layers) for piece in slices]
    blocks = [torch.tensor(piece.block_ids, dtype=torch.int64) for piece in slices]
    active = [work.positions for work in works]
    stages = [Stage(0, None, _sequence_rows(active, blocks, device))]
    for layer in sorted({work.narrows_at for work in works if work.stays is not None}):
        stays = [
            work.stays if work.stays is not None and work.narrows_at == layer else np.ones(len(rows), dtype=bool)
            for work, rows in zip(works, active, strict=True)
        ]
        active = [rows[kept] for rows, kept in zip(active, stays, strict=True)]
        keep = np.flatnonzero(np.concatenate(stays))
        stages.append(Stage(layer, _to_device(keep, device), _sequence_rows(active, blocks, device)))
    return LayerSchedule(
        token_ids=_to_device(np.concatenate([work.token_ids for work in works]), device),
        positions=_to_device(np.concatenate([work.positions for work in works]), device),
        stages=tuple(stages),
        output_rows=_to_device(_output_rows(slices, active), device),
    )


def _work_of(piece: SequenceSlice, num_layers: int) -> _SequenceWork:
    if not piece.token_ids:
        raise PlanError("slice_empty", f"request {piece.request_id}: a slice at {piece.begin} has no tokens")
    own_tokens = np.array(piece.token_ids, dtype=np.int64)
    own_positions = np.arange(piece.begin, piece.end, dtype=np.int64)
    plan = piece.plan
    # A discovery-only plan promises nothing and moves nothing, whatever spans it reports.
    if plan is None or plan.kind is PlanKind.DISCOVERY_ONLY:
        return _SequenceWork(own_tokens, own_positions, num_layers, None)
    _check_plan(plan, piece, num_layers)
    promised = np.arange(plan.num_computed_tokens, piece.begin, dtype=np.int64)
    in_hole = np.zeros(len(promised), dtype=bool)
    for hole in plan.holes:
        in_hole[hole.start - plan.num_computed_tokens : hole.stop - plan.num_computed_tokens] = True
    boundary = plan.execution.recompute_boundary_layer
    computed = np.asarray(plan.prompt_token_ids)[plan.num_computed_tokens : piece.begin]
    if boundary == 0:
        promised, computed, in_hole = promised[in_hole], computed[in_hole], in_hole[in_hole]
    narrows = not in_hole.all() and boundary < num_layers
    return _SequenceWork(
        token_ids=np.concatenate([computed.astype(np.int64), own_tokens]),
        positions=np.concatenate([promised, own_positions]),
        narrows_at=boundary if narrows else num_layers,
        stays=np.concatenate([in_hole, np.ones(len(own_tokens), dtype=bool)]) if narrows else None,
    )


def _check_plan(plan: SemanticKvPlan, piece: SequenceSlice, num_layers: int) -> None:
    if plan.request_id != piece.request_id:
        raise PlanError(
            "plan_of_another_request", f"the plan of request {plan.request_id} came with request {piece.request_id}"
        )
    if plan.execution.num_layers != num_layers:
        raise PlanError(
            "plan_of_another_model",
            f"request {plan.request_id}: the plan was made for {plan.execution.num_layers} layers; "
            f"this model has {num_layers}",
        )
    if piece.begin != plan.prefix_end:
        raise PlanError(
            "slice_not_at_prefix",
            f"request {plan.request_id}: the slice begins at {piece.begin}, but the plan promised the positions up to "
            f"{plan.prefix_end}; a plan is executed by the first slice of its request",
        )
    if plan.prompt_token_ids[piece.begin : piece.end] != piece.token_ids:
        raise PlanError(
            "plan_of_another_prompt",
            f"request {plan.request_id}: the scheduled tokens {piece.begin}..{piece.end - 1} differ from the prompt "
            "that the plan was made for",
        )


def _sequence_rows(
    active: Sequence[np.ndarray], blocks: Sequence[torch.Tensor], device: torch.device | str
) -> tuple[SequenceRows, ...]:
    first_rows = np.cumsum([0, *(len(positions) for positions in active)])
    return tuple(
        SequenceRows(int(first_row), torch.from_numpy(positions), block_ids).to(device)
        for first_row, positions, block_ids in zip(first_rows, active, blocks, strict=False)
    )


def _output_rows(slices: Sequence[SequenceSlice], active: Sequence[np.ndarray]) -> np.ndarray:
    """The slice's own positions are the last rows of its sequence."""
    ends = np.cumsum([len(positions) for positions in active])
    return np.concatenate([np.arange(end - len(piece.token_ids), end) for end, piece in zip(ends, slices, strict=True)])


def _to_device(indices: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(indices.astype(np.int64, copy=False)).to(device, non_blocking=True)
