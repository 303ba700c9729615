"""Courses with checkpoints: whatever the checks find, every layer computes what it must and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_wrapper.layer_schedule import LayerSchedule, SequenceSlice, build_schedule, schedule_of, works_of
from semblend_trt.plan import SemanticKvPlan, SpanCheck

if TYPE_CHECKING:
    from engine_wrapper.course import Checkpoint, Course
    from semblend_trt.plan import CheckEvidence

PlanMaker = Callable[..., SemanticKvPlan]

NUM_LAYERS, BLOCK_SIZE = 5, 8


@dataclass(frozen=True)
class Drawn:
    """One request drawn at random; `deviating` are the positions whose donor KV is unlike the fresh one."""

    num_computed: int
    cuts: tuple[int, ...]
    exact: frozenset[int]
    head: int
    boundary: int
    check: SpanCheck | None
    deviating: frozenset[int]
    suffix: int
    has_plan: bool


checks = st.builds(
    SpanCheck,
    st.integers(0, NUM_LAYERS - 1),
    st.just(0.5),
    max_span_share=st.sampled_from([0.3, 1.0]),
    min_saved_share=st.sampled_from([0.0, 0.4]),
)
requests = st.builds(
    Drawn,
    num_computed=st.integers(0, 9),
    cuts=st.lists(st.integers(0, 7), max_size=6).map(tuple),
    exact=st.frozensets(st.integers(0, 2), max_size=2),
    head=st.integers(0, 3),
    boundary=st.integers(0, NUM_LAYERS),
    check=st.none() | checks,
    deviating=st.frozensets(st.integers(0, 40), max_size=12),
    suffix=st.integers(1, 6),
    has_plan=st.booleans(),
)


def tokens_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple((seed * 100 + position) % 997 for position in range(length))


def slice_of(drawn: Drawn, request_id: int, make_plan: PlanMaker) -> SequenceSlice:
    """`cuts` are lengths, of a hole and of a span in turn."""
    position, spans = drawn.num_computed, []
    for index, length in enumerate(drawn.cuts):
        if index % 2 and length:
            spans.append((position, position + length))
        position += length
    tokens = tokens_of(position + drawn.suffix, request_id)
    plan = make_plan(
        tokens, spans, num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, request_id=request_id, boundary=drawn.boundary,
        num_computed=drawn.num_computed, prefix_end=position, exact=drawn.exact, check=drawn.check, head=drawn.head,
    )  # fmt: skip
    return SequenceSlice(request_id, position, tokens[position:], tuple(range(12)), plan if drawn.has_plan else None)


@dataclass
class Expected:
    """One plan's check, position by position."""

    computed_above: set[int]
    checked: list[int]
    is_dropped: bool


def widened(plan: SemanticKvPlan, skipped: set[int], keys_per_row: int) -> set[int]:
    """The positions of short gaps; a plan's slice follows its promise."""
    exact = {p for span in plan.spans if span.exact for p in range(span.target_start, span.target_end)}
    computed = set(range(plan.num_computed_tokens, plan.prefix_end + 1)) - exact - skipped
    found: set[int] = set()
    if not keys_per_row:
        return found
    for position in skipped:
        low = next(p for p in itertools.count(position, -1) if p not in skipped)
        high = next(p for p in itertools.count(position) if p not in skipped)
        if {low, high} <= computed and (high - low - 1) * keys_per_row <= high:
            found.add(position)
    return found


def decide(plan: SemanticKvPlan, deviating: frozenset[int], keys_per_row: int) -> Expected:
    check, head = plan.execution.check, plan.execution.head_tokens
    assert check is not None
    checked, computed = [], set()
    for span in plan.spans:
        own = [] if span.exact else list(range(span.target_start + head, span.target_end))
        found = [position for position in own if position in deviating]
        checked += own
        computed.update(own if len(found) > check.max_span_share * len(own) else found)
    computed |= widened(plan, set(checked) - computed, keys_per_row)
    exact = sum(span.length for span in plan.spans if span.exact)
    saved = exact + len(checked) - len(computed)
    is_dropped = saved == 0 or saved < check.min_saved_share * plan.matched_tokens
    return Expected(set(checked) if is_dropped else computed, checked, is_dropped)


