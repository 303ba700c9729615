"""What lookups need is built when the caches are registered, so that no request waits for it."""

from __future__ import annotations

import pytest
import torch

from engine_wrapper.embedded.llm_args import LlmArgs
from semblend_trt.connector import SemBlendKvConnectorScheduler, SemBlendKvConnectorWorker
from semblend_trt.runtime import runtime_for

POOL = torch.zeros(8, 3, 2, 2 * 8 * 16)


@pytest.fixture
def pair(tiny_qwen2_path, monkeypatch):
    monkeypatch.setenv("SEMBLEND_MODEL_REVISION", "one")
    args = LlmArgs(model=tiny_qwen2_path)
    scheduler, worker = SemBlendKvConnectorScheduler(args), SemBlendKvConnectorWorker(args)
    yield scheduler, worker
    scheduler.close()
    worker.close()


def test_the_library_is_there_before_the_first_request(pair):
    scheduler, worker = pair
    scheduler.wait_for_initialization()  # some engines ask before there are caches
    assert scheduler.donor_index is None
    worker.register_kv_caches(POOL)
    assert scheduler.donor_index is not None


def test_nothing_is_built_where_nothing_may_be_reused(pair):
    scheduler, worker = pair
    worker.register_kv_caches(POOL[:, :2])
    assert scheduler.donor_index is None
    assert runtime_for(scheduler._llm_args).refusal == "pool_layout"


def test_what_cannot_be_built_is_counted_and_tried_again(pair, monkeypatch):
    scheduler, worker = pair
    with monkeypatch.context() as broken:
        broken.setattr("semblend_trt.connector.scheduler.namespace_for", lambda *_: 1 / 0)
        worker.register_kv_caches(POOL)
    assert scheduler.donor_index is None
    assert runtime_for(scheduler._llm_args).faults == {"wait_for_initialization": 1}
    assert scheduler.namespace is not None
