"""The health of replicas, from checks and from failed requests, and their load."""

import asyncio
import json

import pytest

from semblend_trt.fleet.router.config import RouterConfig
from semblend_trt.fleet.router.replicas import ReplicaSet, with_receipt
from semblend_trt.fleet.routing_policy import Replica
from semblend_trt.outcome import RECEIPT, VLLM_RECEIPT
from tests.semblend_trt.fleet.router.conftest import router


def test_a_receipt_that_vllm_carries_is_moved_into_the_usage():
    receipt = {"outcome": "cold_fallback", "reused_tokens": 0}
    carried = {"choices": [{"text": "é"}], "usage": {"prompt_tokens": 6}, "kv_transfer_params": {VLLM_RECEIPT: receipt}}
    told = json.loads(with_receipt(json.dumps(carried).encode()))
    assert told == {**carried, "usage": {"prompt_tokens": 6, RECEIPT: receipt}, "kv_transfer_params": None}
    carried["kv_transfer_params"]["other"] = 1
    assert json.loads(with_receipt(json.dumps(carried).encode()))["kv_transfer_params"] == {"other": 1}


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices": [{"text": "semblend.receipt"}], "usage": {}, "kv_transfer_params": null}',
        b'{"choices": [{"text": "semblend.receipt"}]}',
        b'{"usage": null, "kv_transfer_params": {"semblend.receipt": {}}}',
        b'["semblend.receipt"]',
        b"semblend.receipt",
        b"[" * 100_000 + b"semblend.receipt",
        b"\xff semblend.receipt",
    ],
)
def test_an_answer_that_carries_none_goes_on_as_it_came(body):
    assert with_receipt(body) == body


def healthy(replicas):
    return [replica.is_healthy for replica in replicas.seen()]


@router()
async def test_a_replica_is_what_it_says(parts):
    config = RouterConfig(model="tiny", replicas=[{"url": parts.replicas[0].url, "worker_id": 1}])
    assert healthy(ReplicaSet(config, parts.client)) == [False]  # before it has said anything
    replicas = parts.router._replicas
    assert healthy(replicas) == [True, True]
    parts.replicas[0].behave = "ill"
    replicas.states[2, 0].url = "http://127.0.0.1:1"
    await replicas.check()
    assert healthy(replicas) == [False, False]
    parts.replicas[0].behave = "well"
    await replicas.check()
    assert healthy(replicas) == [True, False]


@router()
async def test_who_waits_for_an_idle_replica_goes_on_when_its_last_request_has_ended(parts):
    replicas = parts.router._replicas
    await replicas.idle((1, 0), 5)
    with replicas.taking((1, 0), 1):
        with replicas.taking((1, 0), 1):
            waiting = asyncio.create_task(replicas.idle((1, 0), 5))
            await replicas.idle((2, 0), 5)
            with pytest.raises(asyncio.TimeoutError):
                await replicas.idle((1, 0), 0)
        assert not waiting.done()
    await waiting


@router()
async def test_one_that_was_found_dead_is_left_alone_until_it_is_checked(parts):
    replicas = parts.router._replicas
    await replicas.check()
    replicas.found_dead((1, 0))
    assert healthy(replicas) == [False, True]
    assert [replica.is_healthy for replica in replicas.seen({(2, 0)})] == [False, False]
    await replicas.check()
    assert healthy(replicas) == [True, True]


@router()
async def test_load_is_what_was_sent_and_not_answered(parts):
    replicas = parts.router._replicas
    with replicas.taking((1, 0), 100) as first, replicas.taking((1, 0), 20):
        assert replicas.seen()[0] == Replica((1, 0), 120)
        first.answered()
        assert (replicas.states[1, 0].load, replicas.states[1, 0].in_flight) == (20, 2)
    assert (replicas.states[1, 0].load, replicas.states[1, 0].in_flight) == (0, 0)
