"""Lives of requests that no engine leads: calls with rubbish in them, out of order, twice, for ids of others."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semblend_trt.connector.contract import RequestData, SchedulerOutput
from semblend_trt.connector.metadata import SemBlendConnectorMetadata
from semblend_trt.connector.requests import MAX_SILENT_ITERATIONS
from semblend_trt.runtime import runtime_for
from tests.engine_wrapper.embedded.conftest import answers, forget_prefixes, prompt
from tests.engine_wrapper.embedded.test_malformed_calls import PROMPT, TWO, bare, llm

__all__ = ["llm"]

POOL_BLOCKS, BLOCK = 128, 8
BLOCKS = list(range(40, 53))
IDS = st.sampled_from([1001, 1002, 1003])
RUBBISH = st.sampled_from([None, -1, 10**9, 1 << 80, 1.5, "7", b"x", [1], {}])
NUMBERS = st.integers(-2, 130) | RUBBISH
BLOCK_IDS = st.lists(st.integers(-1, POOL_BLOCKS + 2), max_size=16) | st.just(BLOCKS) | RUBBISH
ENTRIES = st.lists(st.builds(RequestData, IDS, st.just([]), BLOCK_IDS, NUMBERS, NUMBERS) | RUBBISH, max_size=3)
PROMPTS = st.sampled_from([PROMPT, PROMPT[:60] + PROMPT[:40], PROMPT[::-1], [], None, ["a"], [1 << 40]])
ASKS = st.tuples(st.just("ask"), IDS, PROMPTS, NUMBERS, NUMBERS, st.sampled_from(["mine", "mine", "other", 7]))
CALLS = st.one_of(
    ASKS,
    st.tuples(st.just("alloc"), IDS, BLOCK_IDS),
    st.tuples(st.just("alloc_grouped"), IDS, st.lists(BLOCK_IDS, max_size=2) | RUBBISH),
    st.tuples(st.just("run"), ENTRIES | RUBBISH, ENTRIES | RUBBISH),
    st.tuples(st.just("run_again")),
    st.tuples(st.just("end"), IDS, BLOCK_IDS),
    st.tuples(st.just("end_grouped"), IDS, st.lists(BLOCK_IDS, max_size=2) | RUBBISH),
    st.tuples(st.just("poll"), st.lists(IDS, max_size=2, unique=True)),
)


class Engine:
    """Calls both halves of the connector, and keeps to nothing but which ids are being saved."""

    def __init__(self, engine):
        self.llm, self.scheduler, self.worker = engine, engine.connector_scheduler, engine.connector_worker
        self.saving = set()

    def ask(self, request_id, tokens, num_computed, max_new_tokens, salt):
        request = bare(request_id, get_tokens=lambda beam=0: tokens, max_new_tokens=max_new_tokens, cache_salt=salt)
        matched, asynchronous = self.scheduler.get_num_new_matched_tokens(request, num_computed)
        assert asynchronous is False
        assert 0 <= matched < len(PROMPT)

    def alloc(self, request_id, blocks):
        self.scheduler.update_state_after_alloc(bare(request_id), blocks)

    def alloc_grouped(self, request_id, groups):
        self.scheduler.update_state_after_alloc_by_layer_group(bare(request_id), groups)

    def run(self, new, cached):
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(SchedulerOutput(new, cached)))
        self.run_again()

    def run_again(self):
        self.worker.start_load_kv(None)
        self.worker.wait_for_save(None)

    def end(self, request_id, blocks):
        self.saving |= {request_id} if self.scheduler.request_finished(bare(request_id), blocks) else set()

    def end_grouped(self, request_id, groups):
        held = self.scheduler.request_finished_by_layer_group(bare(request_id), groups)
        self.saving |= {request_id} if held else set()

    def poll(self, request_ids):
        saved, loaded = self.worker.get_finished(request_ids, [])
        assert loaded == []
        self.saving -= set(saved)

    def end_all(self):
        """As an engine ends that has lost sight of its requests."""
        waiting = list(self.saving)
        while self.saving:
            self.poll(waiting)
            waiting = []
        # What was promised is kept until an iteration has loaded it, however long that takes.
        awaited = [each.request_id for each in self.scheduler._requests._requests.values() if each.awaits_load]
        self.run([RequestData(request_id, [], BLOCKS, 0, 1) for request_id in awaited], [])
        for _ in range(MAX_SILENT_ITERATIONS + 2):
            self.run([], [])


@pytest.fixture
def wrapped(make_llm, monkeypatch):
    """An engine whose wrapper computes what cannot be loaded, so that nothing has to raise."""
    monkeypatch.setenv("SEMBLEND_POLICY", "position_fix")
    monkeypatch.setenv("SEMBLEND_MIN_SPAN", "16")
    names = ("SemBlendKvConnectorScheduler", "SemBlendKvConnectorWorker")
    return make_llm(*names, module="engine_wrapper.connector", cache={"max_tokens": POOL_BLOCKS * BLOCK})


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(CALLS, max_size=14))
def test_no_life_raises_or_leaves_anything_behind(wrapped, calls):
    if not len(wrapped.connector_scheduler.donor_index.catalog):
        wrapped.generate([PROMPT], TWO, cache_salt="mine")
        wrapped.settle()
        forget_prefixes(wrapped)
    engine = Engine(wrapped)
    for name, *arguments in calls:
        getattr(engine, name)(*arguments)
    engine.end_all()
    scheduler, worker, runtime = engine.scheduler, engine.worker, runtime_for(wrapped.llm_args)
    stats = scheduler.donor_index.catalog.stats()
    assert (stats.leases, stats.saving, len(scheduler._requests), scheduler._forgotten) == (0, 0, 0, [])
    assert (worker._followed, len(runtime.active_plans), runtime.refusal) == ({}, 0, None)
    assert worker.get_finished([], []) == ([], [])


def test_after_such_lives_answers_are_those_of_a_cold_engine(wrapped, make_llm):
    engine = Engine(wrapped)
    wrapped.generate([PROMPT], TWO, cache_salt="mine")
    wrapped.settle()
    forget_prefixes(wrapped)
    engine.ask(1001, PROMPT, 0, 4, "mine")
    engine.alloc(1001, [5] * 13)
    engine.run([RequestData(1001, PROMPT, [5] * 13, 0, 1)], [None, RequestData(1001, [], [6], 99, 1)])
    engine.run_again()
    engine.end(1001, [5] * 13)
    engine.end_all()
    prompts = [prompt(60), PROMPT[:50] + prompt(20, 1)]
    cold = answers(make_llm().generate(prompts, TWO))
    assert answers(wrapped.generate(prompts, TWO)) == cold
    assert answers(wrapped.generate(prompts, TWO, cache_salt="mine")) == cold


def with_donor(llm):
    llm.generate([PROMPT], TWO)
    llm.settle()
    forget_prefixes(llm)
    return Engine(llm), runtime_for(llm.llm_args)


@pytest.mark.parametrize("other", [None, 7, RequestData([], [], [], 0, 1), RequestData(1001, [], None, None, None)])
def test_what_was_promised_is_loaded_whatever_stands_beside_it(llm, other):
    engine, runtime = with_donor(llm)
    engine.ask(1001, PROMPT[::-1], 0, 4, None)
    engine.ask(1002, PROMPT, 0, 4, None)
    engine.alloc(1002, BLOCKS)
    output = SchedulerOutput([other, RequestData(1002, PROMPT, BLOCKS, 0, 1), other], [other])
    metadata = engine.scheduler.build_connector_meta(output)
    assert [plan.request_id for plan in metadata.plans] == [1002]
    assert [intent.request_id for intent in metadata.intents] == []  # its text is held already
    assert runtime.faults["request_data"] == 3


def test_what_was_promised_is_loaded_even_where_nothing_else_can_be_told(llm):
    engine, runtime = with_donor(llm)
    engine.ask(1002, PROMPT, 0, 4, None)
    engine.alloc(1002, BLOCKS)
    metadata = engine.scheduler.build_connector_meta(SchedulerOutput([RequestData(1002, PROMPT, BLOCKS, 0, 1)], 7))
    assert [plan.request_id for plan in metadata.plans] == [1002]
    assert metadata == SemBlendConnectorMetadata(metadata.plans)
    assert runtime.faults["build_connector_meta"] == 1


@pytest.mark.parametrize("number", ["many", [1], 1j])
def test_a_lookup_that_fails_late_holds_no_donor(llm, number):
    engine, _ = with_donor(llm)
    engine.ask(1001, PROMPT, 0, number, None)
    assert engine.scheduler.reuse_of(1001).reason == "internal_error"
    assert engine.scheduler.donor_index.catalog.stats().leases == 0


def test_the_same_id_is_a_new_request_behind_its_end(llm):
    engine, runtime = with_donor(llm)
    for tokens, reason in ((PROMPT[::-1], "no_donor_match"), (PROMPT, None), (PROMPT[:9], "short_prompt")):
        engine.ask(1001, tokens, 0, 4, None)
        engine.end(1001, [])
        assert engine.scheduler.reuse_of(1001).reason == reason
    assert sum(engine.scheduler.outcomes.counts().values()) == 4
    assert not runtime.faults


def test_an_end_that_is_told_twice_is_one_end(llm):
    # As 1.2 and 1.3rc do under the overlap scheduler while a request is being saved.
    engine, runtime = with_donor(llm)
    engine.ask(1001, PROMPT[::-1], 0, 4, None)
    engine.run([RequestData(1001, [], BLOCKS, 0, 100)], [])
    engine.end(1001, BLOCKS)
    assert engine.saving == {1001}
    assert engine.scheduler.request_finished(bare(1001), BLOCKS) is False
    engine.end_all()
    assert len(engine.scheduler.donor_index.catalog) == 2
    assert not runtime.faults


def test_a_request_that_ends_with_the_blocks_of_another_is_no_donor(llm):
    engine, runtime = with_donor(llm)
    engine.ask(1001, PROMPT[::-1], 0, 4, None)
    engine.run([RequestData(1001, [], BLOCKS, 0, 100)], [])
    engine.end(1001, [*BLOCKS[:6], 3, *BLOCKS[7:]])
    assert (engine.saving, runtime.faults["request_finished"]) == (set(), 1)
    engine.run([], [])
    assert (engine.worker._followed, engine.scheduler.donor_index.catalog.stats().saving) == ({}, 0)


@pytest.mark.parametrize("groups", [None, 5, [None], [BLOCKS, BLOCKS], [[1.5] * 13], []])
def test_layer_groups_that_cannot_be_read(llm, groups):
    engine, _ = with_donor(llm)
    engine.ask(1001, PROMPT, 0, 4, None)
    engine.alloc_grouped(1001, groups)
    engine.end_grouped(1001, groups)
    assert (engine.saving, engine.scheduler.donor_index.catalog.stats().leases) == (set(), 0)
    assert len(engine.scheduler._requests) == 0
