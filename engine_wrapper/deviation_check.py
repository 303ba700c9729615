"""The check of one plan: which of its tokens deviate too much, by thresholds, windows and samples, and its evidence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.plan import CheckEvidence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from semblend_trt.plan import SemanticKvPlan, SpanCheck

# With fewer rows for each gap between them, attention reads the keys once for a tile of rows, not for each run.
ROWS_PER_GAP = 4


@dataclass(frozen=True, slots=True, eq=False)
class SpanChoice:
    """What a SpanCheck decides from deviations alone.

    `computed`: bool [checked tokens], those that all layers above compute; the others keep the donor's KV.
    `is_dropped`: the plan saved too little, so every token is computed. `largest_kept`: the largest deviation of a
    token that keeps the donor's KV, 0.0 without one."""

    computed: npt.NDArray[np.bool_]
    is_dropped: bool
    largest_kept: float


def choose(
    check: SpanCheck,
    deviations: npt.NDArray[np.float32],
    lengths: Sequence[int],
    exact_tokens: int,
    promised: int,
    widened: Callable[[npt.NDArray[np.bool_]], npt.NDArray[np.bool_]] | None = None,
    budget: Budget | None = None,
) -> SpanChoice:
    """Decide one plan. `deviations`: float32 [checked tokens], span after span; `lengths`: tokens of each span.

    `exact_tokens` of the `promised` tokens are saved in any case. NaN exceeds every threshold. `widened` adds tokens
    that are cheaper to compute than to skip, bool [checked tokens]. `budget` adds tokens of its own."""
    deviations = np.where(np.isnan(deviations), np.float32(np.inf), deviations)
    tokens = np.asarray(lengths, dtype=np.int64)
    deviating = _deviating(check, deviations)
    if budget is not None:
        deviating |= budget.chosen(deviations)
    if check.window_threshold is not None:
        # Windows whose mean deviation is above the threshold are computed whole.
        starts = np.flatnonzero(np.diff(windows_of(lengths, check.window_tokens), prepend=-1))
        sizes = np.diff(starts, append=deviations.size)
        above = np.add.reduceat(deviations, starts, dtype=np.float64) > check.window_threshold * sizes
        deviating |= np.repeat(above, sizes)
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
    return _largest(deviations, check.largest_share)


