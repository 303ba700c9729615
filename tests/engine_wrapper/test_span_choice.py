"""What a check decides, against a decision written token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_wrapper.span_choice import choose
from semblend_trt.span_check import SpanCheck

shares = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
deviations = st.sampled_from([0.0, 0.05, 0.2, 0.21, 1.0, math.inf, math.nan])
span_lists = st.lists(st.lists(deviations, min_size=1, max_size=8), min_size=1, max_size=5)


def array(spans: list[list[float]]) -> np.ndarray:
    return np.array([value for span in spans for value in span], dtype=np.float32)


def lengths(spans: list[list[float]]) -> list[int]:
    return [len(span) for span in spans]


@given(
    spans=span_lists,
    threshold=st.sampled_from([0.0, 0.1, 0.205, 2.0, 1e300]),
    max_span_share=shares,
    min_saved_share=shares,
    exact=st.integers(0, 10),
    holes=st.integers(0, 10),
)
def test_a_threshold_against_the_same_token_by_token(
    spans: list[list[float]], threshold: float, max_span_share: float, min_saved_share: float, exact: int, holes: int
) -> None:
    check = SpanCheck(1, threshold, max_span_share=max_span_share, min_saved_share=min_saved_share)
    promised = sum(map(len, spans)) + exact + holes
    wanted: list[bool] = []
    for span in spans:
        deviating = [math.isnan(value) or value > threshold for value in span]
        wanted += [True] * len(span) if sum(deviating) > max_span_share * len(span) else deviating
    saved = exact + wanted.count(False)
    is_dropped = saved == 0 or saved < min_saved_share * promised
    choice = choose(check, array(spans), lengths(spans), exact, promised)
    assert choice.is_dropped == is_dropped
    assert choice.computed.tolist() == ([True] * len(wanted) if is_dropped else wanted)
    kept = [value for value, computed in zip(array(spans).tolist(), choice.computed, strict=True) if not computed]
    assert choice.kept_tokens == len(kept)
    assert choice.largest_kept == max(kept, default=0.0)
    assert choice.largest_kept <= threshold


@given(spans=span_lists, share=shares)
def test_the_largest_share_is_the_share_that_deviates_most(spans: list[list[float]], share: float) -> None:
    values = np.nan_to_num(array(spans), nan=math.inf, posinf=math.inf)
    choice = choose(SpanCheck(1, largest_share=share), array(spans), lengths(spans), 0, values.size)
    count = round(share * values.size)
    assert np.count_nonzero(choice.computed) == count
    if 0 < count < values.size:
        assert values[choice.computed].min() >= values[~choice.computed].max()
    assert choice.is_dropped == (count == values.size)


@given(spans=span_lists, low=st.floats(0, 2), high=st.floats(0, 2))
def test_a_lower_threshold_never_keeps_more(spans: list[list[float]], low: float, high: float) -> None:
    low, high = sorted((low, high))
    strict, mild = (
        choose(SpanCheck(1, threshold), array(spans), lengths(spans), 1, 9).computed for threshold in (low, high)
    )
    assert (strict >= mild).all()


def test_of_equal_deviations_the_earlier_tokens_are_computed() -> None:
    choice = choose(SpanCheck(1, largest_share=0.5), np.full(6, 0.3, np.float32), [2, 4], 0, 6)
    assert choice.computed.tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize(("deviating", "whole"), [(1, False), (2, False), (3, True)])
def test_a_span_is_computed_whole_above_its_bound_only(deviating: int, whole: bool) -> None:
    values = np.zeros(20, np.float32)
    values[:deviating] = 1.0
    choice = choose(SpanCheck(1, 0.5, max_span_share=0.25), values, [8, 12], 0, 20)
    assert choice.computed[:8].all() == whole
    assert not choice.computed[8:].any()
