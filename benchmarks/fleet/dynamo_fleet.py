"""A frontend of Dynamo, our component and workers without an engine, in processes of their own on 127.0.0.1."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp

# What `make dynamo-env` installs beside the environment that runs this.
PACKAGES = Path(f"{sys.prefix}-dynamo")
MODEL, WORKERS = "rule", "engines.backend.generate"
START_SECONDS = 300
_POLL_SECONDS = 0.05
MODEL_PATH = Path(str(files("validation") / "assets" / "model"))
_ROOT = Path(__file__).resolve().parents[2]
_HERE = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    "DYN_SELF_HOST_METADATA": "0",
    # Without it no trace goes from part to part.
    "DYN_LOGGING_JSONL": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got: status, text, the error or None, usage, and `engine_data`."""

    status: int
    text: str = ""
    error: Any = None
    usage: Any = None
    told: Any = None

    @property
    def placed(self) -> dict[str, Any]:
        """Return the component's receipt: worker, held_tokens, attempts."""
        return dict(self.told["semblend"])


class DynamoFleet:
    """The processes of a fleet, by name; each writes its log into `folder`. `close` ends all of them."""

    def __init__(self, folder: Path, nats: str) -> None:
        self._folder, self._nats = folder, nats
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        port, self._metrics_port = islice(free_ports(), 2)
        self.address = f"http://127.0.0.1:{port}"
        # The frontend repeats what it has sent to a component that ended.
        frontend = ("--http-host", "127.0.0.1", "--namespace", "public", "--migration-limit", "3")
        self.start("frontend", "dynamo.frontend", *frontend, "--http-port", str(port))

    def start(self, name: str, module: str, *arguments: str, python: str = sys.executable, **variables: str) -> None:
        """Start a module of Python."""
        path = variables.pop("PYTHONPATH", "")
        own = {"PYTHONPATH": f"{_ROOT}:{path}:{PACKAGES}", "DYN_FILE_KV": str(self._folder / "kv")}
        own["SEMBLEND_NATS_URL"] = self._nats
        with self.log_of(name).open("ab") as log:
            command, environment = [python, "-m", module, *arguments], os.environ | _HERE | own | variables
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self._processes[name] = process

    def component(self, name: str = "component", **variables: str) -> None:
        """Start a component for the workers; the first one's series are those of `counted`."""
        if name == "component":
            variables["DYN_SYSTEM_PORT"] = str(self._metrics_port)
        self.start(name, "semblend_trt.fleet.dynamo", "--model-name", MODEL, "--workers", WORKERS, **variables)

    async def counted(self, client: aiohttp.ClientSession, series: str) -> float:
        """Return a series of the first component, such as `semblend_dynamo_requests_total{result="answered"}`."""
        async with client.get(f"http://127.0.0.1:{self._metrics_port}/metrics") as response:
            found = [line for line in (await response.text()).splitlines() if line.startswith(series[:-1])]
        return float(found[0].split(" ")[-1])

    def worker(self, number: int, *arguments: str, model: Path = MODEL_PATH) -> None:
        """Start the worker `number`."""
        ours = ("--endpoint", WORKERS, "--model-path", str(model), "--model-name", MODEL, "--nats", self._nats)
        self.start(f"worker-{number}", "benchmarks.fleet.dynamo_worker", *ours, "--worker-id", str(number), *arguments)

    def running(self) -> set[str]:
        """Return the names of what was started and not ended."""
        return set(self._processes)

    def log_of(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def send(self, name: str, number: int) -> None:
        """Send a signal to a process and to those that it started."""
        os.killpg(self._processes[name].pid, number)

    def end(self, name: str, number: int = signal.SIGKILL) -> int:
        """End a process by a signal, and return its status."""
        self.send(name, number)
        return self._processes.pop(name).wait(START_SECONDS)

    def close(self) -> None:
        for name in list(self._processes):
            self.send(name, signal.SIGCONT)
            self.end(name)

    async def ask(
        self,
        client: aiohttp.ClientSession,
        prompt: Sequence[int],
        most: int,
        *,
        on_event: Callable[[], None] = lambda: None,
        **fields: Any,
    ) -> Answer:
        """Return the streamed answer of `most` tokens to token ids; call `on_event` at each event.

        `fields` are the request's, and `salt` and `headers`."""
        nvext = {"extra_fields": ["engine_data"], "cache_salt": fields.pop("salt", None)}
        headers, body = fields.pop("headers", {}), {"model": MODEL, "prompt": list(prompt), "max_tokens": most}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "nvext": nvext, **fields}
        text, error, usage, told, is_whole = "", None, None, None, False
        async with client.post(f"{self.address}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200 or not body["stream"]:
                return Answer(response.status, error=await response.text())
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                is_whole = is_whole or data == b"[DONE]"
                if not line.startswith(b"data: ") or is_whole:
                    continue
                event = json.loads(data)
                on_event()
                error = event.get("error", error)
                usage = event.get("usage") or usage
                told = (event.get("nvext") or {}).get("engine_data", told)
                text += "".join(choice["text"] for choice in event.get("choices", ()))
        return Answer(200, text, error or (None if is_whole else "no end"), usage, told)

    async def ready(self, client: aiohttp.ClientSession, workers: int) -> None:
        """Wait until that number of `workers` has answered. Raise RuntimeError with the logs' ends when they do not."""
        until, seen = time.monotonic() + START_SECONDS, set[str]()
        while len(seen) < workers:
            if time.monotonic() > until or any(each.poll() is not None for each in self._processes.values()):
                logs = [self.log_of(name).read_text()[-2000:] for name in self._processes]
                raise RuntimeError(f"{seen} of {workers} workers answered:\n" + "\n".join(logs))
            await asyncio.sleep(_POLL_SECONDS)
            with suppress(aiohttp.ClientError):
                answer = await self.ask(client, [100 + len(seen)], 1)
                if answer.status == 200 and answer.error is None:
                    seen.add(answer.placed["worker"])


def free_ports() -> Iterator[int]:
    """Yield free ports below those that the system gives, and below 32768, the most that Dynamo reads."""
    for port in range(20_000 + os.getpid() % 5000, 32_768):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            yield port