def _largest(values: npt.NDArray[np.float32], share: float) -> npt.NDArray[np.bool_]:
    count = round(share * values.size)
    if not count:
        return np.zeros(values.size, dtype=bool)
    least = -np.partition(-values, count - 1)[count - 1]  # NaN comes last
    found: npt.NDArray[np.bool_] = values > least
    # Of equal values the earlier token is computed: what follows depends on it.
    found[np.flatnonzero(values == least)[: count - np.count_nonzero(found)]] = True
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Budget:
    """A `share` of the checked tokens to compute, and the attention that each gets, float32 [checked tokens]."""

    share: float
    attention: npt.NDArray[np.float32]

    def chosen(self, deviations: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        """Return the tokens with the largest product of deviation and attention, bool [checked tokens]."""
        # A token that deviates without bound comes first, also where no row attends to it.
        return _largest(deviations * np.where(np.isinf(deviations), 1, self.attention), self.share)


def share_for(check: SpanCheck, deviation: float) -> float | None:
    """Return the share of checked tokens to compute at this mean deviation, 0.0 without levels; None for all. NaN is
    beyond every level."""
    if not check.levels:
        return 0.0
    return next((level.share for level in check.levels if deviation <= level.deviation), None)


def sample_of(lengths: Sequence[int], every: int, window: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the checked tokens of a sample (see `SpanCheck`), int64, ascending. `lengths`: of the spans."""
    rng = np.random.default_rng(seed)
    found, first = [], 0
    for length in lengths:
        head = min(window, length)
        strata = np.arange(head, length, every)  # the last one may be shorter
        chosen = np.minimum(strata + rng.integers(0, every, len(strata)), length - 1)
        found += [first + np.arange(head), first + chosen]
        first += length
    return np.concatenate(found)


def window_means(
    compared: npt.NDArray[np.int64], deviations: npt.NDArray[np.float32], window_of: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return what a sample says of each window: the mean of its `compared` tokens, infinite without one, float64.
    `window_of`: as `windows_of` returns it."""
    own, windows = window_of[compared], int(window_of[-1]) + 1
    sums, counts = (np.bincount(own, weights, windows) for weights in (deviations, None))
    with np.errstate(divide="ignore", invalid="ignore"):
        means = sums / counts
    return np.where(np.isnan(means), np.inf, means)


def windows_of(lengths: Sequence[int], window: int) -> npt.NDArray[np.int64]:
    """Return the number of each checked token's window, int64. Each span, of these `lengths`, begins a new window."""
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
    """Return the tokens in windows that fail a sample, bool [checked tokens]; a window without a sampled token fails.
    `compared` are the sample's tokens, `deviations` theirs, float32; the rest is as for `choose`."""
    deviations = np.where(np.isnan(deviations), np.float32(np.inf), deviations)
    window_of = windows_of(lengths, check.window_tokens)
    fails = window_means(compared, deviations, window_of) > check.sample_threshold
    fails[window_of[compared[_deviating(check, deviations)]]] = True
    has_next = np.ones_like(fails)
    has_next[window_of[np.cumsum(lengths) - 1]] = False
    wider = fails.copy()
    wider[1:] |= fails[:-1] & has_next[:-1]
    wider[:-1] |= fails[1:] & has_next[:-1]
    found: npt.NDArray[np.bool_] = wider[window_of]
    suspects = np.count_nonzero(found)
    saves_little = exact_tokens + found.size - suspects < check.min_saved_share * promised
    return np.ones_like(found) if saves_little or suspects > check.max_span_share * found.size else found


def stretches(spans: Sequence[range], suspects: npt.NDArray[np.bool_]) -> Iterator[range]:
    """Yield the parts of the spans that are suspects, bool [tokens of all spans]."""
    first = 0
    for span in spans:
        own = np.flatnonzero(suspects[first : first + len(span)])
        first += len(span)
        for part in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1) if len(own) else ():
            yield range(span.start + int(part[0]), span.start + int(part[-1]) + 1)


def stand_apart(sequences: Iterable[npt.NDArray[np.int64]]) -> bool:
    """Return whether rows have more gaps than ROWS_PER_GAP allows; `sequences`: positions of each sequence's rows."""
    return sum(len(own) - ROWS_PER_GAP * int(np.count_nonzero(np.diff(own) != 1)) for own in sequences) < 0


def closed(
    computed: npt.NDArray[np.bool_], positions: npt.NDArray[np.int64], keys_per_row: int
) -> npt.NDArray[np.bool_]:
    """Add the rows of short gaps between two computed rows to `computed`, bool [rows].

    To skip a gap, attention reads all keys before the gap's end once more. That costs a row for each `keys_per_row`
    keys; 0 closes no gap. A gap is short if its rows cost no more. `positions`: int64 [rows], rising. A gap in which
    some positions have no row stays open."""
    found = np.flatnonzero(computed)
    if not keys_per_row:
        return computed
    rows, gaps = np.diff(found) - 1, np.diff(positions[found]) - 1
    closes = (gaps > 0) & (gaps * keys_per_row <= positions[found[1:]]) & (rows == gaps)
    if not closes.any():
        return computed
    # A row's gap begins after the last computed row before it.
    inside = np.zeros(len(computed), dtype=bool)
    inside[found[:-1][closes]] = True
    before = np.maximum.accumulate(np.where(computed, np.arange(len(computed)), 0))
    return computed | inside[before]


@dataclass(frozen=True, slots=True, eq=False)
class PendingCheck:
    """A plan whose check has not decided yet.

    `rows`: the request's compared rows, a range for each checked span; all are computed until the check has decided.
    `keys_per_row`: as for `works_of`. In a sample's forward `sampled` are the compared rows, int64, and `rows` is
    empty. Afterwards `share` of the checked tokens have to be computed, None for all, and `budget` says which, once
    their attention is known. `sampled_deviation` is the mean that the sample estimates of all checked tokens, and
    `largest_passed` the largest deviation in windows that passed. `of_rows`, float32: those of other windows, 0.0 if
    not sampled; None without a sample. If no more is compared: the means of windows, infinite if one fails."""

    plan: SemanticKvPlan
    rows: tuple[range, ...]
    keys_per_row: int = 0
    sampled: npt.NDArray[np.int64] | None = None
    share: float | None = 0.0
    budget: Budget | None = None
    sampled_tokens: int = 0
    sampled_deviation: float = 0.0
    passed_tokens: int = 0
    largest_passed: float = 0.0
    of_rows: npt.NDArray[np.float32] | None = None

    @property
    def check(self) -> SpanCheck:
        assert self.plan.execution.check is not None
        return self.plan.execution.check

    @property
    def lengths(self) -> list[int]:
        return [len(rows) for rows in self.rows]

    @property
    def checked(self) -> npt.NDArray[np.int64]:
        """The rows that are compared, span after span, int64 [checked tokens]."""
        if self.sampled is not None:
            return self.sampled
        return np.concatenate([np.arange(rows.start, rows.stop, dtype=np.int64) for rows in self.rows])

    @property
    def saved_tokens(self) -> int:
        """Tokens that are reused whatever the check finds: exact ones, and those that passed the sample."""
        return self.plan.exact_tokens + self.passed_tokens

    def within(self, start: int, stop: int) -> PendingCheck | None:
        """Return the check of the rows start..stop-1, counted from `start`; None if no row is compared."""
        if self.sampled is not None:
            own = self.sampled[(self.sampled >= start) & (self.sampled < stop)] - start
            return replace(self, sampled=own) if len(own) else None
        cut = (range(max(rows.start, start) - start, min(rows.stop, stop) - start) for rows in self.rows)
        kept = tuple(rows for rows in cut if rows)
        return replace(self, rows=kept) if kept else None

    def judge(
        self, compared: npt.NDArray[np.int64], deviations: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.bool_], PendingCheck]:
        """Return what a sample of `compared` tokens leaves suspect, bool [checked tokens], and the check after it."""
        check, lengths = self.check, self.lengths
        window_of = windows_of(lengths, check.window_tokens)
        means = window_means(compared, deviations, window_of)[window_of]
        mean = float(means.mean())
        share = share_for(check, mean)
        suspects = suspects_of(check, compared, deviations, lengths, self.saved_tokens, self.plan.matched_tokens)
        found = np.where(suspects, np.inf, means).astype(np.float32)
        if check.compares_all:
            found[:] = 0.0
            found[compared] = deviations
        suspects |= share != 0.0
        kept = deviations[~suspects[compared]]
        return suspects, replace(
            self,
            share=share,
            sampled_tokens=len(compared),
            sampled_deviation=mean,
            passed_tokens=int(np.count_nonzero(~suspects)),
            largest_passed=float(kept.max(initial=0.0)),
            of_rows=found[suspects],
        )

    def choose(self, deviations: npt.NDArray[np.float32], positions: npt.NDArray[np.int64]) -> SpanChoice:
        """Decide from the deviations of the checked tokens, float32. `positions`: of all rows, int64."""

        def widened(computed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
            checked, stays = self.checked, np.ones(len(positions), dtype=bool)
            stays[checked] = computed
            if self.budget is not None and stand_apart([positions[stays]]):
                return computed  # then a gap costs attention nothing
            found: npt.NDArray[np.bool_] = closed(stays, positions, self.keys_per_row)[checked]
            return found

        if self.of_rows is not None:
            # The pool holds the sample's own KV by now, and a token does not deviate from itself.
            deviations = np.maximum(deviations, self.of_rows)
        promised = self.plan.matched_tokens
        return choose(self.check, deviations, self.lengths, self.saved_tokens, promised, widened, self.budget)

    def evidence(self, choice: SpanChoice) -> CheckEvidence:
        """Return what the check and its sample have found."""
        offered, reused = self.plan.reused_tokens, self.saved_tokens + int(np.count_nonzero(~choice.computed))
        return CheckEvidence(
            request_id=self.plan.request_id,
            offered_tokens=offered,
            checked_tokens=choice.computed.size if self.check.compares_all else 0,
            reused_tokens=reused,
            recomputed_tokens=offered - reused,
            largest_kept=max(choice.largest_kept, self.largest_passed),
            is_dropped=choice.is_dropped,
            sampled_tokens=self.sampled_tokens,
            sampled_deviation=self.sampled_deviation,
            exceeds_levels=share_for(self.check, self.sampled_deviation) in (None, 1.0),
        )
