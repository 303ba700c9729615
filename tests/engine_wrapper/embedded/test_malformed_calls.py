"""What no engine should hand over is refused and counted, and the engine goes on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY

from engine_wrapper.embedded.llm import SamplingParams
from semblend_trt.connector import SemBlendKvConnectorScheduler, SemBlendKvConnectorWorker
from semblend_trt.connector.contract import RequestData, SchedulerOutput
from semblend_trt.connector.metadata import RequestProgress, SaveIntent, SemBlendConnectorMetadata
from semblend_trt.runtime import runtime_for

TWO = SamplingParams(max_tokens=2, ignore_eos=True)
PROMPT = list(range(100))


@pytest.fixture
def llm(make_llm, monkeypatch):
    monkeypatch.setenv("SEMBLEND_POLICY", "exact")
    names = ("SemBlendKvConnectorScheduler", "SemBlendKvConnectorWorker")
    return make_llm(*names, module="semblend_trt.connector")


def bare(request_id=77, **attributes):
    """A request as the query sees it, outside the engine."""
    values = {
        "request_id": request_id,
        "prompt_len": len(PROMPT),
        "get_tokens": lambda beam=0: PROMPT,
        "max_new_tokens": 4,
        "cache_salt": None,
        "lora_task_id": None,
    }
    return SimpleNamespace(**(values | attributes))


def serves_on(llm):
    """The engine still answers, and keeps what it served."""
    outputs = llm.generate([PROMPT], TWO)
    llm.settle()
    assert outputs[0].outputs[0].finish_reason == "length"
    return True


@pytest.mark.parametrize("salt", [b"bytes", "x" * 5_000_000, "\ud800", 3.5, True, 7, ["a"], {"a": 1}])
def test_salts_that_no_engine_sends(llm, salt):
    scheduler = llm.connector_scheduler
    assert scheduler.get_num_new_matched_tokens(bare(cache_salt=salt), 0) == (0, False)
    assert scheduler.request_finished(bare(), []) is False
    assert scheduler.outcomes.reasons() == {"salt_invalid": 1}
    assert serves_on(llm)


@pytest.mark.parametrize("salt", ["", " ", "grüße-\U0001f511", "\x00", "a\nb"])
def test_odd_salts_are_salts(llm, salt):
    llm.generate([PROMPT], TWO, cache_salt=salt)
    llm.settle()
    assert llm.generate([PROMPT], TWO, cache_salt=salt)[0].cached_tokens > 90
    assert llm.generate([PROMPT], TWO, cache_salt=salt + "2")[0].cached_tokens == 0


@pytest.mark.parametrize("request_id", [None, "abc", [1]])
def test_requests_without_an_id(llm, request_id):
    scheduler, faults = llm.connector_scheduler, runtime_for(llm.llm_args).faults
    assert scheduler.get_num_new_matched_tokens(bare(request_id), 0) == (0, False)
    assert scheduler.update_state_after_alloc(bare(request_id), [1]) is None
    assert scheduler.request_finished(bare(request_id), [1]) is False
    assert sum(faults.values()) == 3
    shown = REGISTRY.get_sample_value("semblend_faults_total", {"fault": "request_finished"})
    assert shown is not None
    assert shown >= faults["request_finished"] == 1
    assert serves_on(llm)


@pytest.mark.parametrize("num_computed", [None, "1", -5])
def test_counts_that_cannot_be(llm, num_computed):
    scheduler = llm.connector_scheduler
    assert scheduler.get_num_new_matched_tokens(bare(), num_computed)[1] is False
    assert scheduler.request_finished(bare(), []) is False
    assert serves_on(llm)


def test_requests_that_were_never_asked_about(llm):
    scheduler, worker = llm.connector_scheduler, llm.connector_worker
    assert scheduler.update_state_after_alloc(bare(4711), [1, 2]) is None
    assert scheduler.request_finished(bare(4711), [1, 2]) is False
    output = SchedulerOutput([RequestData(4711, [1], [3], 0, 1)], [RequestData(4712, [], [-1], 9, 1)])
    assert scheduler.build_connector_meta(output) == SemBlendConnectorMetadata()
    assert worker.get_finished([4711], [4712]) == ([4711], [4712])
    assert serves_on(llm)


def test_an_iteration_without_a_schedule_is_an_empty_one(llm):
    assert llm.connector_scheduler.build_connector_meta(None) == SemBlendConnectorMetadata()
    assert not runtime_for(llm.llm_args).faults
    assert serves_on(llm)


@pytest.mark.parametrize("output", [7, SimpleNamespace(new_requests=[]), SchedulerOutput(None, [])])
def test_schedules_that_are_none(llm, output):
    assert llm.connector_scheduler.build_connector_meta(output) == SemBlendConnectorMetadata()
    assert runtime_for(llm.llm_args).faults["build_connector_meta"] == 1
    assert serves_on(llm)


@pytest.mark.parametrize("blocks", [None, [None], "ab"])
def test_one_request_that_cannot_be_read_spoils_no_other(llm, blocks):
    scheduler = llm.connector_scheduler
    scheduler.get_num_new_matched_tokens(bare(1), 0)
    scheduler.get_num_new_matched_tokens(bare(2, get_tokens=lambda beam=0: PROMPT[::-1]), 0)
    output = SchedulerOutput([RequestData(1, PROMPT, blocks, 0, 100), RequestData(2, PROMPT, [4, 5], 0, 16)])
    metadata = scheduler.build_connector_meta(output)
    assert [each.request_id for each in metadata.progress] == [2]
    assert [each.request_id for each in metadata.intents] == [2]
    assert runtime_for(llm.llm_args).faults["request_data"] == 1


@pytest.mark.known_defect(25)
@pytest.mark.parametrize(("blocks", "kept"), [((3, -1, 5), 8), ((-1, 3), 0), ((2, 10_000), 8)])
def test_blocks_that_are_no_rows_of_the_pool_are_never_saved(llm, blocks, kept):
    class Reader:
        def take_events(self):
            told.extend(runtime.saved)

    worker, runtime, told, reader = llm.connector_worker, runtime_for(llm.llm_args), [], Reader()
    runtime.scheduler = reader
    worker.bind_connector_meta(
        SemBlendConnectorMetadata(
            intents=(SaveIntent(9, "donor", 100),), progress=(RequestProgress(9, blocks, 8 * len(blocks), True),)
        )
    )
    worker.start_load_kv(None)
    done, _ = worker.get_finished([9], [])
    while 9 not in done:
        done, _ = worker.get_finished([], [])
    (news,) = told
    assert news.tokens == kept or news.error is not None


@pytest.mark.parametrize("shape", [(4,), (4, 3, 2), (4, 3, 1, 256), (4, 2, 2, 256), (4, 3, 2, 255), (4, 3, 2, 256, 1)])
def test_pools_of_another_shape(tiny_qwen2_path, make_llm, shape):
    args = make_llm().llm_args
    scheduler, worker = SemBlendKvConnectorScheduler(args), SemBlendKvConnectorWorker(args)
    worker.register_kv_caches(torch.zeros(shape))
    assert scheduler.get_num_new_matched_tokens(bare(), 0) == (0, False)
    assert scheduler.reuse_of(77).reason == "pool_layout"


def test_layouts_that_cannot_be_read(make_llm):
    args = make_llm().llm_args
    scheduler, worker = SemBlendKvConnectorScheduler(args), SemBlendKvConnectorWorker(args)
    worker.register_kv_cache_layout(SimpleNamespace())
    scheduler.get_num_new_matched_tokens(bare(), 0)
    assert scheduler.reuse_of(77).reason == "pool_layout"


def older_metadata():
    """As a version without the newest fields would pickle it."""
    metadata = object.__new__(SemBlendConnectorMetadata)
    object.__setattr__(metadata, "plans", ())
    object.__setattr__(metadata, "intents", (SaveIntent(9, "donor", 100),))
    object.__setattr__(metadata, "progress", (("9", "blocks"),))
    return metadata


@pytest.mark.parametrize("metadata", [{"plans": []}, "old", 7, older_metadata()])
def test_metadata_of_another_version_ends_reuse_and_nothing_else(llm, metadata):
    worker, runtime = llm.connector_worker, runtime_for(llm.llm_args)
    worker.bind_connector_meta(metadata)
    worker.start_load_kv(None)
    assert runtime.faults["metadata"] == 1
    (output,) = llm.generate([PROMPT], TWO)
    assert (output.outputs[0].finish_reason, output.reuse_reason) == ("length", "metadata_version")
