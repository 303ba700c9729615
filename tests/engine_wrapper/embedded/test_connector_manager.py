"""Calls of the connector in their order, the rules that it is held to."""

import pytest

from engine_wrapper.embedded.connector_manager import ConnectorContractError, KvCacheConnectorManager
from engine_wrapper.embedded.request import LlmRequest, LlmRequestState, SamplingParams
from semblend_trt.connector.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker


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


def test_metadata_travels_as_a_copy():
    metadata = {"plans": [1, 2]}
    worker = Worker()
    manager = KvCacheConnectorManager(worker, Scheduler(metadata=metadata))
    manager.handle_metadata()
    assert worker.get_connector_meta() == metadata
    assert worker.get_connector_meta() is not metadata


def test_the_connector_gets_its_own_list_of_blocks():
    block_ids = [3, 4]
    managed().update_state_after_alloc(request(), block_ids)
    assert block_ids == [3, 4]


@pytest.mark.parametrize(
    ("saving", "finished", "rule"),
    [
        *((True, finished, "finished_id_handed_in") for finished in (([1, 1], []), ([], [1]), ([2], []))),
        (None, ([], []), "finished_returns_bool"),
    ],
)
def test_answers_about_ends_that_break_a_rule(saving, finished, rule):
    manager = managed(worker=Worker(finished), saving=saving)
    with broken(rule):
        manager.request_finished(request(), [1])
        manager.get_finished()
