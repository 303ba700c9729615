"""A frontend of Dynamo, our component, two workers and a nats-server, started once for a module."""

import asyncio
import random

import aiohttp
import pytest

from benchmarks.fleet.dynamo_fleet import PACKAGES, DynamoFleet
from tests.semblend_trt.conftest import NatsServer

# Seconds to a token, so that a test has time in the middle of an answer.
TOKEN_SECONDS, WAIT_SECONDS = "0.02", 120


class RunningFleet(DynamoFleet):
    """A fleet with its nats-server, for tests that are coroutine functions."""

    def __init__(self, folder):
        self.nats = NatsServer(folder / "nats")
        self.nats.start()
        super().__init__(folder, self.nats.url)

    def mend(self):
        """Starts what an earlier test has ended, ends what it has added, and waits until both workers answer."""
        for name in self.running() - {"frontend", "component", "worker-1", "worker-2"}:
            self.end(name)
        if "component" not in self.running():
            self.component()
        for number in {1, 2} - {int(name[-1]) for name in self.running() if name.startswith("worker-")}:
            self.begin(number)
        self.run(self.both_answer)

    def begin(self, number, *arguments, **keywords):
        self.worker(number, "--token-seconds", TOKEN_SECONDS, *arguments, **keywords)

    def run(self, test):
        """Runs `test(client)` with a session of HTTP."""

        async def with_client():
            async with aiohttp.ClientSession() as client:
                return await test(client)

        return asyncio.run(asyncio.wait_for(with_client(), WAIT_SECONDS))

    async def both_answer(self, client):
        await self.ready(client, 2)

    def close(self):
        super().close()
        self.nats.kill()


@pytest.fixture
def fleet(started):
    """A frontend, the component, and the workers 1 and 2, which answer."""
    started.mend()
    return started


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    if not PACKAGES.is_dir():
        pytest.skip(f"skipped: {PACKAGES.name} is not there; `make dynamo-env` installs Dynamo")
    running = RunningFleet(tmp_path_factory.mktemp("dynamo"))
    yield running
    running.close()


@pytest.fixture
def some(request):
    """some(count): other token ids for each test."""
    generator = random.Random(request.node.name)
    return lambda count: [generator.randrange(32, 2000) for _ in range(count)]
