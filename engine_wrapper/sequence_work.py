"""What one request computes in one iteration: its rows, how many layers of each, and the check that decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.errors import PlanError
from semblend_trt.plan import CheckEvidence, PlanKind, SemanticKvPlan
from semblend_trt.transfer.load import block_vector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt
    import torch

    from semblend_trt.plan import SpanCheck


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """What the executor schedules of one request in one iteration: positions begin .. begin + len(token_ids) - 1.

    `block_ids` are all blocks of the request so far. This slice executes `plan`, so only the first slice of a request
    has one.
    """

    request_id: int
    begin: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    plan: SemanticKvPlan | None = None

    @property
    def end(self) -> int:
        return self.begin + len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class SpanChoice:
    """What a SpanCheck decides from deviations alone.

    `computed`: bool [checked tokens], those that all layers above compute; the others keep the donor's KV.
    `is_dropped`: the plan saved too little, so every token is computed. `largest_kept`: the largest deviation of a
    token that keeps the donor's KV, 0.0 without one.
    """

    computed: npt.NDArray[np.bool_]
    is_dropped: bool
    largest_kept: float

    @property
    def kept_tokens(self) -> int:
        """Checked tokens that keep the donor's KV."""
        return int(self.computed.size - np.count_nonzero(self.computed))


def choose(
    check: SpanCheck,
    deviations: npt.NDArray[np.float32],
    lengths: Sequence[int],
    exact_tokens: int,
    promised: int,
    widened: Callable[[npt.NDArray[np.bool_]], npt.NDArray[np.bool_]] | None = None,
) -> SpanChoice:
    """Decides one plan. `deviations`: float32 [checked tokens], span after span; `lengths`: tokens of each span.

    `exact_tokens` of the `promised` tokens are saved in any case. A deviation that is not a number exceeds every
    threshold. `widened` adds tokens that are cheaper to compute than to skip to those computed, bool [checked tokens].
    """
    deviations = np.where(np.isnan(deviations), np.float32(np.inf), deviations)
    tokens = np.asarray(lengths, dtype=np.int64)
    deviating = _deviating(check, deviations)
    if check.window_threshold is not None:
        deviating |= _deviating_windows(deviations, windows_of(lengths, check.window_tokens), check.window_threshold)
    counts = np.add.reduceat(deviating, np.cumsum(tokens) - tokens, dtype=np.int64)
    computed = deviating | np.repeat(counts > check.max_span_share * tokens, tokens)
    if widened is not None:
        computed = widened(computed)
    saved = exact_tokens + computed.size - np.count_nonzero(computed)
    is_dropped = bool(saved == 0 or saved < check.min_saved_share * promised)
    if is_dropped:
        computed = np.ones_like(computed)
    return SpanChoice(computed, is_dropped, float(deviations[~computed].max(initial=0.0)))


