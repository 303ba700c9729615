"""What a check decides, against a decision written token by token; which rows of gaps are computed."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_wrapper.deviation_check import Budget, PendingCheck, choose, closed, sample_of, suspects_of
from engine_wrapper.deviation_check import stretches as stretches_of
from semblend_trt.plan import BudgetLevel, SpanCheck

shares = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
window_lengths = st.sampled_from([1, 7, 16, 32, 64])
deviations = st.sampled_from([0.0, 0.05, 0.2, 0.21, 1.0, math.inf, math.nan])
span_lists = st.lists(st.lists(deviations, min_size=1, max_size=8), min_size=1, max_size=5)
# A value for each stretch of a span, so that spans are longer than a window.
stretches = st.lists(st.tuples(deviations, st.integers(1, 40)), min_size=1, max_size=4)
long_span_lists = st.lists(stretches.map(lambda found: [value for value, n in found for _ in range(n)]), min_size=1)


def array(spans):
    return np.array([value for span in spans for value in span], dtype=np.float32)


def lengths(spans):
    return [len(span) for span in spans]


def checks(**fields):
    """In layer 1, with any shares."""
    return st.builds(SpanCheck, st.just(1), max_span_share=shares, min_saved_share=shares, **fields)


WINDOWED = {"window_threshold": st.sampled_from([None, 0.0, 0.06, 0.2, 1.5]), "window_tokens": window_lengths}
windowed_checks = checks(threshold=st.sampled_from([0.0, 0.1, 0.205, 2.0, 1e300]), **WINDOWED)
SAMPLED = {
    "sample_every": st.just(8),
    "sample_threshold": st.just(0.2),
    "window_tokens": st.sampled_from([8, 16, 32, 64]),
}
sampled_checks = checks(threshold=st.just(0.5), **SAMPLED)


@pytest.mark.promise("policies", "Many tokens that deviate by little are computed with their window")
@given(st.one_of(span_lists, long_span_lists), windowed_checks, st.integers(0, 10), st.integers(0, 10))
def test_a_threshold_against_the_same_token_by_token(spans, check, exact, holes):
    promised = sum(map(len, spans)) + exact + holes
    wanted = []
    for span in spans:
        deviating = [math.isnan(value) or value > check.threshold for value in span]
        for first in range(0, len(span), check.window_tokens) if check.window_threshold is not None else ():
            window = array([span[first : first + check.window_tokens]]).astype(np.float64)
            if not window.sum() <= check.window_threshold * len(window):
                deviating[first : first + check.window_tokens] = [True] * len(window)
        wanted += [True] * len(span) if sum(deviating) > check.max_span_share * len(span) else deviating
    saved = exact + wanted.count(False)
    is_dropped = saved == 0 or saved < check.min_saved_share * promised
    choice = choose(check, array(spans), lengths(spans), exact, promised)
    assert choice.is_dropped == is_dropped
    assert choice.computed.tolist() == ([True] * len(wanted) if is_dropped else wanted)
    kept = [value for value, computed in zip(array(spans).tolist(), choice.computed, strict=True) if not computed]
    assert (np.count_nonzero(~choice.computed), choice.largest_kept) == (len(kept), max(kept, default=0.0))
    assert choice.largest_kept <= check.threshold


@pytest.mark.promise("policies", "`boundary`, `position_fix`, `epic` and `cacheblend` do...")
@given(spans=span_lists, share=shares)
def test_the_largest_share_is_the_share_that_deviates_most(spans, share):
    values = np.nan_to_num(array(spans), nan=math.inf, posinf=math.inf)
    choice = choose(SpanCheck(1, largest_share=share), array(spans), lengths(spans), 0, values.size)
    count = round(share * values.size)
    assert np.count_nonzero(choice.computed) == count
    if 0 < count < values.size:
        assert values[choice.computed].min() >= values[~choice.computed].max()
    assert choice.is_dropped == (count == values.size)


@given(
    rows=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=40), keys_per_row=st.integers(0, 8)
)
def test_closing_gaps_adds_the_rows_of_short_ones_and_no_others(rows, keys_per_row):
    """Where two rows' positions are more than 1 apart, positions without a row lie between them."""
    computed, steps = (np.array(column) for column in zip(*rows, strict=True))
    positions = np.cumsum(steps)
    found = closed(computed, positions, keys_per_row)
    assert (found >= computed).all()
    bounds = np.flatnonzero(computed).tolist()
    for low, high in itertools.pairwise(bounds):
        gap = high - low - 1
        short = keys_per_row and gap == positions[high] - positions[low] - 1 and gap * keys_per_row <= positions[high]
        assert found[low + 1 : high].tolist() == [bool(short)] * (high - low - 1)
    outer = bounds and [*range(bounds[0]), *range(bounds[-1] + 1, len(rows))]
    assert not found[outer].any()
    assert closed(found, positions, keys_per_row).tolist() == found.tolist()


