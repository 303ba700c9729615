"""A frontend of Dynamo, our component, two workers and a nats-server, started once for a module."""

import asyncio
import inspect
import json
import random
import sys
from pathlib import Path

import aiohttp
import pytest

from benchmarks.fleet.dynamo import MODEL, MODEL_PATH, PACKAGES, WORKERS, DynamoFleet
from engine_wrapper.vllm.doctor import TRANSFER
from tests.semblend_trt.conftest import NatsServer

VLLM = Path(f"{sys.prefix}-vllm")
# Seconds to a token, so that a test has time in the middle of an answer.
TOKEN_SECONDS, WAIT_SECONDS = "0.02", 300


def run(test):
    """Runs `test(client)` with a session of HTTP."""

    async def with_client():
        async with aiohttp.ClientSession() as client:
            return await test(client)

    return asyncio.run(asyncio.wait_for(with_client(), WAIT_SECONDS))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a coroutine function, with a session of HTTP as its `client`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    run(lambda client: pyfuncitem.obj(**arguments | {"client": client}))
    return True


@pytest.fixture
def client():
    """Made where the test runs, in its event loop."""


class RunningFleet(DynamoFleet):
    """A fleet with its nats-server."""

    def __init__(self, folder):
        self.nats = NatsServer(folder / "nats")
        self.nats.start()
        super().__init__(folder, self.nats.url)

    def mend(self):
        """Starts what an earlier test has ended, ends what it has added, and waits until both workers answer."""
        for name in self.processes.keys() - {"frontend", "component", "worker-1", "worker-2"}:
            self.end(name)
        if "component" not in self.processes:
            self.component()
        for number in {1, 2} - {int(name[-1]) for name in self.processes if name.startswith("worker-")}:
            self.begin(number)
        run(lambda client: self.ready(client, 2))

    def begin(self, number, *arguments, **keywords):
        self.worker(number, "--token-seconds", TOKEN_SECONDS, *arguments, **keywords)

    def close(self):
        super().close()
        self.nats.kill()

    async def counted(self, client, series):
        """A series of the first component, such as `semblend_dynamo_requests_total{result="answered"}`."""
        async with client.get(f"http://127.0.0.1:{self.metrics_port}/metrics") as response:
            found = [line for line in (await response.text()).splitlines() if line.startswith(series[:-1])]
        return float(found[0].split(" ")[-1])


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


class VllmFleet(RunningFleet):
    """Its workers are Dynamo's own, of a real vLLM with our connector."""

    def begin(self, number):
        settings = {"policy": "boundary", "recompute_boundary_layer": 2, "worker_id": number}
        transfer = json.dumps(TRANSFER | {"kv_connector_extra_config": settings})
        model = ("--model", str(MODEL_PATH), "--served-model-name", MODEL, "--dtype", "float32", "--block-size", "32")
        ours = (*model, "--max-model-len", "4096", "--enforce-eager", "--kv-transfer-config", transfer)
        here = ("--endpoint", WORKERS, "--dyn-endpoint-types", "completions")
        variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        variables |= {"PYTHONPATH": str(VLLM / "dynamo"), "NUMBA_CACHE_DIR": str(VLLM / "numba")}
        python = str(VLLM / "bin" / "python")
        self.start(f"worker-{number}", "dynamo.vllm", *here, *ours, python=python, **variables)


@pytest.fixture(scope="module")
def vllm_fleet(tmp_path_factory):
    """A frontend, the component and two vLLM workers, which answer."""
    if not (VLLM / "dynamo").is_dir():
        pytest.skip(f"skipped: {VLLM.name}/dynamo is not there; `make dynamo-vllm-env` installs it")
    running = VllmFleet(tmp_path_factory.mktemp("dynamo-vllm"))
    running.mend()
    yield running
    running.close()


@pytest.fixture
def some(request):
    """some(count): other token ids for each test."""
    generator = random.Random(request.node.name)
    return lambda count: [generator.randrange(32, 2000) for _ in range(count)]
