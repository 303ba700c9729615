"""What is wrong with a fleet: ids that two processes have, old and missing events, namespaces that never meet."""

import asyncio
from dataclasses import replace

import pytest

from semblend_trt.cli.fleet import fields_apart
from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.placement import Placement
from semblend_trt.namespace import unknown_value
from tests.semblend_trt.fleet.conftest import DOCUMENT, fed, feed
from tests.semblend_trt.samples import BASE_NAMESPACE
from tests.server_process import wait_for


@pytest.mark.promise("fleet", "Two live processes of one worker id are reported, and neither one's text counts as held")
def test_two_live_processes_of_one_id_are_found_and_neither_holds_anything(directory, clock):
    first, second = (fed(directory, heartbeat=True, generation=generation) for generation in (7, 8))
    assert [holder.tokens for holder in directory.holders(DOCUMENT)] == [1000]
    for _ in range(2):
        assert directory.twice() == set()  # the last word of a process that was replaced is no second process
        clock.now += 10
        feed(directory, first.messages(heartbeat=True))
        feed(directory, second.messages(heartbeat=True))
    assert directory.twice() == {(3, 0)}
    assert directory.holders(DOCUMENT) == ()
    assert directory.status()[1].keys() == {"id_twice"}
    for _ in range(4):
        clock.now += 10
        feed(directory, second.messages(heartbeat=True))
    assert directory.twice() == set()
    assert [holder.tokens for holder in directory.holders(DOCUMENT)] == [1000]


@pytest.mark.promise(
    "fleet",
    "`semblend-trt fleet status` says who is known, which ids are seen twice, whose events are old, and which field "
    "keeps namespaces apart, with status 1 for each",
)
def test_old_and_missing_events_are_found(directory, clock):
    teller = fed(directory, heartbeat=True)
    assert directory.status()[1] == {}
    clock.now += 16
    assert directory.status()[1].keys() == {"old_events"}
    teller.add("b", DOCUMENT)
    teller.messages()
    feed(directory, teller.messages(heartbeat=True))
    assert directory.status()[1].keys() == {"unsynced"}


@pytest.mark.promise("fleet", "`semblend-trt fleet status` says who is...")
def test_the_fields_that_keep_namespaces_apart_are_named():
    one = BASE_NAMESPACE.for_request("acme", "adapter")
    same = BASE_NAMESPACE.for_request(None, None)
    other = replace(BASE_NAMESPACE, kv_dtype="fp8", rope_config={"rope_type": "default", "rope_theta": 5})
    assert fields_apart({"1.0": [one], "2.0": [same]}) == []
    assert fields_apart({"1.0": [one], "2.0": [other.for_request(None, None)]}) == [
        "namespaces do not meet in kv_dtype: 'bfloat16' on 1.0; 'fp8' on 2.0",
        "namespaces do not meet in rope_config.rope_theta: 1000000 on 1.0; 5 on 2.0",
    ]
    unknown = [replace(BASE_NAMESPACE, model_revision=unknown_value()).for_request(None, None) for _ in range(2)]
    assert fields_apart({"1.0": unknown[:1], "2.0": unknown[1:]}) == [
        "namespaces do not meet in model_revision: not determined on 1.0, 2.0"
    ]


@pytest.mark.promise("fleet", "Two live processes of one worker...")
def test_workers_of_one_id_hear_of_each_other(nats_server, make_worker, caplog):
    workers = [make_worker(nats_server, worker=(3, 0), generation=generation) for generation in (7, 8)]

    async def run():
        placement = Placement(ConnectionOptions((nats_server.url,), "semantic-kv-events"))
        await placement.start()
        await asyncio.to_thread(wait_for, lambda: all(each.counters.connections["id_twice"] for each in workers))
        await placement.stop()

    asyncio.run(run())
    assert "another live process has worker id 3" in caplog.text
    assert "two live processes have this worker id" in caplog.text
