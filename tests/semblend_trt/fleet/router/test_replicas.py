"""Which replicas are healthy, by their own word and by what requests found, and what each has to compute."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.test_utils import TestServer

from semblend_trt.fleet.router.config import ReplicaConfig
from semblend_trt.fleet.router.replicas import ReplicaSet
from semblend_trt.fleet.routing_policy import Replica
from tests.semblend_trt.fleet.router.conftest import WAIT_SECONDS, StandIn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def run(test: Callable[[ReplicaSet, list[StandIn], list[TestServer]], Awaitable[None]], seconds: float = 3600) -> None:
    """Runs `test` with two replicas, checked each `seconds`."""

    async def all_of_it() -> None:
        stand_ins = [StandIn(1), StandIn(2)]
        servers = [TestServer(each.app()) for each in stand_ins]
        for server in servers:
            await server.start_server()
        configs = [ReplicaConfig(url=str(server.make_url("")), worker_id=at) for at, server in enumerate(servers, 1)]
        async with aiohttp.ClientSession() as session:
            replicas = ReplicaSet(configs, session, health_seconds=seconds, answer_seconds=5)
            await test(replicas, stand_ins, servers)
            await replicas.stop()
        for server in servers:
            await server.close()

    asyncio.run(asyncio.wait_for(all_of_it(), WAIT_SECONDS))


def healthy(replicas: ReplicaSet) -> list[bool]:
    return [replica.is_healthy for replica in replicas.seen()]


def test_a_replica_is_what_it_says() -> None:
    async def test(replicas: ReplicaSet, stand_ins: list[StandIn], servers: list[TestServer]) -> None:
        assert healthy(replicas) == [False, False]
        await replicas.start()
        assert healthy(replicas) == [True, True]
        stand_ins[0].behave = "ill"
        await servers[1].close()
        await replicas.check()
        assert healthy(replicas) == [False, False]
        stand_ins[0].behave = "well"
        await replicas.check()
        assert healthy(replicas) == [True, False]

    run(test)


def test_one_that_was_found_dead_is_left_alone_until_it_is_checked() -> None:
    async def test(replicas: ReplicaSet, _: list[StandIn], __: list[TestServer]) -> None:
        await replicas.check()
        replicas.found_dead((1, 0))
        assert healthy(replicas) == [False, True]
        assert [replica.is_healthy for replica in replicas.seen({(2, 0)})] == [False, False]
        await replicas.check()
        assert healthy(replicas) == [True, True]

    run(test)


def test_they_are_checked_again_and_again() -> None:
    async def test(replicas: ReplicaSet, _: list[StandIn], __: list[TestServer]) -> None:
        await replicas.start()
        replicas.found_dead((1, 0))
        while not all(healthy(replicas)):
            await asyncio.sleep(0)

    run(test, seconds=0.01)


def test_load_is_what_was_sent_and_not_answered() -> None:
    async def test(replicas: ReplicaSet, _: list[StandIn], __: list[TestServer]) -> None:
        with replicas.taking((1, 0), 100) as first, replicas.taking((1, 0), 20):
            assert replicas.seen()[0] == Replica((1, 0), 120, is_healthy=False)
            first.answered()
            assert (replicas.states[1, 0].load, replicas.states[1, 0].in_flight) == (20, 2)
        assert (replicas.states[1, 0].load, replicas.states[1, 0].in_flight) == (0, 0)

    run(test)