@pytest.mark.promise(
    "engines",
    "A sample compares a token of every stratum, other ones in each request; windows that it does not let pass are "
    "checked as without it",
)
@given(
    spans=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    every=st.sampled_from([1, 2, 3, 8, 16, 32]),
    window=window_lengths,
    seed=st.integers(0, 1 << 32),
)
def test_a_sample_has_a_token_of_every_stratum_and_all_of_the_first_windows(spans, every, window, seed):
    found = sample_of(spans, every, window, seed)
    assert found.tolist() == sorted(set(found.tolist())) == sample_of(spans, every, window, seed).tolist()
    end = 0
    for length in spans:
        own = found[(found >= end) & (found < end + length)] - end
        head = min(length, window)
        assert own[:head].tolist() == list(range(head))
        assert ((own[head:] - head) // every).tolist() == list(range(-(-(length - head) // every)))
        end += length
    assert end > found[-1]


@pytest.mark.promise("engines", "A sample compares a token of...")
def test_another_request_has_another_sample():
    assert sample_of([400], 8, 32, 1).tolist() != sample_of([400], 8, 32, 2).tolist()


@given(
    spans=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    bad=st.lists(st.sampled_from([0.25, 0.375, 0.5, 0.625, math.inf, math.nan]), max_size=6),
    check=sampled_checks,
    data=st.data(),
)
def test_a_sample_suspects_the_windows_that_fail_and_their_neighbours_within_the_span(spans, bad, check, data):
    window_tokens = check.window_tokens
    compared = sample_of(spans, 8, window_tokens, 0)
    values = np.full(len(compared), 0.125, np.float32)
    for value in bad:
        values[data.draw(st.integers(0, len(compared) - 1))] = value
    wanted = []
    for length in spans:
        own = compared - len(wanted)
        windows = -(-length // window_tokens)
        is_own = (own >= 0) & (own < length)
        within = [values[is_own & (own // window_tokens == number)].tolist() for number in range(windows)]
        fails = [any(not value <= 0.5 for value in window) or sum(window) > 0.2 * len(window) for window in within]
        near = [any(fails[max(0, number - 1) : number + 2]) for number in range(windows)]
        wanted += [near[token // window_tokens] for token in range(length)]
    least, most = check.min_saved_share * len(wanted), check.max_span_share * len(wanted)
    if wanted.count(False) < least or wanted.count(True) > most:
        wanted = [True] * len(wanted)
    found = suspects_of(check, compared, values, spans, 0, len(wanted))
    assert found.tolist() == wanted
    ends = np.cumsum(spans).tolist()
    ranges = [range(end - length, end) for end, length in zip(ends, spans, strict=True)]
    parts = list(stretches_of(ranges, found))
    assert [token for part in parts for token in part] == np.flatnonzero(found).tolist()
    assert all(any(span.start <= part.start and part.stop <= span.stop for span in ranges) for part in parts)


@pytest.mark.promise(
    "engines", "Where a sample finds most of a plan suspect, the windows that it has let pass are checked as well"
)
def test_where_most_of_a_plan_is_suspect_its_windows_that_pass_are_checked_as_well():
    spans, check = [32] * 4, SpanCheck(1, 0.5, max_span_share=0.5, sample_every=8, sample_threshold=0.2)
    compared = sample_of(spans, 8, 32, 0)
    for failing, checked in ((1, 1), (2, 2), (3, 4), (4, 4)):
        values = np.where(compared < failing * 32, 0.25, 0.125).astype(np.float32)
        found = suspects_of(check, compared, values, spans, 0, sum(spans))
        assert np.flatnonzero(found).tolist() == list(range(checked * 32))


LEVELS = (BudgetLevel(0.01, 0.0), BudgetLevel(0.1, 0.2), BudgetLevel(0.3, 0.7))
LEVELLED = SpanCheck(1, 0.5, sample_every=8, sample_threshold=1.0, levels=LEVELS)


@pytest.mark.promise("policies", "A plan whose sample deviates by...")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sample_that_is_no_number_exceeds_every_level(value):
    plan = SimpleNamespace(execution=SimpleNamespace(check=LEVELLED), exact_tokens=0, matched_tokens=32)
    values = np.array([0.0, value, 0.0], dtype=np.float32)
    suspects, judged = PendingCheck(plan, (range(32),)).judge(np.array([0, 8, 16]), values)
    assert (judged.share, suspects.all(), math.isfinite(judged.sampled_deviation)) == (None, True, False)


def test_what_deviates_without_bound_is_chosen_though_nothing_attends_to_it():
    budget = Budget(0.5, np.array([0.0, 1.0], dtype=np.float32))
    assert budget.chosen(np.array([math.inf, 0.5], dtype=np.float32)).tolist() == [True, False]
