"""Which checked tokens are computed: the decision of a SpanCheck, from their deviations alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.plan import WINDOW_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from semblend_trt.plan import SpanCheck


@dataclass(frozen=True, slots=True, eq=False)
class SpanChoice:
    """`computed`: bool [checked tokens], those that all layers above compute; the others keep the donor's KV.

    `is_dropped`: the plan would have saved too little, or nothing, and every token is computed. `largest_kept`: the
    largest deviation of a token that keeps the donor's KV, 0.0 without one.
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
    """Decides one plan. `deviations`: float32 [checked tokens], of one span after another, whose tokens are `lengths`.

    `exact_tokens` of the `promised` ones are saved whatever is decided here. A deviation that is not a number exceeds
    every threshold. `widened` adds to the tokens that are computed those that are cheaper computed than skipped, bool
    [checked tokens].
    """
    deviations = np.where(np.isnan(deviations), np.float32(np.inf), deviations)
    tokens = np.asarray(lengths, dtype=np.int64)
    deviating = _deviating(check, deviations)
    if check.window_threshold is not None:
        deviating |= _deviating_windows(deviations, tokens, check.window_threshold)
    computed = _whole_spans(deviating, tokens, check.max_span_share)
    if widened is not None:
        computed = widened(computed)
    saved = exact_tokens + computed.size - np.count_nonzero(computed)
    is_dropped = bool(saved == 0 or saved < check.min_saved_share * promised)
    if is_dropped:
        computed = np.ones_like(computed)
    return SpanChoice(computed, is_dropped, float(deviations[~computed].max(initial=0.0)))


def closed(
    computed: npt.NDArray[np.bool_], positions: npt.NDArray[np.int64], keys_per_row: int
) -> npt.NDArray[np.bool_]:
    """`computed`, bool [rows], with all rows of short gaps between two computed ones; with 0 keys a row as it is.

    A gap is short where all keys before its end, for `keys_per_row` of which one row can be computed, are as many as
    its rows are worth. `positions`: int64 [rows], rising. A gap in which some positions have no row stays open.
    """
    found = np.flatnonzero(computed)
    if not keys_per_row:
        return computed
    rows, gaps = np.diff(found) - 1, np.diff(positions[found]) - 1
    closes = (gaps > 0) & (gaps * keys_per_row <= positions[found[1:]]) & (rows == gaps)
    # Every row's gap is that of the computed row before it.
    inside = np.zeros(len(computed), dtype=bool)
    inside[found[:-1][closes]] = True
    before = np.maximum.accumulate(np.where(computed, np.arange(len(computed)), 0))
    return computed | inside[before]


def _deviating(check: SpanCheck, deviations: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    if check.threshold is not None:
        return deviations.astype(np.float64) > check.threshold
    assert check.largest_share is not None
    deviating = np.zeros(deviations.size, dtype=bool)
    # Of equal deviations the earlier token is computed: what follows depends on it.
    deviating[np.argsort(-deviations, kind="stable")[: round(check.largest_share * deviations.size)]] = True
    return deviating


def _deviating_windows(
    deviations: npt.NDArray[np.float32], tokens: npt.NDArray[np.int64], threshold: float
) -> npt.NDArray[np.bool_]:
    """Every token of the windows whose mean deviation is above the threshold. `tokens`: int64 [spans]."""
    within = np.arange(deviations.size) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    starts = np.flatnonzero(within % WINDOW_TOKENS == 0)
    sizes = np.diff(starts, append=deviations.size)
    above = np.add.reduceat(deviations, starts, dtype=np.float64) > threshold * sizes
    return np.repeat(above, sizes)


def _whole_spans(
    deviating: npt.NDArray[np.bool_], tokens: npt.NDArray[np.int64], max_span_share: float
) -> npt.NDArray[np.bool_]:
    """`deviating`, with every token of a span of which too large a share is. `tokens`: int64 [spans]."""
    counts = np.add.reduceat(deviating, np.cumsum(tokens) - tokens, dtype=np.int64)
    return deviating | np.repeat(counts > max_span_share * tokens, tokens)
