"""What the engine says of a scheduled request is believed only where it can be true: a donor's KV hangs on it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.connector.allocation import Iteration, savable_tokens, settle_allocation
from semblend_trt.connector.contract_versions import RequestDataV11
from semblend_trt.connector.metadata import SaveIntent
from semblend_trt.connector.request_table import TrackedRequest
from semblend_trt.plan import (
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    SemanticKvPlan,
)

PROMPT, BLOCK = 100, 8
BLOCKS = list(range(50, 63))


def tracked(matched=0):
    request = TrackedRequest(7, "namespace", np.arange(PROMPT, dtype=np.int32), 0)
    request.intent = SaveIntent(7, "donor", PROMPT + 20)
    if matched:
        request.plan = SemanticKvPlan(
            request_id=7,
            kind=PlanKind.EXACT_PREFIX,
            spans=(PlanSpan("donor-1", 0, 0, matched, exact=True),),
            prompt_token_ids=tuple(range(PROMPT)),
            num_computed_tokens=0,
            matched_tokens=matched,
            block_size=BLOCK,
            execution=EngineExecution(EngineMode.STOCK, 3),
        )
    return request


def told(request, position, scheduled, blocks=(), *, is_first=False):
    iteration = Iteration()
    iteration.add(request, RequestDataV11(7, [], list(blocks), position, scheduled), is_first=is_first)
    request.is_followed = request.is_followed or bool(iteration.followed)
    return iteration


def followed(matched=0):
    request = tracked(matched)
    told(request, 0, PROMPT - matched, BLOCKS, is_first=True)
    return request


def test_a_prompt_in_chunks_and_its_answer():
    request = tracked()
    written = []
    for position, scheduled, blocks in ((0, 40, BLOCKS), (40, 60, ()), (99, 1, ()), (100, 1, ()), (101, 1, [3])):
        told(request, position, scheduled, blocks, is_first=not written)
        written.append(request.written_tokens)
    assert written == [40, 100, 100, 101, 102]
    assert savable_tokens(request, [*BLOCKS, 3], BLOCK) == 102


def test_a_token_without_a_block_is_told_by_the_id_alone():
    request, at_workers = followed(), PROMPT
    for position, blocks, by_id in ((99, (), False), (100, (), True), (101, [3], False), (102, (), True)):
        iteration = told(request, position, 1, blocks)
        assert (iteration.grown, len(iteration.progress)) == ([7] * by_id, not by_id)
        at_workers = iteration.progress[0].written_tokens if iteration.progress else at_workers + 1
        assert at_workers == request.written_tokens


@pytest.mark.parametrize("position", [0, 30])
def test_a_load_counts_once_wherever_the_position_points(position):
    # A request that is scheduled an iteration after its query is told with the loaded tokens.
    request = tracked(matched=30)
    told(request, position, 70, BLOCKS, is_first=True)
    assert request.written_tokens == PROMPT


def test_an_offer_that_the_engine_did_not_apply_is_loaded_by_nobody():
    # It counted the offer as a load, and left the request where it was.
    request = tracked(matched=30)
    iteration = told(request, -30, PROMPT, BLOCKS, is_first=True)
    assert (iteration.plans, request.plan, request.reason) == ([], None, "not_honoured")
    assert (request.written_tokens, savable_tokens(request, BLOCKS, BLOCK)) == (PROMPT, PROMPT)


@pytest.mark.parametrize(
    ("position", "scheduled"),
    [(-1, 1), (0, -1), (0, 101), (101, 0), (101, 1), (10**9, 1), (0, 10**9), ("0", 1), (0.0, 1), (None, 1), (0, None)],
)
def test_beginnings_that_cannot_be(position, scheduled):
    request = tracked(matched=30)
    iteration = Iteration()
    with pytest.raises((TypeError, ValueError)):
        iteration.add(request, RequestDataV11(7, [], BLOCKS, position, scheduled), is_first=True)
    assert iteration.plans == [request.plan]  # its tokens were promised
    assert (iteration.followed, iteration.progress, request.block_ids) == ([], [], [])


def test_a_position_that_was_told_late_catches_up_by_one_token():
    # The overlap scheduler tells it one token late, but where it has left the request out of an iteration.
    request = followed()
    for position, written in ((99, 100), (101, 102), (102, 103)):
        told(request, position, 1)
        assert request.written_tokens == written


@pytest.mark.parametrize(("position", "scheduled"), [(102, 1), (101, 2), (100, 2), (100, -1), (-1, 1), (10**9, 1)])
def test_steps_that_cannot_be(position, scheduled):
    request = followed()
    with pytest.raises(ValueError, match=r"tokens .* are scheduled; 100 are written, 101 can be"):
        told(request, position, scheduled)
    assert request.written_tokens == PROMPT


@given(st.lists(st.tuples(st.integers(-3, 130), st.integers(-3, 130)), max_size=8))
def test_no_schedule_makes_more_written_than_was_computed(schedule):
    request, most, is_first = tracked(), 0, True
    for position, scheduled in schedule:
        try:
            told(request, position, scheduled, is_first=is_first)
        except ValueError:
            continue
        # A token a step, and one that was told late.
        most = max(most, PROMPT) + min(2, max(0, request.written_tokens - max(most, PROMPT)))
        assert 0 <= request.written_tokens <= most
        is_first = False


@pytest.mark.parametrize(
    "blocks", [BLOCKS[:-1], BLOCKS[::-1], [*BLOCKS[:5], 3, *BLOCKS[6:]], [3, *BLOCKS], [-1] * 13, ["50"] * 13]
)
def test_a_request_that_ends_with_other_blocks_is_not_saved(blocks):
    with pytest.raises(ValueError, match="request 7 ends with other blocks than it was scheduled with"):
        savable_tokens(followed(), blocks, BLOCK)


def test_deltas_that_are_told_twice_are_not_saved():
    request = followed()
    told(request, 100, 1, [3])
    told(request, 100, 1, [3])
    for position in range(101, 113):
        told(request, position, 1, [4] * (position == 112))
    with pytest.raises(ValueError, match="other blocks"):
        savable_tokens(request, [*BLOCKS, 3, 4], BLOCK)


def test_a_request_without_blocks_or_that_nobody_follows_is_not_saved():
    assert savable_tokens(followed(), [], BLOCK) == 0
    request = followed()
    request.is_followed = False
    assert savable_tokens(request, BLOCKS, BLOCK) == 0


@pytest.mark.parametrize("blocks", [[1.5] * 13, ["1"] * 13, [None] * 13, [-1] * 13, [5] * 13, BLOCKS[:2]])
def test_blocks_that_fit_no_plan_leave_it_without(blocks):
    request = tracked(matched=30)
    settle_allocation(request, SimpleNamespace(), blocks)
    assert (request.load_failed, request.plan.target_block_ids) == (True, None)
