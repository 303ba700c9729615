"""What a plan is made of, from the runs that were chosen: spans and holes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from semblend_trt.plan import PlanSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from semblend_trt.discovery.span_index import Run


def span_of(run: Run, *, exact: bool = False) -> PlanSpan:
    return PlanSpan(run.donor_id, run.donor_start, run.target_start, run.length, exact)


def exact_run(
    runs: Sequence[Run], begin: int, end: int, is_near: Callable[[str], bool] = lambda _donor_id: False
) -> Run | None:
    """The longest run whose donor starts as the prompt starts, cut to [begin, end); None when there is none.

    Of equally long ones a near donor's is taken.
    """
    from_start = [run for run in runs if run.donor_start == 0 and run.target_start == 0]
    best = min(
        from_start, key=lambda run: (-min(run.target_end, end), not is_near(run.donor_id), run.donor_id), default=None
    )
    return None if best is None else best.within(begin, end)


def cut_to_block(spans: list[PlanSpan], block_size: int, min_span: int) -> list[PlanSpan]:
    """`spans` up to the last block's end that they reach; a last span that has less than `min_span` left is dropped."""
    for last in range(len(spans) - 1, -1, -1):
        span = spans[last]
        length = span.target_end // block_size * block_size - span.target_start
        if length >= min_span:
            return [*spans[:last], replace(span, length=length)]
    return []


def holes_of(spans: Sequence[PlanSpan], position: int) -> list[range]:
    """Ranges between `position` and the end of the last span that no span covers."""
    holes = []
    for span in spans:
        if span.target_start > position:
            holes.append(range(position, span.target_start))
        position = span.target_end
    return holes
