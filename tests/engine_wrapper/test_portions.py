"""Portions stay within their rows, in order, and divide nothing that has to be decided at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_wrapper.layer_schedule import SequenceSlice, works_of
from engine_wrapper.portions import portions
from semblend_trt.plan import SpanCheck

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_wrapper.sequence_work import SequenceWork

LAYERS, BLOCK = 4, 8
TERMS: dict[str, dict[str, Any]] = {
    "position_fix": {},
    "head": {"head": 3},
    "boundary": {"boundary": 2},
    "check": {"check": SpanCheck(1, 0.5)},
}


def piece_of(make_plan: Callable[..., Any], request_id: int, terms: str, begin: int, length: int) -> SequenceSlice:
    """A planned slice from `begin` on, with a hole before, between and behind its two spans."""
    tokens = list(range(begin + length))
    blocks = tuple(range(-(-len(tokens) // BLOCK)))
    if begin < 12:
        return SequenceSlice(request_id, begin, tuple(tokens[begin:]), blocks)
    spans = [(2, begin // 2), (begin // 2 + 2, begin - 1)]
    plan = make_plan(
        tokens, spans, num_layers=LAYERS, block_size=BLOCK, request_id=request_id, prefix_end=begin, **TERMS[terms]
    )
    return SequenceSlice(request_id, begin, tuple(tokens[begin:]), blocks, plan)


def undividable(work: SequenceWork) -> int:
    """Rows that one forward needs for what must stay together, and one behind it."""
    partial = np.flatnonzero(work.drops_at < LAYERS).tolist()
    checked = [] if work.open_check is None else [row for rows in work.open_check.rows for row in rows]
    rows = partial + checked
    return max(rows) - min(rows) + 2 if rows else 1


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(list(TERMS)), st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=4
    ),
    slack=st.integers(0, 30),
)
def test_every_row_runs_once_in_order_within_the_bound(
    make_plan: Callable[..., Any], parts: list[tuple[str, int, int]], slack: int
) -> None:
    pieces = [piece_of(make_plan, index, terms, begin, length) for index, (terms, begin, length) in enumerate(parts)]
    works = works_of(pieces, LAYERS)
    max_rows = max(map(undividable, works)) + slack
    found = portions(works, LAYERS, max_rows)
    assert all(0 < part.num_rows <= max_rows for part in found)
    assert [owner for part in found for owner in part.owners] == sorted(
        owner for part in found for owner in part.owners
    )
    for owner, work in enumerate(works):
        own = [
            (each, scheduled)
            for part in found
            for each, of, scheduled in zip(part.works, part.owners, part.scheduled, strict=True)
            if of == owner
        ]
        for name in ("token_ids", "positions", "drops_at"):
            joined = np.concatenate([getattr(each, name) for each, _ in own])
            assert joined.tolist() == getattr(work, name).tolist()
        assert sum(scheduled for _, scheduled in own) == work.outputs
        assert all(each.outputs == max(1, scheduled) for each, scheduled in own)
        # What is put out has passed every layer.
        assert all((each.drops_at[-each.outputs :] == LAYERS).all() for each, _ in own)
        checks = [each for each, _ in own if each.open_check is not None]
        assert len(checks) == (work.open_check is not None)
        for each in checks:
            assert each.open_check is not None
            assert work.open_check is not None
            compared = [each.positions[rows.start : rows.stop].tolist() for rows in each.open_check.rows]
            assert compared == [work.positions[rows.start : rows.stop].tolist() for rows in work.open_check.rows]


@pytest.mark.parametrize("max_rows", [None, 1000])
def test_what_fits_is_one_forward_of_the_same_works(make_plan: Callable[..., Any], max_rows: int | None) -> None:
    works = works_of([piece_of(make_plan, 0, "check", 40, 5), piece_of(make_plan, 1, "head", 0, 9)], LAYERS)
    (part,) = portions(works, LAYERS, max_rows)
    assert part.works == works
    assert (part.owners, part.scheduled) == ([0, 1], [5, 9])


def test_rows_that_must_stay_together_run_whatever_the_bound(make_plan: Callable[..., Any]) -> None:
    """A work whose lowest layers have not run first must still be executed: the engine has skipped its tokens."""
    works = works_of([piece_of(make_plan, 0, "check", 50, 5)], LAYERS)
    assert sum(part.num_rows for part in portions(works, LAYERS, 10)) == 55
