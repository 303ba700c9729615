"""What no engine should hand over is refused and counted, and the engine goes on."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semblend_trt.connector.contract import RequestData, SchedulerOutput
from semblend_trt.connector.requests import MAX_SILENT_ITERATIONS, RequestProgress, SemBlendConnectorMetadata
from semblend_trt.donors.offload import OffloadCommands, SaveIntent
from semblend_trt.runtime import runtime_for
from tests.builders.engine import text
from tests.engine_wrapper.embedded.conftest import TWO, teach
from tests.semblend_trt.held_donors import SaverGate, saved

PROMPT = list(range(100))
STOCK = "semblend_trt.connector"


@pytest.fixture
def llm(make_llm):
    return make_llm(STOCK, POLICY="exact")


def bare(request_id=77, **attributes):
    values = {"prompt_len": len(PROMPT), "get_tokens": lambda beam=0: PROMPT, "max_new_tokens": 4}
    return SimpleNamespace(request_id=request_id, **{"cache_salt": None, "lora_task_id": None} | values | attributes)


@pytest.mark.parametrize("salt", [b"bytes", "x" * 5_000_000, "\ud800", 3.5, True, 7, ["a"], {"a": 1}])
def test_a_salt_that_no_engine_sends_has_its_reason(llm, salt):
    scheduler = llm.connector_scheduler
    assert scheduler.get_num_new_matched_tokens(bare(cache_salt=salt), 0) == (0, False)
    assert scheduler.request_finished(bare(), []) is False
    assert scheduler.reuse_of(bare().request_id).reason == "salt_invalid"
    assert llm.generate([PROMPT], TWO)[0].outputs[0].finish_reason == "length"
    llm.settle()


@pytest.mark.known_defect(25)
@pytest.mark.parametrize(("blocks", "kept"), [((3, -1, 5), 8), ((-1, 3), 0), ((2, 10_000), 8)])
def test_blocks_that_are_no_rows_of_the_pool_are_never_saved(llm, blocks, kept):
    worker, runtime, heard = llm.connector_worker, runtime_for(llm.llm_args), []
    reader = Mock(take_events=lambda: heard.extend(runtime.saved))
    runtime.scheduler = reader
    worker.bind_connector_meta(
        SemBlendConnectorMetadata(
            followed=(9,),
            progress=(RequestProgress(9, blocks, 8 * len(blocks), True),),
            commands=OffloadCommands(saves=[SaveIntent(9, "donor", 100)]),
        )
    )
    worker.start_load_kv(None)
    saved(worker, 9)
    (news,) = heard
    assert news.tokens == kept or news.error is not None


POOL_BLOCKS, BLOCK = 128, 8
BLOCKS = list(range(40, 53))
IDS = st.sampled_from([1001, 1002, 1003])
RUBBISH = st.sampled_from([None, -1, 10**9, 1 << 80, 1.5, "7", b"x", [1], {}])
NUMBERS = st.integers(-2, 130) | RUBBISH
BLOCK_IDS = st.lists(st.integers(-1, POOL_BLOCKS + 2), max_size=16) | st.just(BLOCKS) | RUBBISH
ENTRIES = st.lists(st.builds(RequestData, IDS, st.just([]), BLOCK_IDS, NUMBERS, NUMBERS) | RUBBISH, max_size=3)
PROMPTS = st.sampled_from([PROMPT, PROMPT[:60] + PROMPT[:40], PROMPT[::-1], [], None, ["a"], [1 << 40]])
ASKS = st.tuples(st.just("ask"), IDS, PROMPTS, NUMBERS, NUMBERS, st.sampled_from(["mine", "mine", "other", 7]))
GROUPS = st.lists(BLOCK_IDS, max_size=2) | RUBBISH
CALLS = st.one_of(
    ASKS,
    st.tuples(st.sampled_from(["alloc", "end"]), IDS, BLOCK_IDS),
    st.tuples(st.sampled_from(["alloc", "end"]), IDS, GROUPS, st.just("_by_layer_group")),
    st.tuples(st.just("run"), ENTRIES | RUBBISH, ENTRIES | RUBBISH),
    st.tuples(st.just("run_again")),
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

    def alloc(self, request_id, blocks, suffix=""):
        getattr(self.scheduler, f"update_state_after_alloc{suffix}")(bare(request_id), blocks)

    def run(self, new, cached):
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(SchedulerOutput(new, cached)))
        self.run_again()

    def run_again(self):
        self.worker.start_load_kv(None)
        self.worker.wait_for_save(None)

    def end(self, request_id, blocks, suffix=""):
        held = getattr(self.scheduler, f"request_finished{suffix}")(bare(request_id), blocks)
        self.saving |= {request_id} if held else set()

    def serve(self, request_id, tokens, blocks=BLOCKS, ended_with=None):
        """A request from its query to its end."""
        self.ask(request_id, tokens, 0, 4, None)
        self.run([RequestData(request_id, [], blocks, 0, 100)], [])
        self.end(request_id, ended_with or blocks)

    def poll(self, request_ids):
        saved, loaded = self.worker.get_finished(request_ids, [])
        assert loaded == []
        self.saving -= set(saved)

    def end_all(self):
        waiting = list(self.saving)
        while self.saving:
            self.poll(waiting)
            waiting = []
        # What was promised is kept until an iteration has loaded it, however long that takes.
        awaited = [each.request_id for each in self.scheduler._requests.values() if each.awaits_load]
        self.run([RequestData(request_id, [], BLOCKS, 0, 1) for request_id in awaited], [])
        for _ in range(MAX_SILENT_ITERATIONS + 2):
            self.run([], [])


@pytest.fixture
def wrapped(make_llm):
    """An engine whose wrapper computes what cannot be loaded, so that nothing has to raise."""
    settings = {"POLICY": "position_fix", "MIN_SPAN": 16}
    return make_llm("engine_wrapper.connector", {"max_tokens": POOL_BLOCKS * BLOCK}, **settings)


@pytest.mark.promise("reuse", "No error of ours reaches the...")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(CALLS, max_size=14))
def test_no_life_raises_or_leaves_anything_behind(wrapped, calls):
    if not len(wrapped.connector_scheduler.donor_index.catalog):
        teach(wrapped, PROMPT, cache_salt="mine")
    engine = Engine(wrapped)
    for name, *arguments in calls:
        getattr(engine, name)(*arguments)
    engine.end_all()
    scheduler, worker, runtime = engine.scheduler, engine.worker, runtime_for(wrapped.llm_args)
    stats = scheduler.donor_index.catalog.stats()
    assert (stats.leases, stats.saving, len(scheduler._requests), scheduler._forgotten) == (0, 0, 0, [])
    assert (worker._followed, len(runtime.active_plans), runtime.refusal) == ({}, 0, None)
    assert worker.get_finished([], []) == ([], [])


def with_donor(llm):
    teach(llm, PROMPT)
    return Engine(llm), runtime_for(llm.llm_args)


PROMISED = RequestData(1002, PROMPT, BLOCKS, 0, 1)
MALFORMED = [None, 7, RequestData([], [], [], 0, 1), RequestData(1001, [], None, None, None)]


@pytest.mark.parametrize(
    ("output", "faults"),
    [
        *((SchedulerOutput([other, PROMISED, other], [other]), {"request_data": 3}) for other in MALFORMED),
        (SchedulerOutput([PROMISED], 7), {"build_connector_meta": 1}),
    ],
)
def test_what_was_promised_is_loaded_beside_what_is_malformed(llm, output, faults):
    engine, runtime = with_donor(llm)
    engine.ask(1001, PROMPT[::-1], 0, 4, None)
    engine.ask(1002, PROMPT, 0, 4, None)
    engine.alloc(1002, BLOCKS)
    metadata = engine.scheduler.build_connector_meta(output)
    assert [plan.request_id for plan in metadata.plans] == [1002]
    assert metadata.followed == ()  # its text is held already
    assert dict(runtime.faults) == faults


def test_the_same_id_is_a_new_request_behind_its_end(llm):
    engine, runtime = with_donor(llm)
    for tokens, reason in ((PROMPT[::-1], "no_donor_match"), (PROMPT, "not_honoured"), (PROMPT[:9], "short_prompt")):
        engine.ask(1001, tokens, 0, 4, None)
        engine.end(1001, [])
        assert engine.scheduler.reuse_of(1001).reason == reason
    assert not runtime.faults


def test_an_end_that_is_told_twice_is_one_end(llm):
    # As 1.2 and 1.3rc do under the overlap scheduler while a request is being saved.
    engine, runtime = with_donor(llm)
    engine.serve(1001, PROMPT[::-1])
    assert engine.saving == {1001}
    assert engine.scheduler.request_finished(bare(1001), BLOCKS) is False
    engine.end_all()
    assert len(engine.scheduler.donor_index.catalog) == 2
    assert not runtime.faults


def used_again(engine, request_id):
    others = [block + 30 for block in BLOCKS]
    engine.ask(request_id, PROMPT, 0, 4, None)
    assert engine.scheduler.reuse_of(request_id).reason == "id_in_use"
    engine.alloc(request_id, others)
    engine.run([RequestData(request_id, [], others, 0, 100)], [])
    assert engine.scheduler.request_finished(bare(request_id), others) is False
    engine.run([], [])


@pytest.mark.promise("donors", "An id that is used again during its save disturbs nothing")
@pytest.mark.parametrize("is_handed_in", [False, True])
def test_an_id_that_is_used_again_during_its_save_disturbs_nothing(llm, is_handed_in):
    engine, runtime = with_donor(llm)
    with SaverGate(llm.connector_worker):
        engine.serve(1001, PROMPT[::-1])
        if is_handed_in:
            engine.poll([1001])
        used_again(engine, 1001)
    if is_handed_in:
        while engine.saving:
            engine.poll([])
    engine.end_all()
    stats = engine.scheduler.donor_index.catalog.stats()
    assert (stats.ready, stats.saving, engine.saving, engine.scheduler.donor_index._saving) == (2, 0, set(), {})
    engine.serve(1001, text(5, 100))
    assert engine.scheduler.reuse_of(1001).reason == "no_donor_match"
    engine.end_all()
    assert engine.scheduler.donor_index.catalog.stats().ready == 3
    assert not runtime.faults


@pytest.mark.promise("donors", "An id that is used again...")
def test_an_id_is_held_until_the_engine_is_told_of_the_end_of_its_save(make_llm):
    engine, runtime = with_donor(make_llm(STOCK, contract="1.2"))
    for request_id, blocks in ((1001, BLOCKS), (1002, [block + 14 for block in BLOCKS])):
        engine.serve(request_id, text(request_id, 100), blocks)
    with SaverGate(engine.worker):
        engine.poll([1001, 1002])
    engine.poll([])
    assert list(runtime.ended_saves) == [1002]
    used_again(engine, 1002)
    engine.end_all()
    assert engine.scheduler.donor_index.catalog.stats().ready == 3
    assert not runtime.faults