def expected_rows(
    piece: SequenceSlice, deviating: frozenset[int], keys_per_row: int, layer: int
) -> tuple[list[int], list[int]]:
    """Positions whose K and V are computed in `layer`, and those that go through its attention."""
    own, plan = list(range(piece.begin, piece.end)), piece.plan
    if plan is None:
        return own, own
    head, check = plan.execution.head_tokens, plan.execution.check
    promised = range(plan.num_computed_tokens, piece.begin)
    exact = {p for span in plan.spans if span.exact for p in range(span.target_start, span.target_end)}
    placed = {p for span in plan.spans if not span.exact for p in range(span.target_start + head, span.target_end)}
    lowest, written_below = plan.execution.recompute_boundary_layer, plan.execution.recompute_boundary_layer
    if plan.is_checked and check is not None:
        placed -= decide(plan, deviating, keys_per_row).computed_above
        lowest, written_below = max(lowest, check.layer), max(lowest, check.layer + 1)
    else:
        placed -= widened(plan, placed, keys_per_row)
    written = [p for p in promised if p not in exact and (layer < written_below or p not in placed)] + own
    attending = [p for p in promised if p not in exact and (layer < lowest or p not in placed)] + own
    return written, attending


def deviations_of(checkpoint: Checkpoint, drawn: list[Drawn]) -> torch.Tensor:
    """What the device would find: 1 at deviating positions, 0 elsewhere; wrong rows would show."""
    values = []
    for work, request in zip(checkpoint.works, drawn, strict=True):
        pending = work.open_check
        if pending is not None and pending.check.layer == checkpoint.layer:
            values += [float(int(work.positions[row]) in request.deviating) for rows in pending.rows for row in rows]
    return torch.tensor(values)


@given(drawn=st.lists(requests, min_size=1, max_size=4), keys_per_row=st.sampled_from([0, 1, 4, 12, 30]))
def test_every_layer_computes_what_the_checks_leave(
    drawn: list[Drawn], keys_per_row: int, make_plan: PlanMaker
) -> None:
    pieces = [slice_of(request, index, make_plan) for index, request in enumerate(drawn, start=1)]
    schedule = schedule_of(works_of(pieces, NUM_LAYERS, keys_per_row), NUM_LAYERS)
    written, attending, found, last = follow(schedule, drawn)
    for index, (piece, request) in enumerate(zip(pieces, drawn, strict=True)):
        for layer in range(NUM_LAYERS):
            wanted_written, wanted_attending = expected_rows(piece, request.deviating, keys_per_row, layer)
            assert attending[layer][index] == wanted_attending
            assert written[layer][index] == wanted_written
    outputs = [position for piece in pieces for position in range(piece.begin, piece.end)]
    rows = [position for positions in attending[-1] for position in positions]
    assert [rows[row] for row in last.output_rows.tolist()] == outputs
    assert sorted(evidence.request_id for evidence in found) == [
        piece.request_id for piece in pieces if piece.plan is not None and piece.plan.is_checked
    ]
    for evidence in found:
        number = evidence.request_id - 1
        check_evidence(evidence, pieces[number].plan, drawn[number].deviating, keys_per_row)


def check_evidence(
    evidence: CheckEvidence, plan: SemanticKvPlan | None, deviating: frozenset[int], keys_per_row: int
) -> None:
    assert plan is not None
    expected = decide(plan, deviating, keys_per_row)
    exact = sum(span.length for span in plan.spans if span.exact)
    assert evidence.offered_tokens == sum(span.length for span in plan.spans)
    assert evidence.checked_tokens == len(expected.checked)
    assert evidence.reused_tokens == exact + len(expected.checked) - len(expected.computed_above)
    assert evidence.reused_tokens + evidence.recomputed_tokens == evidence.offered_tokens
    assert evidence.is_dropped == expected.is_dropped
    assert evidence.largest_kept == 0.0


Layers = list[list[list[int]]]


