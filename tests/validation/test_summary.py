"""A line of the table says which samples each of its figures is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from validation.summary import summary

if TYPE_CHECKING:
    from collections.abc import Callable

    from validation.samples import Sample


def test_speed_and_tokens_are_over_timed_samples_answers_over_all(make_sample: Callable[..., Sample]) -> None:
    timed = make_sample(timed=True, ttft_s=0.2, prompt_tokens=100, computed_tokens=100, exact_match=True)
    follow_up = make_sample(timed=False, ttft_s=0.01, prompt_tokens=100, computed_tokens=4, exact_match=False)
    line = summary("cold", "reordered", "2k", [timed, follow_up])
    assert (line.samples, line.timed, line.ttft_median_s, line.computed_tokens) == (2, 1, 0.2, 100)
    assert line.exact_match == 0.5
