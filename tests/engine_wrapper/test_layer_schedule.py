"""The schedule computes what a plan leaves to compute, in each layer, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_wrapper.layer_schedule import LayerSchedule, SequenceSlice, build_schedule
from semblend_trt.errors import PlanError
from semblend_trt.plan import PlanKind, SemanticKvPlan

NUM_LAYERS = 5
BLOCK_SIZE = 8

PlanMaker = Callable[..., SemanticKvPlan]


def prompt(length: int, request_id: int = 1) -> tuple[int, ...]:
    """Distinct tokens, so that a token in the wrong place is seen."""
    return tuple(1000 * request_id + position for position in range(length))


def blocks(request_id: int) -> tuple[int, ...]:
    return tuple(range(100 * request_id, 100 * request_id + 12))


def slice_of(plan: SemanticKvPlan, length: int | None = None) -> SequenceSlice:
    end = plan.prompt_length if length is None else plan.prefix_end + length
    tokens = plan.prompt_token_ids[plan.prefix_end : end]
    return SequenceSlice(plan.request_id, plan.prefix_end, tokens, blocks(plan.request_id), plan)


def positions_by_layer(schedule: LayerSchedule, sequence: int) -> list[list[int]]:
    """The positions of one sequence in each layer."""
    layers: list[list[int]] = []
    ends = [*(stage.first_layer for stage in schedule.stages[1:]), NUM_LAYERS]
    for stage, end in zip(schedule.stages, ends, strict=True):
        layers += [stage.sequences[sequence].positions.tolist()] * (end - stage.first_layer)
    return layers


def expected_positions(piece: SequenceSlice, layer: int) -> list[int]:
    own = list(range(piece.begin, piece.end))
    plan = piece.plan
    if plan is None or plan.kind is PlanKind.DISCOVERY_ONLY:
        return own
    promised, head = range(plan.num_computed_tokens, piece.begin), plan.execution.head_tokens
    exact = {p for span in plan.spans if span.exact for p in range(span.target_start, span.target_end)}
    placed = {p for span in plan.spans if not span.exact for p in range(span.target_start + head, span.target_end)}
    if layer < plan.execution.recompute_boundary_layer:
        placed = set()
    return [p for p in promised if p not in exact | placed] + own


def check_schedule(slices: list[SequenceSlice], schedule: LayerSchedule) -> None:
    """Everything that must hold of the schedule of any slices."""
    for index, piece in enumerate(slices):
        layers = positions_by_layer(schedule, index)
        assert layers == [expected_positions(piece, layer) for layer in range(NUM_LAYERS)]
        assert all(set(above) <= set(below) for below, above in itertools.pairwise(layers))
    rows = list(zip(schedule.positions.tolist(), schedule.token_ids.tolist(), strict=True))
    for stage in schedule.stages:
        if stage.keep is not None:
            assert stage.keep.tolist() == sorted(stage.keep.tolist())
            assert stage.keep.numel() < len(rows)
            rows = [rows[row] for row in stage.keep.tolist()]
        assert stage.num_rows == len(rows)
        first_row = 0
        for sequence, piece in zip(stage.sequences, slices, strict=True):
            assert sequence.first_row == first_row
            assert sequence.block_ids.tolist() == list(piece.block_ids)
            assert sequence.positions.tolist() == [p for p, _ in rows[first_row : first_row + sequence.count]]
            first_row += sequence.count
    outputs = [rows[row] for row in schedule.output_rows.tolist()]
    wanted = [(piece.begin + i, token) for piece in slices for i, token in enumerate(piece.token_ids)]
    assert outputs == wanted
    first_layers = [stage.first_layer for stage in schedule.stages]
    assert first_layers[0] == 0
    assert first_layers == sorted(set(first_layers))
    assert schedule.stages[0].keep is None


def test_without_plans_one_stage_computes_every_row() -> None:
    slices = [
        SequenceSlice(1, 0, prompt(9), blocks(1)),
        SequenceSlice(2, 16, prompt(4, 2), blocks(2)),
        SequenceSlice(3, 30, (7,), blocks(3)),
    ]
    schedule = build_schedule(slices, NUM_LAYERS)
    assert len(schedule.stages) == 1
    assert schedule.positions.tolist() == [*range(9), *range(16, 20), 30]
    assert schedule.output_rows.tolist() == list(range(14))
    check_schedule(slices, schedule)


@pytest.mark.parametrize("boundary", range(NUM_LAYERS + 1))
def test_each_boundary(make_plan: PlanMaker, boundary: int) -> None:
    plan = make_plan(
        prompt(40),
        [(10, 18), (20, 33)],
        num_layers=NUM_LAYERS,
        block_size=BLOCK_SIZE,
        boundary=boundary,
        num_computed=8,
    )
    pieces = [slice_of(plan)]
    schedule = build_schedule(pieces, NUM_LAYERS)
    check_schedule(pieces, schedule)
    # Positions 8, 9, 18, 19 are holes and 33..39 the suffix.
    all_rows, few_rows = 40 - 8, 4 + 7
    expected = {0: [few_rows], NUM_LAYERS: [all_rows]}.get(boundary, [all_rows, few_rows])
    assert [stage.num_rows for stage in schedule.stages] == expected


def test_plans_with_different_boundaries_share_one_batch(make_plan: PlanMaker) -> None:
    first = make_plan(prompt(30), [(4, 20)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=3)
    second = make_plan(
        prompt(50, 2), [(16, 32)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, request_id=2, boundary=1,
        num_computed=16,
    )  # fmt: skip
    third = make_plan(prompt(20, 3), [(0, 9)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, request_id=3)
    pieces = [
        slice_of(first),
        SequenceSlice(4, 25, (11,), blocks(4)),
        slice_of(second, length=3),
        slice_of(third, length=1),
        SequenceSlice(5, 8, prompt(5, 5), blocks(5)),
    ]
    schedule = build_schedule(pieces, NUM_LAYERS)
    assert [stage.first_layer for stage in schedule.stages] == [0, 1, 3]
    check_schedule(pieces, schedule)


def test_exact_spans_are_computed_in_no_layer(make_plan: PlanMaker) -> None:
    plan = make_plan(
        prompt(40), [(8, 18), (20, 33)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=2, num_computed=8,
        exact={0},
    )  # fmt: skip
    schedule = build_schedule([slice_of(plan)], NUM_LAYERS)
    check_schedule([slice_of(plan)], schedule)
    assert [stage.num_rows for stage in schedule.stages] == [2 + 13 + 7, 2 + 7]


@pytest.mark.parametrize("head", [0, 3, 8, 100])
def test_heads_of_spans_are_computed_in_every_layer(make_plan: PlanMaker, head: int) -> None:
    plan = make_plan(
        prompt(40), [(10, 18), (20, 33)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, num_computed=8, head=head
    )
    schedule = build_schedule([slice_of(plan)], NUM_LAYERS)
    check_schedule([slice_of(plan)], schedule)
    assert [stage.num_rows for stage in schedule.stages] == [4 + min(head, 8) + min(head, 13) + 7]


def test_a_plan_that_lost_its_spans_computes_the_whole_promise(make_plan: PlanMaker) -> None:
    plan = make_plan(
        prompt(30), [(4, 20)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=2, num_computed=2
    ).without_spans("donor_unavailable")
    pieces = [slice_of(plan)]
    schedule = build_schedule(pieces, NUM_LAYERS)
    check_schedule(pieces, schedule)
    assert len(schedule.stages) == 1
    assert schedule.positions.tolist() == list(range(2, 30))


def test_a_discovery_plan_changes_nothing(make_plan: PlanMaker) -> None:
    plan = make_plan(
        prompt(30), [(4, 20)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=2, kind=PlanKind.DISCOVERY_ONLY
    )
    piece = slice_of(plan)
    bare = build_schedule([replace(piece, plan=None)], NUM_LAYERS)
    schedule = build_schedule([piece], NUM_LAYERS)
    assert len(schedule.stages) == 1
    assert torch.equal(schedule.positions, bare.positions)


@dataclass(frozen=True)
class Shape:
    """One request drawn at random."""

    num_computed: int
    cuts: tuple[int, ...]
    suffix: int
    slice_length: int
    boundary: int
    head: int
    exact: frozenset[int]
    has_plan: bool


shapes = st.builds(
    Shape,
    num_computed=st.integers(0, 20),
    cuts=st.lists(st.integers(0, 9), min_size=0, max_size=6).map(tuple),
    suffix=st.integers(1, 12),
    slice_length=st.integers(1, 12),
    boundary=st.integers(0, NUM_LAYERS),
    head=st.integers(0, 4),
    exact=st.frozensets(st.integers(0, 2), max_size=2),
    has_plan=st.booleans(),
)


def piece_from(shape: Shape, request_id: int, make_plan: PlanMaker) -> SequenceSlice:
    """`cuts` are lengths, of a hole and of a span in turn."""
    position, spans = shape.num_computed, []
    for index, length in enumerate(shape.cuts):
        if index % 2 and length:
            spans.append((position, position + length))
        position += length
    tokens = prompt(position + shape.suffix, request_id)
    plan = make_plan(
        tokens, spans, num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, request_id=request_id, boundary=shape.boundary,
        num_computed=shape.num_computed, prefix_end=position, head=shape.head, exact=shape.exact,
    )  # fmt: skip
    piece = slice_of(plan, min(shape.slice_length, shape.suffix))
    return piece if shape.has_plan else replace(piece, plan=None)


@given(drawn=st.lists(shapes, min_size=1, max_size=5))
def test_any_batch(drawn: list[Shape], make_plan: PlanMaker) -> None:
    pieces = [piece_from(shape, request_id, make_plan) for request_id, shape in enumerate(drawn, start=1)]
    check_schedule(pieces, build_schedule(pieces, NUM_LAYERS))


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        ({"begin": 21}, "slice_not_at_prefix"),
        ({"begin": 4}, "slice_not_at_prefix"),
        ({"request_id": 2}, "plan_of_another_request"),
        ({"token_ids": (5, 6, 7)}, "plan_of_another_prompt"),
        ({"token_ids": ()}, "slice_empty"),
    ],
)
def test_a_plan_that_does_not_fit_its_slice_is_refused(
    make_plan: PlanMaker, change: dict[str, Any], invariant: str
) -> None:
    plan = make_plan(prompt(30), [(4, 20)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE)
    with pytest.raises(PlanError) as refusal:
        build_schedule([replace(slice_of(plan), **change)], NUM_LAYERS)
    assert refusal.value.invariant == invariant


def test_a_plan_for_another_model_is_refused(make_plan: PlanMaker) -> None:
    plan = make_plan(prompt(30), [(4, 20)], num_layers=NUM_LAYERS + 1, block_size=BLOCK_SIZE)
    with pytest.raises(PlanError, match="made for 6 layers; this model has 5"):
        build_schedule([slice_of(plan)], NUM_LAYERS)


def test_nothing_to_run_is_refused() -> None:
    with pytest.raises(PlanError, match="nothing to run"):
        build_schedule([], NUM_LAYERS)
