"""One runtime an engine; a plan in it runs once, and a layer is waited for once."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt import runtime as runtime_module
from semblend_trt.plan import (
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    SemanticKvPlan,
)
from semblend_trt.runtime import MAX_NEWS, ActivePlans, LayerReadiness, Runtime, SavedDonor, runtime_for


class LlmArgs:
    """Equal to every other one, as two engines' arguments may well be."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LlmArgs)

    __hash__ = None  # type: ignore[assignment]


class Engine:
    def __init__(self, llm_args: LlmArgs) -> None:
        self.llm_args = llm_args
        self.itself: Any = self


def test_same_arguments_share_a_runtime_and_equal_ones_do_not() -> None:
    first, second = LlmArgs(), LlmArgs()
    assert runtime_for(first) is runtime_for(first)
    assert runtime_for(first) is not runtime_for(second)


def test_fresh_runtime_promises_only_what_a_stock_engine_can() -> None:
    llm_args = LlmArgs()
    runtime = runtime_for(llm_args)
    assert runtime.mode is EngineMode.STOCK
    assert not runtime.publication_guard
    assert runtime.engine is None
    assert runtime.pool is None
    assert len(runtime.active_plans) == 0


def test_news_that_nobody_reads_do_not_pile_up() -> None:
    llm_args = LlmArgs()
    runtime = runtime_for(llm_args)
    for number in range(MAX_NEWS + 3):
        runtime.saved.append(SavedDonor(str(number), 1))
        runtime.failed_loads.append(number)
    assert len(runtime.saved) == len(runtime.failed_loads) == runtime.evidence.maxlen == MAX_NEWS
    assert runtime.saved[-1].donor_id == str(MAX_NEWS + 2)


class Scheduler:
    """Reads the news of a runtime, or fails."""

    def __init__(self, runtime: Runtime, *, fails: bool = False) -> None:
        self.runtime, self.fails, self.read = runtime, fails, list[str]()
        self.prepared = 0

    def prepare(self) -> None:
        self.prepared += 1

    def drain(self) -> None:
        if self.fails:
            raise KeyError("news")
        while self.runtime.saved:
            self.read.append(self.runtime.saved.popleft().donor_id)


def test_news_are_read_as_they_come_as_long_as_there_is_a_reader() -> None:
    llm_args = LlmArgs()
    runtime = runtime_for(llm_args)
    runtime.saved.append(SavedDonor("before", 1))
    runtime.news_came()
    scheduler = Scheduler(runtime)
    runtime.read_by(scheduler.drain)
    runtime.saved.append(SavedDonor("behind", 1))
    runtime.news_came()
    assert scheduler.read == ["before", "behind"]
    del scheduler
    runtime.saved.append(SavedDonor("unread", 1))
    runtime.news_came()
    assert [news.donor_id for news in runtime.saved] == ["unread"]


def test_a_reader_that_fails_is_counted() -> None:
    llm_args = LlmArgs()
    runtime = runtime_for(llm_args)
    scheduler = Scheduler(runtime, fails=True)
    runtime.read_by(scheduler.drain)
    runtime.saved.append(SavedDonor("unread", 1))
    runtime.news_came()
    assert runtime.faults == {"saved_news": 1}


def test_the_scheduler_prepares_when_the_caches_are_registered() -> None:
    llm_args = LlmArgs()
    runtime = runtime_for(llm_args)
    runtime.caches_registered()  # a rank without a scheduler
    scheduler = Scheduler(runtime)
    runtime.read_by(scheduler.drain, scheduler.prepare)
    runtime.caches_registered()
    assert scheduler.prepared == 1


def test_runtime_ends_with_its_arguments() -> None:
    llm_args = LlmArgs()
    gone = weakref.ref(runtime_for(llm_args).active_plans)
    before = len(runtime_module._runtimes)
    del llm_args
    gc.collect()
    assert gone() is None
    assert len(runtime_module._runtimes) < before


def test_engine_that_holds_its_arguments_does_not_keep_them() -> None:
    llm_args = LlmArgs()
    engine = Engine(llm_args)
    runtime_for(llm_args).engine = engine
    assert runtime_for(llm_args).engine is engine
    gone = weakref.ref(llm_args)
    del llm_args, engine
    gc.collect()
    assert gone() is None


def test_engine_can_be_taken_away() -> None:
    llm_args = LlmArgs()
    engine = Engine(llm_args)
    runtime_for(llm_args).engine = engine
    runtime_for(llm_args).engine = None
    assert runtime_for(llm_args).engine is None


def test_arguments_without_weak_references_are_refused() -> None:
    llm_args = (1, 2)
    with pytest.raises(TypeError):
        runtime_for(llm_args)
    assert id(llm_args) not in runtime_module._runtimes


def test_threads_meet_in_one_runtime() -> None:
    llm_args = LlmArgs()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: runtime_for(llm_args), range(64)))
    assert len({id(runtime) for runtime in found}) == 1


def plan(request_id: int, mode: EngineMode = EngineMode.WRAPPER, exact: bool = False, start: int = 4) -> SemanticKvPlan:
    fields: dict[str, Any] = {
        "kind": PlanKind.EXACT_PREFIX if exact else PlanKind.REQUEST_LOCAL,
    }
    return SemanticKvPlan(
        request_id=request_id,
        spans=(PlanSpan("d", start, start, 8, exact=exact),),
        prompt_token_ids=np.arange(20, dtype=np.int32),
        num_computed_tokens=start,
        matched_tokens=8,
        block_size=4,
        execution=EngineExecution(mode, 2),
        **fields,
    )


