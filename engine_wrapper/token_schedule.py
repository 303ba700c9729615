"""Which tokens one request computes in one iteration, and for how many layers each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from engine_wrapper.deviation_check import Budget, PendingCheck, SpanChoice, closed, sample_of, stretches
from semblend_trt.errors import PlanError
from semblend_trt.plan import PlanKind, SemanticKvPlan
from semblend_trt.transfer.load import block_vector

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from semblend_trt.plan import CheckEvidence


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """What the executor schedules of one request in one iteration, from position `begin` on. `block_ids` are all blocks
    of the request so far. Only a request's first slice has a plan, which it executes."""

    request_id: int
    begin: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    plan: SemanticKvPlan | None = None

    @property
    def end(self) -> int:
        return self.begin + len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceWork:
    """The rows of one request that enter layer 0, and how many layers compute each.

    `token_ids`, `positions`: int64 [rows], positions rising. `drops_at`: int64 [rows], how many of the lowest layers
    compute the row. `outputs`: how many of the last rows need an output. `block_ids`: int64, on the host. `pending` is
    set until its check has decided."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    drops_at: npt.NDArray[np.int64]
    outputs: int
    block_ids: torch.Tensor
    pending: PendingCheck | None = None

    def active(self, layer: int) -> npt.NDArray[np.bool_]:
        """Return the rows that `layer` computes, bool [rows]."""
        return self.drops_at > layer

    def together(self, num_layers: int) -> range:
        """Return the rows that stay in one forward: from the first to the last that is compared, or leaves early."""
        found = np.flatnonzero(self.drops_at < num_layers)
        if self.pending is not None:
            found = np.concatenate([found, self.pending.checked])
        return range(int(found.min()), int(found.max()) + 1) if len(found) else range(0)

    def part(self, start: int, stop: int, outputs: int) -> SequenceWork:
        """Return the rows start..stop-1, of which the last `outputs` need an output."""
        pending = None if self.pending is None else self.pending.within(start, stop)
        return replace(self._of(slice(start, stop)), outputs=outputs, pending=pending)

    def lowest_rows(self, num_layers: int) -> SequenceWork:
        """Return the rows up to the last that is compared, or leaves early, without outputs."""
        return self.part(0, self.together(num_layers).stop, 0)

    def above(self, layer: int, num_layers: int) -> SequenceWork:
        """Return the rows that are computed above `layer`, or in the last layer. The check must have decided."""
        assert self.pending is None
        return self._of(self.active(min(layer + 1, num_layers - 1)))

    def sampled_tokens(self) -> npt.NDArray[np.int64]:
        """Return the checked tokens that the check's sample compares; none without a sample."""
        pending = self.pending
        if pending is None or not pending.check.sample_every:
            return np.empty(0, dtype=np.int64)
        check = pending.check
        return sample_of(pending.lengths, check.sample_every, check.window_tokens, pending.plan.execution.sample_seed)

    def if_all_is_kept(self) -> SequenceWork:
        """Return the work that is left if the check keeps every token; its rows enter layer 0."""
        assert self.pending is not None
        return replace(self._of(self._unchecked()), pending=None)

    def sample(self, compared: npt.NDArray[np.int64]) -> SequenceWork:
        """Return the rows of a sample's forward: the checked ones in `compared`, and all others before their last."""
        assert self.pending is not None
        own, stays = self.pending.checked[compared], self._unchecked()
        stays[own] = True
        stays[own[-1] + 1 :] = False
        pending = replace(self.pending, rows=(), sampled=np.searchsorted(np.flatnonzero(stays), own))
        return replace(self._of(stays), outputs=0, pending=pending)

    def after_sample(
        self, compared: npt.NDArray[np.int64], deviations: npt.NDArray[np.float32]
    ) -> tuple[SequenceWork, CheckEvidence | None]:
        """Return the work that is left once the sample found these deviations; its rows enter layer 0 again. Windows
        that passed have no rows any more. If nothing is left to decide, the evidence is known. If a share of the tokens
        has to be computed, `weighed` comes next."""
        assert self.pending is not None
        suspects, judged = self.pending.judge(compared, deviations)
        if judged.share is None:
            choice = SpanChoice(np.ones(len(suspects), dtype=bool), is_dropped=True, largest_kept=0.0)
            return replace(self, pending=None), judged.evidence(choice)
        if not suspects.any():
            nothing = SpanChoice(np.zeros(0, dtype=bool), is_dropped=False, largest_kept=0.0)
            return self.if_all_is_kept(), judged.evidence(nothing)
        stays, parts = self._unchecked(), list(stretches(self.pending.rows, suspects))
        for part in parts:
            stays[part.start : part.stop] = True
        firsts = [int(np.count_nonzero(stays[: part.start])) for part in parts]
        rows = tuple(range(first, first + len(part)) for first, part in zip(firsts, parts, strict=True))
        work = replace(self._of(stays), pending=replace(judged, rows=rows))
        return (work, None) if judged.share else work._decided_by_sample()

    def weighed(self, attention: npt.NDArray[np.float32]) -> tuple[SequenceWork, CheckEvidence | None]:
        """Return the work whose budget chooses by `attention`, float32, of each position from 0 on. If no more is
        compared, the evidence is known."""
        pending = self.pending
        assert pending is not None
        assert pending.share is not None
        budget = Budget(pending.share, attention[self.positions[pending.checked]])
        return replace(self, pending=replace(pending, budget=budget))._decided_by_sample()

    def _decided_by_sample(self) -> tuple[SequenceWork, CheckEvidence | None]:
        """Return the work as it is if more is compared; else without the rows that keep the donor's KV, and the check's
        evidence."""
        pending = self.pending
        assert pending is not None
        if pending.check.compares_all:
            return self, None
        assert pending.of_rows is not None
        work, evidence = self.decide(pending.of_rows)
        stays = self.active(0)
        stays[pending.checked] = work.drops_at[pending.checked] > pending.check.layer
        return work._of(stays), evidence

    def decide(self, deviations: npt.NDArray[np.float32]) -> tuple[SequenceWork, CheckEvidence]:
        """Return the work after its check found these deviations, and the check's evidence."""
        pending = self.pending
        assert pending is not None
        choice = pending.choose(deviations, self.positions)
        drops_at = self.drops_at.copy()
        kept = pending.checked[~choice.computed]
        drops_at[kept] = max(pending.check.layer, pending.plan.execution.recompute_boundary_layer)
        return replace(self, drops_at=drops_at, pending=None), pending.evidence(choice)

    def _unchecked(self) -> npt.NDArray[np.bool_]:
        assert self.pending is not None
        stays = np.ones(len(self.positions), dtype=bool)
        for rows in self.pending.rows:
            stays[rows.start : rows.stop] = False
        return stays

    def _of(self, rows: npt.NDArray[np.bool_] | slice) -> SequenceWork:
        own = rows if isinstance(rows, slice) else np.flatnonzero(rows)  # once for all three
        return replace(self, token_ids=self.token_ids[own], positions=self.positions[own], drops_at=self.drops_at[own])


