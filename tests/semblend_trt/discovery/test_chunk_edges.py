"""Runs of a model with chunked attention are cut where a chunk ends, in the donor or in the prompt."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.discovery.span_index import Run
from semblend_trt.plan import PlanKind
from tests.semblend_trt.discovery.planning import STOCK, plan_of, planner, request

CHUNK, SPAN = 256, 64
RANDOM = np.random.default_rng(3)


def some(count):
    return RANDOM.integers(0, 50_000, count).astype(np.int32)


TEXT = some(700)


def spans_of(before_donor, before_prompt, **options):
    """Of a plan for the text elsewhere: where each span begins in donor and prompt, and its length."""
    donor = np.concatenate([some(before_donor), TEXT, some(9)])
    prompt = np.concatenate([some(before_prompt), TEXT, some(20)])
    made = planner({"a": donor}, chunk=CHUNK, min_span_tokens=SPAN, **options)
    plan = plan_of(made.plan(request(prompt)))
    assert plan.kind is PlanKind.REQUEST_LOCAL
    return [(span.donor_start, span.target_start, span.length) for span in plan.spans]


def test_no_span_holds_the_end_of_a_chunk():
    """Its first 36 tokens and those between two ends are too few for a span."""
    assert spans_of(20, 40) == [(20, 40, 216), (256, 276, 236), (512, 532, 208)]
    assert spans_of(40, 20) == [(40, 20, 216), (276, 256, 236), (532, 512, 208)]
    assert [span[1] + span[2] for span in spans_of(20, 40)[:2]] == [256, 512]


@pytest.mark.parametrize("shift", [0, CHUNK, 2 * CHUNK])
def test_where_chunks_end_at_the_same_tokens_a_run_stays_whole(shift):
    assert spans_of(20, 20 + shift) == [(20, 20 + shift, 700)]


def test_text_that_is_identical_from_the_first_token_stays_whole():
    prompt = np.concatenate([TEXT, some(20)])
    plan = plan_of(planner({"a": TEXT}, "exact", chunk=CHUNK, min_span_tokens=SPAN).plan(request(prompt, mode=STOCK)))
    assert plan.kind is PlanKind.EXACT_PREFIX
    assert [(span.target_start, span.length) for span in plan.spans] == [(0, 700)]


@pytest.mark.parametrize(("shift", "reason"), [(SPAN, "chunk_edge"), (CHUNK, None), (13, None)])
def test_a_run_without_a_piece_as_long_as_a_span_is_refused_by_name(shift, reason):
    """Where chunks of 128 tokens end 64 apart, no piece has 80 tokens."""
    made = planner({"a": np.concatenate([some(7), TEXT])}, chunk=2 * SPAN, min_span_tokens=80)
    planned = made.plan(request(np.concatenate([some(7 + shift), TEXT, some(5)])))
    assert (planned.outcome_reason, planned.runs_found) == (reason, 1)


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(1, 900), st.integers(1, 300))
def test_pieces_are_the_run_and_each_lies_in_one_chunk(donor, target, length, chunk):
    run = Run("a", donor, target, length)
    pieces = run.in_chunks(chunk)
    assert sum(piece.length for piece in pieces) == length
    assert [piece.target_start for piece in pieces[1:]] == [piece.target_end for piece in pieces[:-1]]
    assert {piece.donor_start - piece.target_start for piece in pieces} == {donor - target}
    if (donor - target) % chunk == 0:
        assert pieces == [run]
        return
    for start, end in ((each[at], each[at] + each.length - 1) for each in pieces for at in (1, 2)):
        assert start // chunk == end // chunk