def test_plan_is_taken_once() -> None:
    plans = ActivePlans()
    plans.put(plan(1))
    assert len(plans) == 1
    assert plans.take(1) == plan(1)
    assert plans.take(1) is None
    assert plans.take(2) is None
    assert len(plans) == 0


def test_plans_of_some_requests_are_taken_together_and_the_others_stay() -> None:
    plans = ActivePlans()
    assert plans.take_all([1, 2]) == {}
    for number in (1, 2, 3):
        plans.put(plan(number))
    assert plans.take_all([3, 7, 1]) == {3: plan(3), 1: plan(1)}
    assert plans.take_all([3, 1]) == {}
    assert plans.take(2) == plan(2)


def test_limit_outlives_the_plan_until_the_blocks_are_released() -> None:
    plans = ActivePlans()
    plans.put(plan(1, start=6))
    plans.take(1)
    plans.discard(1)
    assert plans.publishable_tokens(1) == 6
    plans.released(1)
    assert plans.publishable_tokens(1) is None


def test_a_plan_of_which_nothing_was_kept_limits_nothing() -> None:
    plans = ActivePlans()
    plans.put(plan(1))
    plans.put(plan(2))
    plans.computed_whole(1)
    assert plans.publishable_tokens(1) is None
    assert plans.publishable_tokens(2) == 4


def test_exact_plan_has_no_limit_and_lifts_none() -> None:
    plans = ActivePlans()
    plans.put(plan(1, exact=True))
    assert plans.publishable_tokens(1) is None
    plans.put(plan(2))
    plans.put(plan(2, exact=True))
    assert plans.publishable_tokens(2) == 4


def test_stock_plan_leaves_its_limit_but_waits_for_no_forward() -> None:
    plans = ActivePlans()
    plans.put(plan(1, mode=EngineMode.STOCK))
    assert plans.take(1) is None
    assert plans.publishable_tokens(1) == 4


def test_second_put_replaces_the_first() -> None:
    plans = ActivePlans()
    plans.put(plan(1))
    replacement = plan(1).without_spans("gone")
    plans.put(replacement)
    assert len(plans) == 1
    assert plans.publishable_tokens(1) == replacement.prompt_length
    assert plans.take(1) == replacement


def test_discard_drops_only_its_own_request() -> None:
    plans = ActivePlans()
    plans.put(plan(1))
    plans.put(plan(2))
    plans.discard(1)
    assert plans.take(1) is None
    assert plans.take(2) == plan(2)


def test_each_plan_goes_to_one_of_many_threads() -> None:
    plans = ActivePlans()
    for request_id in range(200):
        plans.put(plan(request_id))
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(plans.take, [request_id for request_id in range(200) for _ in range(4)]))
    assert sorted(item.request_id for item in taken if item is not None) == list(range(200))
    assert len(plans) == 0


class RecordingStream:
    def __init__(self):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)


def expecting(*ends):
    readiness = LayerReadiness()
    readiness.expect((end, f"below {end}") for end in ends)
    return readiness


def test_each_layer_waits_for_its_own_group_only():
    readiness, stream = expecting(3, 5, 6), RecordingStream()
    waited = []
    for layer in range(6):
        readiness.wait(layer, stream)
        waited.append(len(stream.waited))
    assert waited == [1, 1, 1, 2, 2, 3]
    assert stream.waited == ["below 3", "below 5", "below 6"]
    assert not readiness.is_arriving


def test_a_layer_further_up_waits_for_all_below():
    readiness, stream = expecting(2, 4, 6), RecordingStream()
    readiness.wait(3, stream)
    assert stream.waited == ["below 2", "below 4"]
    assert readiness.is_arriving


def test_join_waits_for_what_is_left_and_a_second_load_starts_anew():
    readiness, stream = expecting(2, 4), RecordingStream()
    readiness.wait(0, stream)
    readiness.join(stream)
    assert stream.waited == ["below 2", "below 4"]
    readiness.expect([(1, "again")])
    readiness.wait(0, stream)
    assert stream.waited[-1] == "again"


def test_on_the_cpu_nothing_is_ever_on_its_way():
    readiness = LayerReadiness()
    readiness.expect([(2, None), (4, None)])
    assert not readiness.is_arriving
    readiness.wait(0, None)
    readiness.join(None)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8, unique=True).map(sorted), st.data())
def test_whoever_has_waited_for_a_layer_has_waited_for_its_group(ends, data):
    readiness, stream = expecting(*ends), RecordingStream()
    for layer in data.draw(st.lists(st.integers(0, ends[-1] - 1), max_size=10)):
        readiness.wait(layer, stream)
        assert f"below {next(end for end in ends if end > layer)}" in stream.waited
    readiness.join(stream)
    assert stream.waited == [f"below {end}" for end in ends]


@pytest.mark.parametrize("layer", [0, 7])
def test_waiting_with_nothing_expected_waits_for_nothing(layer):
    stream = RecordingStream()
    LayerReadiness().wait(layer, stream)
    assert stream.waited == []