def follow(schedule: LayerSchedule, drawn: list[Drawn]) -> tuple[Layers, Layers, list[CheckEvidence], Course]:
    """Walks as a forward does; of each layer and request the positions written and those that attend."""
    course: Course = schedule
    written: Layers = [[] for _ in range(NUM_LAYERS)]
    attending: Layers = [[] for _ in range(NUM_LAYERS)]
    evidence: list[CheckEvidence] = []
    active = schedule.positions.tolist()
    while True:
        for stage, layers in course.layers_of_stages(NUM_LAYERS):
            if stage.keep is not None:
                active = [active[row] for row in stage.keep.tolist()]
            of_requests = [sequence.positions.tolist() for sequence in stage.sequences]
            # Rows keep their order, and the sequences cover them without a gap.
            assert [position for positions in of_requests for position in positions] == active
            assert [sequence.first_row for sequence in stage.sequences] == [
                sum(map(len, of_requests[:index])) for index in range(len(of_requests))
            ]
            for layer in layers:
                attending[layer] = of_requests
                written[layer] = written[layer] or of_requests
        if course.checkpoint is None:
            return written, attending, evidence, course
        written[course.checkpoint.layer] = of_requests
        course, found = course.checkpoint.decide(deviations_of(course.checkpoint, drawn))
        evidence += found


def test_last_rows_survive_a_checkpoint(make_plan: PlanMaker) -> None:
    plan = make_plan(tokens_of(30, 1), [(4, 20)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, check=SpanCheck(2, 0.5))
    pieces = [
        SequenceSlice(1, 20, tokens_of(30, 1)[20:], tuple(range(4)), plan),
        SequenceSlice(2, 7, (3,), tuple(range(4))),
    ]
    schedule = build_schedule(pieces, NUM_LAYERS).last_rows([10, 1])
    assert schedule.checkpoint is not None
    course, _ = schedule.checkpoint.decide(torch.zeros(16))
    # 4 rows of a hole, 10 of the slice, 1 of the decode step.
    assert course.output_rows.tolist() == [13, 14]


def test_the_deviations_are_of_the_rows_positions_and_blocks(make_plan: PlanMaker) -> None:
    """Planted: fresh K and V differ from the pool at known positions of two requests, in both tensors in turn."""
    from kernels.layout import KvGeometry, pool_view
    from kernels.sparse_prefill import write_rows

    geometry = KvGeometry(NUM_LAYERS, 2, 16, BLOCK_SIZE)
    pool = torch.full((12, NUM_LAYERS, 2, geometry.row_elements), float("nan"))
    check = SpanCheck(1, 0.5)
    first = make_plan(
        tokens_of(30, 1), [(2, 6), (8, 20)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, check=check, exact={0}
    )
    second = make_plan(
        tokens_of(26, 2), [(9, 24)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, request_id=2, num_computed=8,
        check=check, head=2,
    )  # fmt: skip
    pieces = [
        SequenceSlice(1, 20, tokens_of(30, 1)[20:], (7, 2, 0, 9), first),
        SequenceSlice(3, 3, (5,), (4,)),
        SequenceSlice(2, 24, tokens_of(26, 2)[24:], (1, 11, 3, 8), second),
    ]
    schedule = build_schedule(pieces, NUM_LAYERS)
    rows = schedule.stages[0].num_rows
    generator = torch.Generator().manual_seed(0)
    # As in a fused layer: keys and values are views of the same rows.
    heads = torch.randn(rows, 4 + 2 + 2, 16, generator=generator)
    _, keys, values = heads.split([4, 2, 2], 1)
    write_rows(keys, values, pool, 1, schedule.stages[0].sequences, geometry)
    view = pool_view(pool, geometry)
    view[2, 1, 0, :, 9 % BLOCK_SIZE] *= 2  # request 1, position 9, K
    view[3, 1, 1, :, 20 % BLOCK_SIZE] *= 4  # request 2, position 20, V
    assert schedule.checkpoint is not None
    found = schedule.checkpoint.deviations(keys, values, pool, geometry)
    wanted = torch.zeros(12 + 13)
    wanted[9 - 8] = 0.5
    wanted[12 + 20 - 11] = 0.75
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