def _deviating(check: SpanCheck, deviations: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    if check.threshold is not None:
        return deviations.astype(np.float64) > check.threshold
    assert check.largest_share is not None
    deviating = np.zeros(deviations.size, dtype=bool)
    # Of equal deviations the earlier token is computed: what follows depends on it.
    deviating[np.argsort(-deviations, kind="stable")[: round(check.largest_share * deviations.size)]] = True
    return deviating


def _deviating_windows(
    deviations: npt.NDArray[np.float32], window_of: npt.NDArray[np.int64], threshold: float
) -> npt.NDArray[np.bool_]:
    """Every token of the windows whose mean deviation is above the threshold. `window_of`: as `windows_of` returns."""
    starts = np.flatnonzero(np.diff(window_of, prepend=-1))
    sizes = np.diff(starts, append=deviations.size)
    above = np.add.reduceat(deviations, starts, dtype=np.float64) > threshold * sizes
    return np.repeat(above, sizes)


def sample_of(lengths: Sequence[int], every: int, window: int, seed: int) -> npt.NDArray[np.int64]:
    """Which of the checked tokens a sample compares, int64, ascending: see `SpanCheck`. `lengths`: of the spans;
    `window`: tokens of a window."""
    rng = np.random.default_rng(seed)
    found, first = [], 0
    for length in lengths:
        head = min(window, length)
        found += [first + np.arange(head), first + _one_of_each(head, length, every, rng)]
        first += length
    return np.concatenate(found)


def _one_of_each(begin: int, end: int, every: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """One number at random of each stratum of `every` from `begin` on; the last stratum may be shorter."""
    strata = np.arange(begin, end, every)
    chosen: npt.NDArray[np.int64] = np.minimum(strata + rng.integers(0, every, len(strata)), end - 1)
    return chosen


def windows_of(lengths: Sequence[int], window: int) -> npt.NDArray[np.int64]:
    """Of each checked token the number of its window, int64. `lengths`: of the spans, each of which begins one;
    `window`: tokens of a window."""
    tokens = np.asarray(lengths, dtype=np.int64)
    windows = -(-tokens // window)  # of each span
    sizes = np.full(int(windows.sum()), window)
    sizes[np.cumsum(windows) - 1] = tokens - (windows - 1) * window
    return np.repeat(np.arange(len(sizes)), sizes)


def suspects_of(
    check: SpanCheck,
    compared: npt.NDArray[np.int64],
    deviations: npt.NDArray[np.float32],
    lengths: Sequence[int],
    exact_tokens: int,
    promised: int,
) -> npt.NDArray[np.bool_]:
    """Which tokens are in windows that a sample does not let pass, bool [checked tokens].

    `compared` are the sample's tokens, `deviations` theirs, float32; the rest is as for `choose`. One that is not a
    number exceeds every threshold. A window without any is not let pass.
    """
    deviations = np.where(np.isnan(deviations), np.float32(np.inf), deviations)
    window_of = windows_of(lengths, check.window_tokens)
    own, windows = window_of[compared], int(window_of[-1]) + 1
    sums, counts = (np.bincount(own, weights, windows) for weights in (deviations, None))
    fails = ~(sums <= check.sample_threshold * counts) | (counts == 0)
    fails[own[_deviating(check, deviations)]] = True
    has_next = np.ones(windows, dtype=bool)
    has_next[window_of[np.cumsum(lengths) - 1]] = False
    wider = fails.copy()
    wider[1:] |= fails[:-1] & has_next[:-1]
    wider[:-1] |= fails[1:] & has_next[:-1]
    found: npt.NDArray[np.bool_] = wider[window_of]
    suspects = np.count_nonzero(found)
    saves_little = exact_tokens + found.size - suspects < check.min_saved_share * promised
    return np.ones_like(found) if saves_little or suspects > check.max_span_share * found.size else found


def stretches(spans: Sequence[range], suspects: npt.NDArray[np.bool_]) -> Iterator[range]:
    """The parts of the spans that are suspects, bool [tokens of all spans], one range each."""
    first = 0
    for span in spans:
        own = np.flatnonzero(suspects[first : first + len(span)])
        first += len(span)
        for part in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1) if len(own) else ():
            yield range(span.start + int(part[0]), span.start + int(part[-1]) + 1)


def closed(
    computed: npt.NDArray[np.bool_], positions: npt.NDArray[np.int64], keys_per_row: int
) -> npt.NDArray[np.bool_]:
    """Adds the rows of short gaps between two computed rows to `computed`, bool [rows]; 0 adds none.

    Skipping a gap makes attention read all keys before the gap's end once more, which costs as much as one row for each
    `keys_per_row` keys. A gap is short if its rows cost no more than that. `positions`: int64 [rows], rising. A gap in
    which some positions have no row stays open.
    """
    found = np.flatnonzero(computed)
    if not keys_per_row:
        return computed
    rows, gaps = np.diff(found) - 1, np.diff(positions[found]) - 1
    closes = (gaps > 0) & (gaps * keys_per_row <= positions[found[1:]]) & (rows == gaps)
    if not closes.any():
        return computed
    # A row's gap begins behind the last computed row before it.
    inside = np.zeros(len(computed), dtype=bool)
    inside[found[:-1][closes]] = True
    before = np.maximum.accumulate(np.where(computed, np.arange(len(computed)), 0))
    return computed | inside[before]


@dataclass(frozen=True, slots=True, eq=False)
class SampleFound:
    """What the sample of a check found, of `tokens` tokens: `kept_tokens` are in windows that it let pass, and
    `largest_kept` is the largest deviation there. `of_rows`: float32 [checked tokens], the deviations of those in the
    other windows, 0.0 where the sample has none."""

    tokens: int
    kept_tokens: int
    largest_kept: float
    of_rows: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PendingCheck:
    """A plan whose check has not decided yet.

    `rows`: the request's rows that are compared, one range for each checked span; all are computed until the check has
    decided. `keys_per_row` as for `works_of`. In the forward of a sample, `sampled` are the rows that are compared,
    int64, and `rows` is empty. Behind it, `sample` is what it found.
    """

    plan: SemanticKvPlan
    rows: tuple[range, ...]
    keys_per_row: int = 0
    sampled: npt.NDArray[np.int64] | None = None
    sample: SampleFound | None = None

    @property
    def check(self) -> SpanCheck:
        assert self.plan.execution.check is not None
        return self.plan.execution.check

    @property
    def checked(self) -> npt.NDArray[np.int64]:
        """The rows that are compared, span after span, int64 [checked tokens]."""
        if self.sampled is not None:
            return self.sampled
        return np.concatenate([np.arange(rows.start, rows.stop, dtype=np.int64) for rows in self.rows])

    def within(self, start: int, stop: int) -> PendingCheck | None:
        """The check of the rows start..stop-1, counted from the first of them; None if none is compared."""
        if self.sampled is not None:
            own = self.sampled[(self.sampled >= start) & (self.sampled < stop)] - start
            return replace(self, sampled=own) if len(own) else None
        cut = (range(max(rows.start, start) - start, min(rows.stop, stop) - start) for rows in self.rows)
        kept = tuple(rows for rows in cut if rows)
        return replace(self, rows=kept) if kept else None

    def choose(self, deviations: npt.NDArray[np.float32], positions: npt.NDArray[np.int64]) -> SpanChoice:
        """Decides from the deviations of the checked tokens, float32. `positions`: of all rows, int64."""

        def widened(computed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
            checked, stays = self.checked, np.ones(len(positions), dtype=bool)
            stays[checked] = computed
            found: npt.NDArray[np.bool_] = closed(stays, positions, self.keys_per_row)[checked]
            return found

        lengths = [len(rows) for rows in self.rows]
        wider = widened if self.keys_per_row else None
        if self.sample is not None:
            # The sample's own KV lies in the pool by now, and a token does not deviate from itself.
            deviations = np.maximum(deviations, self.sample.of_rows)
        return choose(self.check, deviations, lengths, self.saved_tokens, self.plan.matched_tokens, wider)

    def evidence(self, choice: SpanChoice) -> CheckEvidence:
        """`choice`: of an empty check where the sample left nothing to check."""
        offered, sample = self.plan.reused_tokens, self.sample
        reused = self.saved_tokens + choice.kept_tokens
        return CheckEvidence(
            request_id=self.plan.request_id,
            offered_tokens=offered,
            checked_tokens=choice.computed.size,
            reused_tokens=reused,
            recomputed_tokens=offered - reused,
            largest_kept=max(choice.largest_kept, 0.0 if sample is None else sample.largest_kept),
            is_dropped=choice.is_dropped,
            sampled_tokens=0 if sample is None else sample.tokens,
        )

    @property
    def saved_tokens(self) -> int:
        """Tokens that are reused whatever the check finds: exact ones, and those that the sample has let pass."""
        return self.plan.exact_tokens + (0 if self.sample is None else self.sample.kept_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceWork:
    """The rows of one request that enter layer 0, and how many layers compute each.

    `token_ids`, `positions`: int64 [rows], positions rising. `drops_at`: int64 [rows], how many of the lowest layers
    compute the row. `outputs`: the last rows, whose output is asked for. `block_ids`: int64, the request's blocks, on
    the host. `pending` is set until its check has decided.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    drops_at: npt.NDArray[np.int64]
    outputs: int
    block_ids: torch.Tensor
    pending: PendingCheck | None = None

    def active(self, layer: int) -> npt.NDArray[np.bool_]:
        """Which rows are computed in `layer`, bool [rows]."""
        return self.drops_at > layer

    def together(self, num_layers: int) -> range:
        """The range of rows that must stay in one forward: from the first to the last one that is compared, or that
        leaves before the last layer."""
        found = np.flatnonzero(self.drops_at < num_layers)
        if self.pending is not None:
            found = np.concatenate([found, self.pending.checked])
        return range(int(found.min()), int(found.max()) + 1) if len(found) else range(0)

    def part(self, start: int, stop: int, outputs: int) -> SequenceWork:
        """The rows start..stop-1, of which the output of the last `outputs` is asked for."""
        return replace(
            self,
            token_ids=self.token_ids[start:stop],
            positions=self.positions[start:stop],
            drops_at=self.drops_at[start:stop],
            outputs=outputs,
            pending=None if self.pending is None else self.pending.within(start, stop),
        )

    def beyond(self, layer: int, num_layers: int) -> SequenceWork:
        """The rows that are computed above `layer`, or in the last layer. The check must have decided."""
        assert self.pending is None
        return self._of(self.active(min(layer + 1, num_layers - 1)))

    def first_compared(self) -> npt.NDArray[np.int64]:
        """Which of the checked tokens the check's sample compares; none without one."""
        pending = self.pending
        if pending is None or not pending.check.sample_every:
            return np.empty(0, dtype=np.int64)
        check, lengths = pending.check, [len(rows) for rows in pending.rows]
        return sample_of(lengths, check.sample_every, check.window_tokens, pending.plan.execution.sample_seed)

    def unchecked(self) -> SequenceWork:
        """The work that is left if the check keeps every token; its rows enter layer 0."""
        assert self.pending is not None
        return replace(self._of(self._stays(self.pending.checked)), pending=None)

    def sample(self, compared: npt.NDArray[np.int64]) -> SequenceWork:
        """The rows of a sample's forward: `compared` of those that are checked, and all others that are computed in
        front of the last of them."""
        pending = self.pending
        assert pending is not None
        checked = pending.checked
        stays = np.ones(len(self.positions), dtype=bool)
        stays[checked] = False
        stays[checked[compared]] = True
        stays[checked[compared[-1]] + 1 :] = False
        places: npt.NDArray[np.int64] = np.cumsum(stays) - stays
        return replace(self._of(stays), outputs=0, pending=replace(pending, rows=(), sampled=places[checked[compared]]))

    def behind_sample(
        self, compared: npt.NDArray[np.int64], deviations: npt.NDArray[np.float32]
    ) -> tuple[SequenceWork, CheckEvidence | None]:
        """The work that is left once the sample found these deviations; its rows enter layer 0 again.

        Windows that the sample let pass have no rows any more. Where nothing is left to check, the evidence is known.
        """
        pending = self.pending
        assert pending is not None
        lengths = [len(rows) for rows in pending.rows]
        suspects = suspects_of(
            pending.check, compared, deviations, lengths, pending.saved_tokens, pending.plan.matched_tokens
        )
        checked = pending.checked
        stays = self._stays(checked[~suspects])
        found = np.zeros(len(checked), dtype=np.float32)
        found[compared] = deviations
        kept = deviations[~suspects[compared]]
        sample = SampleFound(
            len(compared), int(np.count_nonzero(~suspects)), float(kept.max(initial=0.0)), found[suspects]
        )
        places: npt.NDArray[np.int64] = np.cumsum(stays) - stays
        rows = tuple(
            range(int(places[part.start]), int(places[part.start]) + len(part))
            for part in stretches(pending.rows, suspects)
        )
        left = replace(pending, rows=rows, sample=sample)
        work = replace(self._of(stays), pending=left if rows else None)
        nothing = SpanChoice(np.zeros(0, dtype=bool), is_dropped=False, largest_kept=0.0)
        return work, None if rows else left.evidence(nothing)

    def _stays(self, kept: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which rows are left without the rows `kept`, bool [rows]."""
        stays = np.ones(len(self.positions), dtype=bool)
        stays[kept] = False
        return stays

    def _of(self, rows: npt.NDArray[np.bool_]) -> SequenceWork:
        """These rows alone, bool [rows], the check's as they are."""
        return replace(
            self, token_ids=self.token_ids[rows], positions=self.positions[rows], drops_at=self.drops_at[rows]
        )

    def decide(self, deviations: npt.NDArray[np.float32]) -> tuple[SequenceWork, CheckEvidence]:
        """The work after its check, which found these deviations, and the check's evidence."""
        pending = self.pending
        assert pending is not None
        choice = pending.choose(deviations, self.positions)
        drops_at = self.drops_at.copy()
        kept = pending.checked[~choice.computed]
        drops_at[kept] = max(pending.check.layer, pending.plan.execution.recompute_boundary_layer)
        return replace(self, drops_at=drops_at, pending=None), pending.evidence(choice)


def works_of(slices: Sequence[SequenceSlice], num_layers: int, keys_per_row: int = 0) -> list[SequenceWork]:
    """What each slice computes.

    Attention may read all keys before a run of neighbouring rows once for the run, and reading `keys_per_row` keys may
    take as long as computing one more row. A gap between two runs is then computed if that is cheaper; 0 skips all
    gaps. Raises PlanError when a plan does not fit its slice.
    """
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
    _check_plan(plan, sequence)
    return _with_promise(own, plan, num_layers, keys_per_row)


def _with_promise(own: SequenceWork, plan: SemanticKvPlan, num_layers: int, keys_per_row: int) -> SequenceWork:
    """The rows that the plan promised and that some layer computes, then `own`."""
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
    tokens = plan.prompt_token_ids[positions].astype(np.int64)
    return replace(
        own,
        token_ids=np.concatenate([tokens, own.token_ids]),
        positions=np.concatenate([positions, own.positions]),
        drops_at=np.concatenate([drops_at[entering], own.drops_at]),
        pending=_pending(plan, entering, keys_per_row),
    )


def _pending(plan: SemanticKvPlan, entering: npt.NDArray[np.bool_], keys_per_row: int) -> PendingCheck | None:
    """`entering`: bool [promised tokens], those that have a row."""
    check, head = plan.execution.check, plan.execution.head_tokens
    if check is None or not plan.is_checked:
        return None
    # first_rows[i] counts the rows before the promised token i.
    first_rows: npt.NDArray[np.int64] = np.cumsum(entering) - entering
    checked = [range(span.target_start + head, span.target_end) for span in plan.spans if not span.exact]
    checked = [positions for positions in checked if positions]
    starts = [int(first_rows[positions.start - plan.num_computed_tokens]) for positions in checked]
    rows = tuple(range(start, start + len(positions)) for start, positions in zip(starts, checked, strict=True))
    return PendingCheck(plan, rows, keys_per_row)


def _check_plan(plan: SemanticKvPlan, sequence: SequenceSlice) -> None:
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
