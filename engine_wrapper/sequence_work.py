"""What one request computes in one iteration: its rows, and how many layers of each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_wrapper.span_choice import choose, closed
from semblend_trt.errors import PlanError
from semblend_trt.plan import CheckEvidence, PlanKind, SemanticKvPlan

if TYPE_CHECKING:
    import numpy.typing as npt

    from engine_wrapper.layer_schedule import SequenceSlice
    from engine_wrapper.span_choice import SpanChoice
    from semblend_trt.plan import SpanCheck


@dataclass(frozen=True, slots=True, eq=False)
class OpenCheck:
    """A plan whose check has not decided yet. `rows`: of each checked span, the rows of the request that are compared;
    until then all of them are computed. `keys_per_row` as for `works_of`."""

    plan: SemanticKvPlan
    check: SpanCheck
    rows: tuple[range, ...]
    keys_per_row: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def checked(self) -> npt.NDArray[np.int64]:
        """The rows that are compared, one span after another, int64 [num_tokens]."""
        return np.concatenate([np.arange(rows.start, rows.stop, dtype=np.int64) for rows in self.rows])

    def within(self, start: int, stop: int) -> OpenCheck | None:
        """What is compared of the rows start..stop-1, counted from the first of them; None for nothing."""
        cut = (range(max(rows.start, start) - start, min(rows.stop, stop) - start) for rows in self.rows)
        kept = tuple(rows for rows in cut if rows)
        return replace(self, rows=kept) if kept else None

    def choose(self, deviations: npt.NDArray[np.float32], positions: npt.NDArray[np.int64]) -> SpanChoice:
        """Decides from the deviations of the checked tokens, float32 [num_tokens]. `positions`: of the request's rows,
        int64 [rows]."""

        def widened(computed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
            checked, stays = self.checked, np.ones(len(positions), dtype=bool)
            stays[checked] = computed
            found: npt.NDArray[np.bool_] = closed(stays, positions, self.keys_per_row)[checked]
            return found

        lengths = [len(rows) for rows in self.rows]
        return choose(
            self.check,
            deviations,
            lengths,
            self._exact_tokens,
            self.plan.matched_tokens,
            widened if self.keys_per_row else None,
        )

    def evidence(self, choice: SpanChoice) -> CheckEvidence:
        offered, reused = self.plan.reused_tokens, self._exact_tokens + choice.kept_tokens
        return CheckEvidence(
            request_id=self.plan.request_id,
            offered_tokens=offered,
            checked_tokens=self.num_tokens,
            reused_tokens=reused,
            recomputed_tokens=offered - reused,
            largest_kept=choice.largest_kept,
            is_dropped=choice.is_dropped,
        )

    @property
    def _exact_tokens(self) -> int:
        return sum(span.length for span in self.plan.spans if span.exact)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceWork:
    """The rows of one request that enter layer 0, and how far up each one goes.

    `token_ids`, `positions`: int64 [rows], positions rising. `drops_at`: int64 [rows]; the layers below are computed,
    the number of layers means all. `outputs`: rows at the end whose output is asked for. `block_ids`: int64, the
    request's blocks, on the host. `open_check` is set until its check has decided.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    drops_at: npt.NDArray[np.int64]
    outputs: int
    block_ids: torch.Tensor
    open_check: OpenCheck | None = None

    def active(self, layer: int) -> npt.NDArray[np.bool_]:
        """Which rows are computed in `layer`, bool [rows]."""
        return self.drops_at > layer

    def together(self, num_layers: int) -> range:
        """The rows from the first to the last of those that are compared, or that leave before the last layer."""
        found = np.flatnonzero(self.drops_at < num_layers)
        if self.open_check is not None:
            found = np.concatenate([found, *(np.arange(rows.start, rows.stop) for rows in self.open_check.rows)])
        return range(int(found.min()), int(found.max()) + 1) if len(found) else range(0)

    def part(self, start: int, stop: int, outputs: int) -> SequenceWork:
        """The rows start..stop-1, of which the output of the last `outputs` is asked for."""
        return replace(
            self,
            token_ids=self.token_ids[start:stop],
            positions=self.positions[start:stop],
            drops_at=self.drops_at[start:stop],
            outputs=outputs,
            open_check=None if self.open_check is None else self.open_check.within(start, stop),
        )

    def beyond(self, layer: int, num_layers: int) -> SequenceWork:
        """The rows that go on above `layer`, or to the end. Only for a work whose check has decided."""
        assert self.open_check is None
        stays = self.active(min(layer + 1, num_layers - 1))
        return replace(
            self, token_ids=self.token_ids[stays], positions=self.positions[stays], drops_at=self.drops_at[stays]
        )

    def decide(self, deviations: npt.NDArray[np.float32]) -> tuple[SequenceWork, CheckEvidence]:
        """The work after its check, which found these deviations, and what it leaves as evidence."""
        pending = self.open_check
        assert pending is not None
        choice = pending.choose(deviations, self.positions)
        drops_at = self.drops_at.copy()
        kept = pending.checked[~choice.computed]
        drops_at[kept] = max(pending.check.layer, pending.plan.execution.recompute_boundary_layer)
        return replace(self, drops_at=drops_at, open_check=None), pending.evidence(choice)


