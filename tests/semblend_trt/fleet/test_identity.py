"""Who a worker says it is."""

from __future__ import annotations

import os

import pytest

from semblend_trt.fleet.announcer import generation, worker_id_of
from semblend_trt.fleet.connection import is_meant
from semblend_trt.fleet.wire import Emitter


@pytest.mark.parametrize(
    ("setting", "host", "expected"),
    [
        (7, "worker-3", 7),
        (0, "worker-3", 0),
        (None, "worker-3", 3),
        (None, "trtllm-decode-12.ns.svc", 12),
        (None, "worker3", 0),
        (None, "worker-3a", 0),
        (None, "localhost", 0),
        (None, "a-" + "9" * 16, (1 << 53) - 1),
        (None, "a-" + "9" * 40, 0),
    ],
)
def test_worker_id(setting, host, expected) -> None:
    assert worker_id_of(setting, host) == expected


def test_one_generation_a_process_that_rises() -> None:
    first = generation()
    assert generation() == first
    assert first < 1 << 53
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(generation()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reading, 100)) > first


@pytest.mark.parametrize(
    ("request_bytes", "meant"),
    [
        (b"", True),
        (b"{}", True),
        (b'{"worker_id": 3}', True),
        (b'{"worker_id": 3, "dp_rank": 1}', True),
        (b'{"worker_id": 4}', False),
        (b'{"worker_id": 3, "dp_rank": 0}', False),
        (b"[3]", False),
        (b"\xff", False),
        (b"[" * 1000, False),
        (b" " * 2000, False),
    ],
)
def test_requests_for_a_resync(request_bytes, meant) -> None:
    assert is_meant(request_bytes, Emitter(3, 1, 9)) is meant
