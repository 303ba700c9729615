"""Every layer computes what plans and their checks leave to compute, and nothing else."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_wrapper.batch import EngineForward
from engine_wrapper.token_schedule import SequenceSlice, works_of
from kernels.layout import KvGeometry
from semblend_trt.errors import PlanError
from semblend_trt.plan import SpanCheck
from semblend_trt.ranks import Ranks

NUM_LAYERS, BLOCK_SIZE = 5, 8
SIZES = {"num_layers": NUM_LAYERS, "block_size": BLOCK_SIZE}


def tokens_of(length, request_id=1):
    """Distinct tokens, so that a token in the wrong place is seen."""
    return tuple(1000 * request_id + position for position in range(length))


def slice_of(plan, length=None):
    end = plan.prompt_length if length is None else plan.prefix_end + length
    tokens = tuple(plan.prompt_token_ids[plan.prefix_end : end].tolist())
    blocks = tuple(range(100 * plan.request_id, 100 * plan.request_id + 12))
    return SequenceSlice(plan.request_id, plan.prefix_end, tokens, blocks, plan)


checks = st.builds(
    SpanCheck,
    st.integers(0, NUM_LAYERS - 1),
    st.just(0.5),
    max_span_share=st.sampled_from([0.3, 1.0]),
    min_saved_share=st.sampled_from([0.0, 0.4]),
)
# Of a request; `deviating` are the positions whose donor KV is unlike the fresh one.
requests = st.builds(
    SimpleNamespace,
    num_computed=st.integers(0, 9),
    cuts=st.lists(st.integers(0, 7), max_size=6).map(tuple),
    exact=st.frozensets(st.integers(0, 2), max_size=2),
    head=st.integers(0, 3),
    boundary=st.integers(0, NUM_LAYERS),
    check=st.none() | checks,
    deviating=st.frozensets(st.integers(0, 40), max_size=12),
    suffix=st.integers(1, 6),
    slice_length=st.integers(1, 6),
    has_plan=st.booleans(),
)


def drawn_slice(drawn, request_id, make_plan):
    """`cuts` are lengths, of a hole and of a span in turn."""
    position, spans = drawn.num_computed, []
    for index, length in enumerate(drawn.cuts):
        if index % 2 and length:
            spans.append((position, position + length))
        position += length
    tokens = tokens_of(position + drawn.suffix, request_id)
    plan = make_plan(
        tokens, spans, request_id=request_id, boundary=drawn.boundary, num_computed=drawn.num_computed,
        prefix_end=position, exact=drawn.exact, check=drawn.check, head=drawn.head, **SIZES,
    )  # fmt: skip
    slice_ = slice_of(plan, min(drawn.slice_length, drawn.suffix))
    return slice_ if drawn.has_plan else replace(slice_, plan=None)


def exact_positions(plan):
    return {p for span in plan.spans if span.exact for p in range(span.target_start, span.target_end)}


def widened(plan, skipped, keys_per_row):
    """The positions of short gaps; a plan's slice follows its promise."""
    computed = set(range(plan.num_computed_tokens, plan.prefix_end + 1)) - exact_positions(plan) - skipped
    found = set()
    for position in skipped if keys_per_row else ():
        low = next(p for p in itertools.count(position, -1) if p not in skipped)
        high = next(p for p in itertools.count(position) if p not in skipped)
        if {low, high} <= computed and (high - low - 1) * keys_per_row <= high:
            found.add(position)
    return found


def decide(plan, deviating, keys_per_row):
    """What the plan's check decides, position by position."""
    check, head = plan.execution.check, plan.execution.head_tokens
    checked, computed = [], set()
    for span in plan.spans:
        own = [] if span.exact else list(range(span.target_start + head, span.target_end))
        found = [position for position in own if position in deviating]
        checked += own
        computed.update(own if len(found) > check.max_span_share * len(own) else found)
    computed |= widened(plan, set(checked) - computed, keys_per_row)
    saved = len(exact_positions(plan)) + len(checked) - len(computed)
    is_dropped = saved == 0 or saved < check.min_saved_share * plan.matched_tokens
    computed_above = set(checked) if is_dropped else computed
    return SimpleNamespace(computed_above=computed_above, checked=checked, is_dropped=is_dropped)


def expected_rows(slice_, deviating, keys_per_row, layer):
    """Positions whose K and V are computed in `layer`, and those that go through its attention."""
    own, plan = list(range(slice_.begin, slice_.end)), slice_.plan
    if plan is None:
        return own, own
    head, check = plan.execution.head_tokens, plan.execution.check
    promised = [p for p in range(plan.num_computed_tokens, slice_.begin) if p not in exact_positions(plan)]
    placed = {p for span in plan.spans if not span.exact for p in range(span.target_start + head, span.target_end)}
    lowest = written_below = plan.execution.recompute_boundary_layer
    if plan.is_checked and check is not None:
        placed -= decide(plan, deviating, keys_per_row).computed_above
        lowest, written_below = max(lowest, check.layer), max(lowest, check.layer + 1)
    else:
        placed -= widened(plan, placed, keys_per_row)
    written = [p for p in promised if layer < written_below or p not in placed] + own
    attending = [p for p in promised if layer < lowest or p not in placed] + own
    return written, attending