def work_of(piece: SequenceSlice, num_layers: int, keys_per_row: int = 0) -> SequenceWork:
    """The work of one slice; `keys_per_row` as for `works_of`.

    Raises PlanError when the slice is empty, or when its plan fits neither it nor the model.
    """
    if not piece.token_ids:
        raise PlanError("slice_empty", f"request {piece.request_id}: a slice at {piece.begin} has no tokens")
    own_tokens = np.array(piece.token_ids, dtype=np.int64)
    own = SequenceWork(
        own_tokens,
        np.arange(piece.begin, piece.end, dtype=np.int64),
        np.full(len(own_tokens), num_layers, dtype=np.int64),
        len(own_tokens),
        torch.tensor(piece.block_ids, dtype=torch.int64),
    )
    plan = piece.plan
    # A discovery-only plan promises nothing and moves nothing, whatever spans it reports.
    if plan is None or plan.kind is PlanKind.DISCOVERY_ONLY:
        return own
    _check_plan(plan, piece, num_layers)
    return _with_promise(own, plan, num_layers, keys_per_row)


def _with_promise(own: SequenceWork, plan: SemanticKvPlan, num_layers: int, keys_per_row: int) -> SequenceWork:
    """`own` behind the rows that the plan promised and that somebody has to compute."""
    begin, end, execution = plan.num_computed_tokens, plan.prefix_end, plan.execution
    drops_at = np.full(end - begin, num_layers, dtype=np.int64)
    for span in plan.spans:
        placed = drops_at[span.target_start - begin : span.target_end - begin]
        if span.exact:
            placed[:] = -1
        elif not plan.is_checked:
            placed[execution.head_tokens :] = execution.recompute_boundary_layer
    if keys_per_row and not plan.is_checked:
        # Exact KV is in no gap; `own` begins behind the last one.
        rows = np.flatnonzero(drops_at >= 0)
        computed, positions = np.append(drops_at[rows] == num_layers, True), begin + np.append(rows, end - begin)
        stays = closed(computed, positions, keys_per_row)
        drops_at[rows[stays[:-1]]] = num_layers
    entering = drops_at > 0
    positions = begin + np.flatnonzero(entering)
    # A long prompt costs a millisecond to convert, and few of its tokens may be needed.
    tokens = np.fromiter(map(plan.prompt_token_ids.__getitem__, positions.tolist()), np.int64, len(positions))
    return replace(
        own,
        token_ids=np.concatenate([tokens, own.token_ids]),
        positions=np.concatenate([positions, own.positions]),
        drops_at=np.concatenate([drops_at[entering], own.drops_at]),
        open_check=_open_check(plan, entering, keys_per_row),
    )


def _open_check(plan: SemanticKvPlan, entering: npt.NDArray[np.bool_], keys_per_row: int) -> OpenCheck | None:
    """`entering`: bool [promised tokens], those that have a row."""
    check, head = plan.execution.check, plan.execution.head_tokens
    if check is None or not plan.is_checked:
        return None
    # first_rows[i] counts the rows before the promised token i.
    first_rows: npt.NDArray[np.int64] = np.cumsum(entering) - entering
    starts = [
        (int(first_rows[span.target_start - plan.num_computed_tokens]), span.length)
        for span in plan.spans
        if not span.exact and span.length > head
    ]
    return OpenCheck(plan, check, tuple(range(start + head, start + length) for start, length in starts), keys_per_row)


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
