"""What half-open connections, and a tenant that sends all it may, cost other clients.

`python -m validation.benchmarks.crowding` opens half-open connections to a router and to a worker that have 256
descriptors each, and sends good requests meanwhile; then it measures one tenant's small requests, alone and beside
another tenant that sends the longest bodies and prompts without pause, through a router with two workers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import resource
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np

from kernels.results import Count, Results, run_counted
from validation.benchmarks.server_process import fleet, key_of, worker

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from threading import Event

    from validation.benchmarks.server_process import ServerProcess

CONNECTIONS = 2_000
REQUESTS = 200
WARM_UPS = 20
LEAST_SURVIVED, MOST_SLOWDOWN = 1_000, 3.0
DESCRIPTORS = 256
# A good request has to be answered within so many seconds.
PATIENCE = 5.0
CONNECTIONS_A_SECOND = 100.0
CONNECTIONS_A_REQUEST = 10
HALVES = (
    b"",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Le",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{",
)
TENANTS = ("quiet", "noisy")
# What the noisy tenant sends at once, and what it may have under way.
SENDERS, TENANT_REQUESTS = 8, 1
BODY_BYTES, LONGEST_PROMPT = 2 << 20, 8_192


@dataclass(slots=True)
class Crowded:
    """Good requests beside half-open connections: how many of these were open before one failed, and the slowest."""

    survived: int = 0
    slowest: float = 0.0
    requests: int = 0
    log_bytes: int = 0


def ask(url: str, body: bytes, tenant: str = TENANTS[0], patience: float = 60.0) -> tuple[int, float]:
    """Sends a body; the answer's status, 0 without an answer, and the seconds that it took."""
    headers = {"Authorization": f"Bearer {key_of(tenant)}"}
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url + "/v1/completions", body, headers), timeout=patience
        ) as got:
            got.read()
            status = int(got.status)
    except urllib.error.HTTPError as error:
        error.read()
        status = error.code
    except (OSError, TimeoutError):
        status = 0
    return status, time.perf_counter() - began


def small(number: int) -> bytes:
    """A small request that shares no prefix with another one."""
    return json.dumps({"prompt": f"{number} is the number of this question, and so", "max_tokens": 4}).encode()


def routed(workers: int, folder: Path, descriptors: int | None = None) -> AbstractContextManager[ServerProcess]:
    """A router, with at most `descriptors`, in front of `workers` workers."""
    return fleet(
        folder,
        [worker("--worker-id", str(number + 1)) for number in range(workers)],
        TENANTS,
        descriptors=descriptors,
        policy="least_loaded",
        max_prompt_tokens=LONGEST_PROMPT,
        tenant_requests=TENANT_REQUESTS,
        tenant_bytes=BODY_BYTES,
        max_body_bytes=BODY_BYTES,
    )


def crowded(server: ServerProcess, connections: int) -> Crowded:
    """Opens half-open connections, which all stay open, and sends a good request after every few."""
    address, crowd, said = server.address(), Crowded(), len(server.log)
    split = urlsplit(address)
    assert split.hostname is not None
    assert split.port is not None
    ask(address, small(0))
    with contextlib.ExitStack() as opened:
        for number in range(1, connections + 1):
            half = opened.enter_context(socket.create_connection((split.hostname, split.port), PATIENCE))
            with contextlib.suppress(OSError):
                half.sendall(HALVES[number % len(HALVES)])
            time.sleep(1 / CONNECTIONS_A_SECOND)
            if number % CONNECTIONS_A_REQUEST == 0:
                status, seconds = ask(address, small(number), patience=PATIENCE)
                crowd.requests += 1
                crowd.slowest = max(crowd.slowest, seconds)
                if status != 200 or seconds > PATIENCE:
                    break
                crowd.survived = number
    crowd.log_bytes = len(server.log) - said
    return crowd


