"""Calls of the connector in their order, the rules that it is held to, and several ranks that agree."""

import pytest

from engine_wrapper.embedded.connector_manager import ConnectorContractError, KvCacheConnectorManager
from engine_wrapper.embedded.request import LlmRequest, LlmRequestState, SamplingParams
from semblend_trt.connector.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker
from semblend_trt.errors import SemBlendError
from tests.semblend_trt.rank_threads import on_ranks


class Scheduler(KvCacheConnectorScheduler):
    def __init__(self, answer=(0, False), saving=False, metadata=None):
        super().__init__(None)
        self.answer, self.saving, self.metadata = answer, saving, metadata

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.answer

    def update_state_after_alloc(self, request, block_ids):
        block_ids.clear()  # the list is the connector's own

    def build_connector_meta(self, scheduler_output):
        return self.metadata

    def request_finished(self, request, cache_block_ids):
        return self.saving


class Worker(KvCacheConnectorWorker):
    register_kv_caches = start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = None

    def __init__(self, finished=([], [])):
        super().__init__(None)
        self.finished, self.polls = finished, []

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        self.polls.append((finished_gen_req_ids, started_loading_req_ids))
        return self.finished


def managed(*, worker=None, **answers):
    return KvCacheConnectorManager(worker or Worker(), Scheduler(**answers))


def request(request_id=1, prompt_len=10):
    made = LlmRequest(request_id, list(range(prompt_len)), SamplingParams(), max_new_tokens=4, cache_salt="s")
    made.state = LlmRequestState.CONTEXT_INIT
    return made


def broken(rule):
    return pytest.raises(ConnectorContractError, match=f"connector contract, {rule}: ")


@pytest.mark.parametrize(
    ("answer", "rule"),
    [
        ((0, True), "loads_at_once"),
        ((-1, False), "matched_not_negative"),
        ((8, False), "one_token_left"),
        (3, "matched_is_pair"),
        ((3.0, False), "matched_is_pair"),
        ((True, False), "matched_is_pair"),
    ],
)
def test_answers_to_the_query_that_break_a_rule(answer, rule):
    manager = managed(answer=answer)
    with broken(rule) as caught:
        manager.ask(request(), 2)
    assert caught.value.rule == rule
    assert isinstance(caught.value, RuntimeError)


def test_a_request_is_asked_about_once_until_it_has_finished():
    manager = managed()
    manager.ask(request(), 0)
    with broken("asked_once"):
        manager.ask(request(), 0)
    manager.request_finished(request(), [])
    assert manager.ask(request(), 0) == 0


def test_metadata_travels_as_a_copy_and_must_pickle():
    metadata = {"plans": [1, 2]}
    worker = Worker()
    manager = KvCacheConnectorManager(worker, Scheduler(metadata=metadata))
    manager.handle_metadata()
    assert worker.get_connector_meta() == metadata
    assert worker.get_connector_meta() is not metadata
    with broken("metadata_picklable"):
        managed(metadata=lambda: None).handle_metadata()


def test_the_connector_gets_its_own_list_of_blocks():
    block_ids = [3, 4]
    managed().update_state_after_alloc(request(), block_ids)
    assert block_ids == [3, 4]


@pytest.mark.parametrize(
    ("saving", "finished", "rule"),
    [
        *((True, finished, "finished_id_handed_in") for finished in (([1, 1], []), ([], [1]), ([2], []))),
        *((True, finished, "finished_returns_pair") for finished in (None, 1, ([],))),
        (None, ([], []), "finished_returns_bool"),
    ],
)
def test_answers_about_ends_that_break_a_rule(saving, finished, rule):
    manager = managed(worker=Worker(finished), saving=saving)
    with broken(rule):
        manager.request_finished(request(), [1])
        manager.get_finished()


def on_two_ranks(work, **answers):
    return on_ranks(2, lambda ranks: work(
        KvCacheConnectorManager(Worker(), Scheduler(**answers) if ranks.rank == 0 else None, ranks=ranks)
    ))  # fmt: skip


def test_the_scheduler_of_rank_0_answers_for_every_rank():
    def work(manager):
        matched = manager.ask(request(), 0)
        manager.update_state_after_alloc(request(), [1])
        manager.handle_metadata()
        saving = manager.request_finished(request(), [1])
        return matched, manager.worker.get_connector_meta(), saving, manager.pending_transfers, manager.reuse_of(1)

    assert (
        on_two_ranks(work, answer=(5, False), saving=True, metadata={"plan": 1})
        == [(5, {"plan": 1}, True, [1], None)] * 2
    )


def test_what_the_scheduler_raises_is_raised_on_every_rank():
    def work(manager):
        with pytest.raises(SemBlendError) as raised:
            manager.handle_metadata()
        return str(raised.value)

    first, second = on_two_ranks(work, metadata=lambda: None)
    assert "metadata_picklable" in first
    assert second == f"the connector failed on rank 0 (ConnectorContractError: {first})"


def test_all_ranks_must_have_reported_a_request():
    reports = [([1], [2], []), ([1, 2], [], [3])]  # by rank, one call after another

    def work(ranks):
        manager = KvCacheConnectorManager(Worker(), Scheduler(saving=True) if ranks.rank == 0 else None, ranks=ranks)
        ended = []
        for request_id in (1, 2, 3):
            manager.request_finished(request(request_id), [1])
        for now in reports[ranks.rank]:
            manager.worker.finished = now, []
            ended.append([each.request_id for each in manager.get_finished()])
        assert manager.pending_transfers == [3]
        return ended

    assert on_ranks(2, work) == [[[1], [2], []]] * 2
