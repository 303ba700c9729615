"""A whole fleet: a NATS server, two workers with the shipped model and a router in front, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.semblend_trt.conftest import NatsServer
from tests.server_process import MODEL, ServerProcess, key_of, worker
from tests.server_process import fleet as routed_fleet
from validation.documents import stock_list
from validation.prompts import render

WAIT_SECONDS = 120
TENANTS = ("acme", "globex")


@dataclass
class Fleet:
    """A running fleet and its client."""

    workers: dict[str, ServerProcess]
    url: str
    trace: Path

    def open(self, prompt, tenant, **fields):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        headers = {"Authorization": f"Bearer {key_of(tenant)}"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=120)

    def ask(self, prompt, tenant="acme", **fields):
        """The worker that answered, and its answer."""
        with self.open(prompt, tenant, **fields) as response:
            return response.headers["X-SemBlend-Worker"], json.load(response)

    def gauge(self, name, worker):
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        values = [line.split()[1] for line in lines if line.startswith(f'semblend_router_{name}{{worker="{worker}"}}')]
        return float(values[0]) if values else 0.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    trace, server = folder / "trace.jsonl", NatsServer(folder / "nats")
    server.start()
    with contextlib.ExitStack() as ending:
        ending.callback(server.kill)
        shared = {"SEMBLEND_NATS_URL": server.url, "SEMBLEND_PROFILE": str(MODEL / "reuse-profile.json")}
        workers = [worker(SEMBLEND_WORKER_ID=str(number), **shared) for number in (1, 2)]
        fields = {"nats_url": server.url, "show_worker": True, "telemetry.path": str(trace)}
        front = ending.enter_context(routed_fleet(folder, workers, TENANTS, **fields))
        yield Fleet(dict(zip(("1.0", "2.0"), workers, strict=True)), front.address(), trace)


def prompts(seed):
    """Prompts and answers: the same documents in other orders, with other instructions and questions."""
    generator = random.Random(seed)
    lists = [stock_list(generator, rows=12) for _ in range(6)]
    orders = (lists, lists[::-1], lists[2:] + lists[:2])
    instructions = ("Answer briefly.", "Look up what is asked for.", "Use the documents.")
    questions = [lists[at].questions[row] for at, row in ((1, 0), (4, 7), (2, 3))]
    parts = zip(instructions, ([each.text for each in order] for order in orders), questions, strict=True)
    return [(render(instruction, texts, question.text), question.answer) for instruction, texts, question in parts]


def wait_for(holds):
    """Waits until `holds()` is true."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "nothing came"


def reused(answer):
    return int(answer["usage"]["prompt_tokens_details"]["reused_tokens"])


def test_requests_land_where_their_documents_are(fleet):
    (first, expected), *others = prompts(0)
    holder, answer = fleet.ask(first)
    assert (answer["choices"][0]["text"], reused(answer)) == (expected, 0)
    wait_for(lambda: fleet.gauge("donors", holder))
    for prompt, expected in others:
        worker, answer = fleet.ask(prompt)
        assert (worker, answer["choices"][0]["text"]) == (holder, expected)
        assert reused(answer) > 200


def test_another_tenant_is_neither_drawn_to_them_nor_served_from_them(fleet):
    """Its request goes to the replica whose turn it is, which is not the last one asked."""
    prompt, expected = prompts(0)[1]
    holder, _ = fleet.ask(prompt)
    worker, answer = fleet.ask(prompt, "globex", cache_salt="guessed")
    assert worker != holder
    assert (answer["choices"][0]["text"], reused(answer)) == (expected, 0)


def test_a_killed_worker_is_replaced(fleet):
    prompt = prompts(0)[2][0]
    holder, _ = fleet.ask(prompt)
    other = next(name for name in fleet.workers if name != holder)
    fleet.workers[holder].freeze()  # so that it cannot have answered before it is killed
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(fleet.ask, prompt, max_tokens=120, ignore_eos=True)
        wait_for(lambda: fleet.gauge("replica_in_flight", holder))
        fleet.workers[holder].kill()
        worker, answer = asking.result()
    assert worker == other
    assert answer["usage"]["completion_tokens"] == 120
    assert (fleet.gauge("replica_healthy", holder), fleet.gauge("replica_healthy", other)) == (0, 1)