def send_all(url: str, begun: Event, ended: Event) -> Counter[int]:
    """The noisy tenant: sends the longest body and the longest prompt that fits, in turn, many at once.

    Sets `begun` when one was answered, goes on until `ended` is set, and returns the statuses of the answers.
    """
    longest = json.dumps({"prompt": "a" * (BODY_BYTES - 64), "max_tokens": 4}).encode()
    fits = json.dumps({"prompt": [1] * (LONGEST_PROMPT - 8), "max_tokens": 4}).encode()

    def send(_: int) -> Counter[int]:
        statuses: Counter[int] = Counter()
        for body in itertools.cycle((longest, fits)):
            statuses[ask(url, body, TENANTS[1])[0]] += 1
            begun.set()
            if ended.is_set():
                break
        return statuses

    with ThreadPoolExecutor(SENDERS) as threads:
        return sum(threads.map(send, range(SENDERS)), Counter())


def p95_ms(url: str, requests: int, first: int) -> float:
    """95th percentile of small requests' times, one after the other. Raises RuntimeError where one is not served."""
    asked = [ask(url, small(first + number)) for number in range(requests)]
    if wrong := [status for status, _ in asked if status != 200]:
        raise RuntimeError(f"{len(wrong)} of {requests} small requests were not served: status {wrong[0]}")
    return float(np.percentile([seconds for _, seconds in asked], 95) * 1e3)


def run_half_open(connections: int, rows: Results) -> None:
    """Measures the row of half-open connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, connections + 512)), hard))
    with tempfile.TemporaryDirectory() as folder, routed(1, Path(folder), DESCRIPTORS) as front:
        by_router = crowded(front, connections)
    alone = worker(descriptors=DESCRIPTORS)
    try:
        by_worker = crowded(alone, connections)
    finally:
        alone.kill()
    told = ", ".join(
        f"{name}: slowest of {each.requests} good requests {each.slowest:.2f} s, {each.log_bytes:,} bytes of log"
        for name, each in (("router", by_router), ("worker", by_worker))
    )
    survived = min(by_router.survived, by_worker.survived)
    rows.add(
        "half_open_connections_survived",
        survived,
        "connections",
        f"{DESCRIPTORS} descriptors; {told}",
        LEAST_SURVIVED,
        "higher",
    )


def run_noisy(requests: int, rows: Results) -> None:
    """Measures the rows of the noisy tenant."""
    # In another process, so that sending does not slow down the requests that are timed.
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        routed(2, Path(folder)) as front,
        spawn.Manager() as manager,
        ProcessPoolExecutor(1, spawn) as process,
    ):
        url, begun, ended = front.address(), manager.Event(), manager.Event()
        p95_ms(url, WARM_UPS, 0)
        calm = p95_ms(url, requests, WARM_UPS)
        noise = process.submit(send_all, url, begun, ended)
        try:
            while not (begun.wait(1) or noise.done()):
                pass
            noisy = p95_ms(url, requests, WARM_UPS + requests)
        finally:
            ended.set()
        answered = ", ".join(f"{count} x {status}" for status, count in sorted(noise.result().items()))
    told = (
        f"p95 of {requests} small requests: calm {calm:.1f} ms, {noisy:.1f} ms beside {SENDERS} senders of a tenant "
        f"that may have {TENANT_REQUESTS} under way, answered {answered}; 2 workers"
    )
    rows.add("noisy_tenant_slowdown", noisy / calm, "x", told, MOST_SLOWDOWN)


def run(connections: int, requests: int, rows: Results) -> None:
    """Measures all rows."""
    run_half_open(connections, rows)
    run_noisy(requests, rows)


_COUNTS = (
    Count("connections", CONNECTIONS, "half-open ones", CONNECTIONS_A_REQUEST),
    Count("requests", REQUESTS, "small ones, each time"),
)
main = partial(run_counted, "crowding", __doc__, _COUNTS, run)


if __name__ == "__main__":
    main()
