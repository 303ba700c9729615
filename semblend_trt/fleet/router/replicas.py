"""ReplicaSet: the replicas behind a router, which of them answer, and how much each has to compute."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from semblend_trt.fleet.routing_policy import Replica

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from semblend_trt.fleet.directory import Worker
    from semblend_trt.fleet.router.config import ReplicaConfig

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ReplicaState:
    """What is known of a replica. `load` are the tokens of prefill that it was sent and has not answered."""

    worker: Worker
    url: str
    is_healthy: bool = False
    load: int = 0
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class Taken:
    """A request that a replica was given."""

    state: ReplicaState
    tokens: int

    def answered(self) -> None:
        """The prompt is computed: it is no load any more, though the request goes on."""
        self.state.load -= self.tokens
        self.tokens = 0


class ReplicaSet:
    """Belongs to one event loop. A replica is healthy when its /health said so and no request found it dead since.

    `start` checks all of them once, and from then on each `health_seconds`, until `stop`.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaConfig],
        session: aiohttp.ClientSession,
        *,
        health_seconds: float,
        answer_seconds: float,
    ) -> None:
        states = (ReplicaState((each.worker_id, each.dp_rank), each.url) for each in replicas)
        self.states = {state.worker: state for state in states}
        self._session, self._health_seconds = session, health_seconds
        self._timeout = aiohttp.ClientTimeout(total=answer_seconds)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.check()
        self._task = asyncio.create_task(self._watch(), name="semblend-replicas")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def check(self) -> None:
        """Asks every replica once whether it is healthy."""
        await asyncio.gather(*(self._check(state) for state in self.states.values()))

    async def is_well(self, worker: Worker) -> bool:
        """Asks one replica whether it is healthy."""
        await self._check(self.states[worker])
        return self.states[worker].is_healthy

    def seen(self, excluded: Collection[Worker] = ()) -> list[Replica]:
        """The replicas as a policy sees them; those `excluded` look dead."""
        return [
            Replica(state.worker, state.load, state.is_healthy and state.worker not in excluded)
            for state in self.states.values()
        ]

    def found_dead(self, worker: Worker) -> None:
        """A request could not reach the replica; it is left alone until a check finds it healthy."""
        self._set(self.states[worker], healthy=False)

    @contextmanager
    def taking(self, worker: Worker, tokens: int) -> Iterator[Taken]:
        """The replica has one more request, of so many tokens to compute, until the block ends."""
        state = self.states[worker]
        taken = Taken(state, tokens)
        state.load += tokens
        state.in_flight += 1
        try:
            yield taken
        finally:
            taken.answered()
            state.in_flight -= 1

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._health_seconds)
            await self.check()

    async def _check(self, state: ReplicaState) -> None:
        try:
            async with self._session.get(
                state.url + "/health", timeout=self._timeout, allow_redirects=False
            ) as response:
                healthy = response.status == 200
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            healthy = False
        self._set(state, healthy=healthy)

    def _set(self, state: ReplicaState, *, healthy: bool) -> None:
        if healthy != state.is_healthy:
            state.is_healthy = healthy
            logger.warning("replica %d.%d is %s", *state.worker, "healthy" if healthy else "dead")