class Walk:
    """An engine that computes nothing. It notes by layer and request which positions are written, and which attend."""

    def __init__(self, drawn):
        self.drawn, self.rows = drawn, []
        self.written, self.attending = ([[[] for _ in drawn] for _ in range(NUM_LAYERS)] for _ in range(2))

    def note(self, layers, stage):
        for found in layers:
            for sequence in stage.sequences:
                found[sequence.block_ids[0] // 100 - 1] += sequence.positions.tolist()

    def follow(self, schedule, active):
        """Walks up to a check or the end; returns position and token of each row that is active there."""
        for stage, layers in schedule.layers_of_stages(NUM_LAYERS):
            if stage.keep is not None:
                kept = stage.keep.tolist()
                assert kept == sorted(set(kept))
                assert len(kept) < len(active)
                active = [active[row] for row in kept]
            first_rows = itertools.accumulate((each.count for each in stage.sequences), initial=0)
            assert [each.first_row for each in stage.sequences] == list(first_rows)[:-1]
            assert [p for each in stage.sequences for p in each.positions.tolist()] == [p for p, _ in active]
            for layer in layers:
                self.note((self.attending[layer], self.written[layer]), stage)
        if schedule.check is not None:
            self.note([self.written[schedule.check.layer]], stage)
        return active

    def enter(self, schedule):
        self.rows.append(len(schedule.positions))
        assert schedule.stages[0].keep is None
        return self.follow(schedule, list(zip(schedule.positions.tolist(), schedule.token_ids.tolist(), strict=True)))

    def deviations(self, check):
        """What the device would find: 1 at deviating positions, 0 elsewhere; wrong rows would show."""
        values = []
        for work in check.works:
            if work.pending is not None and work.pending.check.layer == check.layer:
                deviating = self.drawn[work.block_ids[0] // 100 - 1].deviating
                values += [float(position in deviating) for position in work.positions[work.pending.checked]]
        return torch.tensor(values)

    def lowest(self, schedule):
        self.enter(schedule)
        return self.deviations(schedule.check)

    def run(self, schedule, sink):
        active = self.enter(schedule)
        while schedule.check is not None:
            schedule, found = schedule.check.decide(self.deviations(schedule.check))
            for each in found:
                sink(each)
            active = self.follow(schedule, active)
        return torch.tensor([active[row] for row in schedule.output_rows.tolist()])


@settings(max_examples=200)
@given(
    drawn=st.lists(requests, min_size=1, max_size=4),
    keys_per_row=st.sampled_from([0, 1, 4, 12, 30]),
    max_rows=st.none() | st.integers(1, 60),
)
def test_every_layer_computes_what_the_checks_leave(drawn, keys_per_row, max_rows, make_plan):
    """In one forward or in several of at most `max_rows` rows, in which rows may run their lowest layers again."""
    slices = [drawn_slice(each, number, make_plan) for number, each in enumerate(drawn, 1)]
    walk, found = Walk(drawn), []
    works = works_of(slices, NUM_LAYERS, keys_per_row)
    forward = EngineForward(KvGeometry(NUM_LAYERS, 1, 2, BLOCK_SIZE), Ranks(), walk.run, walk.lowest, max_rows)
    outputs = forward.hidden(works, torch.device("cpu"), found.append).tolist()
    assert outputs == [[each.begin + at, token] for each in slices for at, token in enumerate(each.token_ids)]
    assert max_rows is None or max(walk.rows) <= max_rows
    for index, (slice_, request) in enumerate(zip(slices, drawn, strict=True)):
        for layer in range(NUM_LAYERS):
            written, attending = expected_rows(slice_, request.deviating, keys_per_row, layer)
            assert set(walk.written[layer][index]) == set(written)
            if len(walk.rows) == 1:
                assert walk.attending[layer][index] == attending
    checked = [slice_ for slice_ in slices if slice_.plan is not None and slice_.plan.is_checked]
    assert sorted(evidence.request_id for evidence in found) == [slice_.request_id for slice_ in checked]
    for evidence in found:
        number = evidence.request_id - 1
        check_evidence(evidence, slices[number].plan, drawn[number].deviating, keys_per_row)


def check_evidence(evidence, plan, deviating, keys_per_row):
    expected = decide(plan, deviating, keys_per_row)
    assert evidence.offered_tokens == sum(span.length for span in plan.spans)
    assert evidence.checked_tokens == len(expected.checked)
    kept = len(expected.checked) - len(expected.computed_above)
    assert evidence.reused_tokens == len(exact_positions(plan)) + kept
    assert evidence.reused_tokens + evidence.recomputed_tokens == evidence.offered_tokens
    assert (evidence.is_dropped, evidence.largest_kept) == (expected.is_dropped, 0.0)


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        ({"begin": 21}, "slice_not_at_prefix"),
        ({"begin": 4}, "slice_not_at_prefix"),
        ({"token_ids": (5, 6, 7)}, "plan_of_another_prompt"),
    ],
)
def test_a_plan_that_does_not_fit_its_slice_is_refused(make_plan, change, invariant):
    plan = make_plan(tokens_of(30), [(4, 20)], **SIZES)
    with pytest.raises(PlanError) as refusal:
        works_of([replace(slice_of(plan), **change)], NUM_LAYERS)
    assert refusal.value.reason == invariant
