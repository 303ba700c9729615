"""The contracts that the engine plays, under both cache managers and in both forms, through the real loop."""

from dataclasses import fields

import pytest

from semblend_trt.errors import SemBlendError
from tests.builders.engine import published_nodes, text
from tests.engine_wrapper.embedded import conftest
from tests.engine_wrapper.embedded.conftest import BLOCK, SIX, TWO

BASE_FIELDS = ("request_id", "new_tokens", "new_block_ids", "computed_position", "num_scheduled_tokens")
FIELDS = {
    "1.2": BASE_FIELDS,
    "1.4": (*BASE_FIELDS, "block_hashes", "priorities", "cache_salt", "new_block_ids_by_layer_group"),
}
V1_CONTRACTS, ALL = ["1.2", "embedded"], ["1.2", "1.4", "embedded"]


@pytest.mark.promise("engines", "The connector keeps to the contract...")
@pytest.mark.parametrize("contract", ALL)
def test_calls_and_their_order(make_recorded_llm, contract):
    llm, calls = make_recorded_llm(contract)
    registered = "register_kv_cache_layout" if contract == "1.4" else "register_kv_caches"
    waits = ["wait_for_initialization"] if contract != "1.2" else []
    assert calls.names() == [registered, *waits]
    calls.clear()
    llm.generate([text(0, 5)], TWO)
    layers = ["wait_for_layer_load", "save_kv_layer"] * conftest.LAYERS
    begin, end = ["build_connector_meta", "start_load_kv"], ["after", "wait_for_save"]
    replayed = [] if contract in FIELDS else layers  # no hook of a layer runs in a replayed step
    form = "_by_layer_group" * (contract == "1.4")
    asked = ["get_num_new_matched_tokens", f"update_state_after_alloc{form}"]
    assert calls.names() == [
        *[*asked, *begin, *layers, *end, "get_finished"],
        *[*begin, *replayed, *end, f"request_finished{form}", "get_finished"],
    ]


@pytest.mark.promise("engines", "The connector keeps to the contract...")
@pytest.mark.parametrize("contract", ALL)
def test_fields_of_a_scheduled_request(make_recorded_llm, contract):
    llm, calls = make_recorded_llm(contract)
    llm.generate([text(0, 2 * BLOCK + 3)], TWO, cache_salt="s")
    output = calls.of("build_connector_meta")[0][0]
    (data,) = output.new_requests
    assert tuple(each.name for each in fields(data)) == FIELDS.get(contract, FIELDS["1.4"])
    assert hasattr(output, "attention_dp_rank") == (contract != "1.2")
    by_group = getattr(data, "new_block_ids_by_layer_group", [])
    assert [len(ids) for ids in by_group] == [3] * (contract == "1.4")
    assert len(data.new_block_ids) == 3
    assert (getattr(data, "block_hashes", []), getattr(data, "cache_salt", "s")) == ([], "s")


def test_v1_asks_with_another_object_of_bound_attributes_only(make_recorded_llm):
    llm, calls = make_recorded_llm("1.2")
    llm.generate([text(0, 5)], TWO, cache_salt="s")
    ((asked, _),) = calls.of("get_num_new_matched_tokens")
    assert asked.is_generation_only_request is False  # a property, not a method
    assert not any(hasattr(asked, name) for name in ("py_request_id", "sampling_params"))
    assert hasattr(asked, "cache_salt_id")
    assert not hasattr(asked, "cache_salt")


def cut_short(llm, tokens, how):
    if how == "cancelled":
        stream = llm.generate_async(tokens, SIX)
        next(stream)
        llm.abort(stream.request_id)
        return
    forward = llm.executor.model_runner.forward
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(llm.executor.model_runner, "forward", lambda slices: forward(slices) * float("nan"))
        (output,) = llm.generate([tokens], TWO)
    assert output.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("how", ["failed", "cancelled"])
@pytest.mark.parametrize(("contract", "times"), [("1.2", 0), ("1.4", 0), ("embedded", 1)])
def test_a_request_cut_short_is_told_or_just_disappears(make_recorded_llm, contract, times, how):
    llm, calls = make_recorded_llm(contract)
    cut_short(llm, text(0, 9), how)
    assert len([name for name in calls.names() if "finished" in name and name != "get_finished"]) == times
    assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks


@pytest.mark.parametrize(("contract", "where"), [("1.2", "forward"), ("1.4", "forward"), ("1.4", "wait_for_save")])
def test_a_forward_that_fails_ends_the_running_requests(make_recorded_llm, cold, contract, where):
    llm, calls = make_recorded_llm(contract, max_batch_size=2)
    streams = [llm.generate_async(text(seed, 20), SIX) for seed in range(3)]
    for stream in streams[:2]:
        next(stream)
    published = len(list(published_nodes(llm.block_manager)))
    calls.clear()
    with conftest.fails_once(llm.executor.model_runner if where == "forward" else llm.connector_worker, where):
        assert llm.executor.step()
    ended = [list(stream)[-1] for stream in streams[:2]]
    assert [output.outputs[0].finish_reason for output in ended] == ["error"] * 2
    assert all("injected" in output.error for output in ended)
    assert calls.names()[-1] == "get_finished"
    assert not {"wait_for_save", "request_finished", "request_finished_by_layer_group"} & set(calls.names())
    assert len(list(published_nodes(llm.block_manager))) == published
    assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks
    assert [list(streams[2])[-1].outputs[0].token_ids] == cold([text(2, 20)])


@pytest.mark.parametrize(
    ("contract", "where"),
    [("embedded", "forward"), ("1.4", "forward"), *((each, "start_load_kv") for each in (*V1_CONTRACTS, "1.4"))],
)
def test_a_load_that_fails_or_a_forward_that_is_not_survived_ends_the_engine(make_recorded_llm, contract, where):
    llm, _ = make_recorded_llm(contract, disable_overlap_scheduler=False)
    owner = llm.executor.model_runner if where == "forward" else llm.connector_worker
    with conftest.fails_once(owner, where), pytest.raises(RuntimeError, match="injected"):
        llm.generate([text(0, 9)], TWO)
    with pytest.raises(SemBlendError, match="this engine has stopped"):
        llm.generate([text(0, 9)], TWO)
