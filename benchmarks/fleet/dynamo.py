"""Requests through Dynamo's frontend and our component: who gets them, what kills cost, how fast answers pass.

Two workers answer without an engine. A text comes after each of five instructions, each round once the events of
the one before are known. Kills end a worker in the middle of its answers, and it is started again. The component's
speed is that of answers of 256 tokens, 32 at once, which the workers give as fast as they can.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fleet.events import loopback_server
from benchmarks.program import Count, run_counted
from semblend_trt.model_tokenizer import load_tokenizer
from validation.results import Results

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


INSTRUCTIONS = (
    "Summarise:",
    "Who speaks here, and where?",
    "Translate the following passage to plain words, and keep names as they are.",
    "List three facts.",
    "Go on with this old page of a book in its own style:",
)
CONCURRENCIES = (1, 4, 16)
TEXT_WORDS, EVENT_SECONDS = 420, 1.0
KILLS, KILL_SECONDS, KILLED_TOKENS, KILLED_AT_ONCE, TOKEN_SECONDS = 3, 2.0, 48, 8, 0.01
SPEED_TOKENS, SPEED_AT_ONCE = 256, 32


@contextmanager
def running(token_seconds: float) -> Iterator[DynamoFleet]:
    """Start a nats-server, a frontend, a component and the workers 1 and 2."""
    with tempfile.TemporaryDirectory() as folder, loopback_server() as server:
        fleet = DynamoFleet(Path(folder), server.url)
        try:
            fleet.component()
            for number in (1, 2):
                fleet.worker(number, "--token-seconds", str(token_seconds))
            yield fleet
        finally:
            fleet.close()


async def with_client(fleet: DynamoFleet, work: Callable[[aiohttp.ClientSession], Awaitable[float]]) -> float:
    """Return what `work` measures once both workers answer."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        await fleet.ready(client, 2)
        return await work(client)


async def gathered(
    fleet: DynamoFleet, client: aiohttp.ClientSession, prompts: list[list[int]], most: int, at_once: int
) -> list[Answer]:
    """Return the answers of `most` tokens to `prompts`, `at_once` at a time."""
    turns = asyncio.Semaphore(at_once)

    async def ask(prompt: list[int]) -> Answer:
        async with turns:
            return await fleet.ask(client, prompt, most)

    return await asyncio.gather(*map(ask, prompts))


def prompts_of(texts: int, seed: int) -> list[list[list[int]]]:
    """Return the texts' prompts, each round after another instruction."""
    tokenizer, draws = load_tokenizer(str(MODEL_PATH)), random.Random(seed)
    words = (files("validation") / "assets" / "excerpt.txt").read_text(encoding="utf-8").split()
    chosen = [" ".join(draws.choices(words, k=TEXT_WORDS)) for _ in range(texts)]
    return [[tokenizer.encode(f"{each} ({at}) {text}") for at, text in enumerate(chosen)] for each in INSTRUCTIONS]


async def routed_to_holder(
    fleet: DynamoFleet, rounds: list[list[list[int]]], at_once: int, client: aiohttp.ClientSession
) -> float:
    """Return the share of the later rounds' requests that the first round's worker got."""
    seen: list[list[str]] = []
    for prompts in rounds:
        seen.append([answer.placed["worker"] for answer in await gathered(fleet, client, prompts, 16, at_once)])
        await asyncio.sleep(EVENT_SECONDS)
    follows: list[bool] = [each == first for later in seen[1:] for each, first in zip(later, seen[0], strict=True)]
    return sum(follows) / len(follows)


async def answered_through_kills(fleet: DynamoFleet, streams: int, client: aiohttp.ClientSession) -> float:
    """Return the share of the streams that are whole, and the same as without kills."""
    draws = random.Random(0)
    prompts = [[draws.randrange(100, 2000) for _ in range(100)] for _ in range(streams)]
    whole = [answer.text for answer in await gathered(fleet, client, prompts, KILLED_TOKENS, KILLED_AT_ONCE)]
    asked = asyncio.create_task(gathered(fleet, client, prompts, KILLED_TOKENS, KILLED_AT_ONCE))
    for kill in range(KILLS):
        await asyncio.sleep(KILL_SECONDS)
        await fleet.ready(client, 2)  # or no worker may be left
        number = 1 + kill % 2
        fleet.end(f"worker-{number}", signal.SIGKILL)
        fleet.worker(number, "--token-seconds", str(TOKEN_SECONDS))
    if asked.done():
        raise RuntimeError(f"{streams} streams ended before {KILLS} kills; ask for more")
    answers = await asked
    return sum(each.error is None and each.text == text for each, text in zip(answers, whole, strict=True)) / streams


async def tokens_per_s(fleet: DynamoFleet, streams: int, client: aiohttp.ClientSession) -> float:
    """Return the tokens a second of answers that the workers give at once."""
    prompts = [[100 + at] * 100 for at in range(streams)]
    start = time.perf_counter()
    answers = await gathered(fleet, client, prompts, SPEED_TOKENS, SPEED_AT_ONCE)
    seconds = time.perf_counter() - start
    return float(sum(answer.usage["completion_tokens"] for answer in answers)) / seconds


def run(texts: int, streams: int, results: Results) -> None:
    """Add the rows."""
    shares = []
    with running(0.0) as fleet:
        for seed, at_once in enumerate(CONCURRENCIES):
            work = partial(routed_to_holder, fleet, prompts_of(texts, seed), at_once)
            shares.append(asyncio.run(with_client(fleet, work)))
        speed = asyncio.run(with_client(fleet, partial(tokens_per_s, fleet, streams // 2)))
    with running(TOKEN_SECONDS) as fleet:
        answered = asyncio.run(with_client(fleet, partial(answered_through_kills, fleet, streams)))
    placed = f"{texts} texts after {len(INSTRUCTIONS)} instructions, 1, 4 and 16 at once, the worst; 2 workers"
    results.add("dynamo_routed_to_holder_share", min(shares), "share", placed, 0.98, "higher")
    killed = f"{streams} streams of {KILLED_TOKENS} tokens, {KILLED_AT_ONCE} at once, through {KILLS} kills of a worker"
    results.add("dynamo_answered_through_kills", answered, "share", killed, 1.0, "higher")
    passed = (
        f"answers of {SPEED_TOKENS} tokens, {SPEED_AT_ONCE} at once, with frontend, workers and client on the machine"
    )
    results.add("dynamo_component_tokens_per_s", speed, "tokens/s", passed, 7000.0, "higher")


_COUNTS = [Count("texts", 40, "texts"), Count("streams", 600, "streams through kills")]
main = partial(run_counted, {"fleet_dynamo": run}, __doc__, _COUNTS)

if __name__ == "__main__":
    main()