def works_of(slices: Sequence[SequenceSlice], num_layers: int, keys_per_row: int = 0) -> list[SequenceWork]:
    """Return what each slice computes. Raises PlanError if a plan does not fit its slice.

    Attention may read all keys before a run of neighbouring rows once for the run. Reading `keys_per_row` keys may take
    as long as computing one more row. A gap between two runs is computed if that is cheaper; 0 skips all."""
    return [_work_of(sequence, num_layers, keys_per_row) for sequence in slices]


def _work_of(sequence: SequenceSlice, num_layers: int, keys_per_row: int) -> SequenceWork:
    own_tokens = np.array(sequence.token_ids, dtype=np.int64)
    own = SequenceWork(
        own_tokens,
        np.arange(sequence.begin, sequence.end, dtype=np.int64),
        np.full(len(own_tokens), num_layers, dtype=np.int64),
        len(own_tokens),
        block_vector(sequence.block_ids),
    )
    plan = sequence.plan
    # A discovery-only plan reports spans, but promises and moves nothing.
    if plan is None or plan.kind is PlanKind.DISCOVERY_ONLY:
        return own
    if sequence.begin != plan.prefix_end:
        raise PlanError(
            "slice_not_at_prefix",
            f"request {plan.request_id}: the slice begins at {sequence.begin}, but the plan promised the positions up "
            f"to {plan.prefix_end}; a plan is executed by the first slice of its request",
        )
    if tuple(plan.prompt_token_ids[sequence.begin : sequence.end].tolist()) != sequence.token_ids:
        raise PlanError(
            "plan_of_another_prompt",
            f"request {plan.request_id}: the scheduled tokens {sequence.begin}..{sequence.end - 1} differ from the "
            "prompt that the plan was made for",
        )
    return _with_promise(own, plan, num_layers, keys_per_row)


def _with_promise(own: SequenceWork, plan: SemanticKvPlan, num_layers: int, keys_per_row: int) -> SequenceWork:
    """Return the rows that the plan promised and that some layer computes, then `own`."""
    begin, end, execution, head = plan.num_computed_tokens, plan.prefix_end, plan.execution, plan.execution.head_tokens
    drops_at = np.full(end - begin, num_layers, dtype=np.int16)
    for span in plan.spans:
        placed = drops_at[span.target_start - begin : span.target_end - begin]
        if span.exact:
            placed[:] = -1
        elif not plan.is_checked:
            placed[head:] = execution.recompute_boundary_layer
    checked = [range(span.target_start + head, span.target_end) for span in plan.spans if not span.exact]
    if keys_per_row and not plan.is_checked and min(map(len, checked), default=end) * keys_per_row <= end:
        # No gap is shorter than a span without its head, and exact KV is in none; `own` begins after the last one.
        rows = np.flatnonzero(drops_at >= 0)
        computed, positions = np.append(drops_at[rows] == num_layers, True), begin + np.append(rows, end - begin)
        stays = closed(computed, positions, keys_per_row)
        drops_at[rows[stays[:-1]]] = num_layers
    entering = drops_at > 0
    positions = begin + np.flatnonzero(entering)
    starts = [(int(np.count_nonzero(entering[: each.start - begin])), len(each)) for each in checked if each]
    compared = tuple(range(start, start + length) for start, length in starts)
    return replace(
        own,
        token_ids=np.concatenate([plan.prompt_token_ids[positions], own.token_ids]),
        positions=np.concatenate([positions, own.positions]),
        drops_at=np.concatenate([drops_at[entering], own.drops_at]),
        pending=PendingCheck(plan, compared, keys_per_row) if plan.is_checked else None,
    )
