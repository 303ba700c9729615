"""Namespaces and donors that the fleet's tests share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from semblend_trt.fleet.announcer import DonorAnnouncer
from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.publisher import EventCounters, EventPublisher, Held, HeldDonors, Outbox
from semblend_trt.fleet.sketch import sketch_key
from semblend_trt.fleet.wire import Emitter, EventFormat, EventWriter
from semblend_trt.model_tokenizer import load_tokenizer
from semblend_trt.namespace import CacheNamespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy.typing as npt


BASE_NAMESPACE = CacheNamespace(
    model="tiny",
    model_revision="r1",
    tokenizer="tiny",
    tokenizer_revision="t1",
    kv_layout="paged",
    block_size=32,
    kv_dtype="bfloat16",
    cache_dtype="bfloat16",
    quantization=None,
    adapter=None,
    rope_config={"rope_theta": 1e6},
    tensor_parallel={"tp_size": 1, "pp_size": 1, "cp_size": 1},
    backend_cache_layout="trtllm_pytorch_primary_pool_v1",
)
NAMESPACE = BASE_NAMESPACE.for_request(None, None)


@pytest.fixture(scope="session")
def base_namespace() -> CacheNamespace:
    """An engine's namespace, bound to no request."""
    return BASE_NAMESPACE


@pytest.fixture(scope="session")
def namespace() -> CacheNamespace:
    """The namespace of requests without a salt."""
    return NAMESPACE


@pytest.fixture(scope="session")
def tokenizer(tiny_qwen2_path: Path) -> Any:
    return load_tokenizer(str(tiny_qwen2_path))


@pytest.fixture(scope="session")
def text() -> Callable[[int, int], npt.NDArray[np.int32]]:
    """text(seed, length): token ids, int32 [length]."""

    def make(seed: int, length: int) -> npt.NDArray[np.int32]:
        return np.random.default_rng(seed).integers(0, 150_000, length, dtype=np.int32)

    return make


class Teller:
    """A worker that tells of donors, without a network: `news` are the messages since they were last asked for."""

    def __init__(self, worker: tuple[int, int], namespace: CacheNamespace, generation: int = 7) -> None:
        self.worker, self.generation, self._namespace = worker, generation, namespace
        self.salts: dict[str, str | None] = {}
        self._library = HeldDonors()
        self._begin()

    def _begin(self) -> None:
        self._outbox = Outbox(
            EventWriter(Emitter(*self.worker, self.generation), EventFormat.JSON), EventCounters(enabled=False)
        )
        self._outbox.add(self._library)

    @property
    def held(self) -> dict[str, str]:
        """Tier by donor id."""
        return {donor_id: held.tier for donor_id, held in self._library.donors.items()}

    def add(self, donor_id: str, tokens: npt.NDArray[np.int32], salt: str | None = None) -> None:
        namespace = self._namespace.for_request(salt, None)
        key = b"" if salt is None else sketch_key(namespace.key, salt)
        self._library.donors[donor_id] = Held(namespace, key, "device", len(tokens), tokens)
        self.salts[donor_id] = salt
        self._note(donor_id)

    def move(self, donor_id: str) -> None:
        if donor_id in self._library.donors:
            self._library.donors[donor_id].tier = "host"
            self._note(donor_id)

    def remove(self, donor_id: str) -> None:
        if self._library.donors.pop(donor_id, None) is not None:
            del self.salts[donor_id]
            self._note(donor_id)

    def restart(self) -> None:
        """The process ends and comes back with what it kept."""
        self.generation += 1000
        self._begin()

    def resync(self) -> None:
        self._outbox.resync()

    def news(self, heartbeat: bool = False) -> list[bytes]:
        self._outbox.absorb(1 << 20)
        payloads = [notice.payload for notice in self._outbox.take(1 << 20)]
        return [*payloads, self._outbox.heartbeat(10.0).payload] if heartbeat else payloads

    def _note(self, donor_id: str) -> None:
        self._outbox.changes.append((self._library, donor_id))


@pytest.fixture(scope="session")
def make_teller(base_namespace: CacheNamespace) -> Callable[..., Teller]:
    """make_teller(worker, generation=7): a worker of the engine's namespace."""
    return lambda worker, generation=7: Teller(worker, base_namespace, generation)


class PublishingWorker:
    """A publisher with one library whose donors tests add and take away."""

    def __init__(
        self,
        options: ConnectionOptions,
        namespace: Any,
        worker: tuple[int, int] = (3, 0),
        generation: int = 7,
        **keywords: Any,
    ) -> None:
        self.counters = EventCounters(enabled=False)
        settings = {"heartbeat_seconds": 0.1, "resync_seconds": 0.0} | keywords
        self.publisher = EventPublisher(options, Emitter(*worker, generation), self.counters, **settings)
        self.news = DonorAnnouncer(self.publisher, self.publisher.close)
        self.held: dict[str, str] = {}
        self._namespace = namespace

    def add(self, donor_id: str, length: int = 100, salt: str | None = None) -> None:
        tokens = np.random.default_rng(len(donor_id)).integers(0, 150_000, length, dtype=np.int32)
        self.news.intended(donor_id, self._namespace, salt)
        self.news.held(donor_id, tokens, "device")
        self.held[donor_id] = "device"

    def move(self, donor_id: str) -> None:
        self.news.moved(donor_id, "host")
        self.held[donor_id] = "host"

    def remove(self, donor_id: str) -> None:
        self.news.gone(donor_id)
        del self.held[donor_id]

    def churn(self, rng: np.random.Generator, steps: int) -> None:
        for step in range(steps):
            if self.held and rng.random() < 0.4:
                self.remove(str(rng.choice(sorted(self.held))))
            elif self.held and rng.random() < 0.3:
                self.move(str(rng.choice(sorted(self.held))))
            else:
                self.add(f"donor-{step}-{rng.integers(1 << 40)}")


class Relay:
    """Stands between workers and a server on a thread of its own, and can keep a stream's acknowledgements to itself.

    `repeats` is how many of those that it passed on say that the stream had the message already.
    """

    def __init__(self, server: Any) -> None:
        self.repeats = self.kept = 0
        self._server_port, self._pass, self._keep, self._is_to_cut = server.port, 0, 0, False
        self._news = threading.Condition()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._listener = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def keep(self, count: int, after: int = 0, is_to_cut: bool = False) -> None:
        """Passes the next `after` acknowledgements on, keeps `count` and then, where asked to, cuts all connections."""
        self._pass, self._keep, self._is_to_cut = after, count, is_to_cut

    def wait_for_kept(self, count: int, timeout: float = 30) -> bool:
        """Waits until `count` acknowledgements were kept in all; False when they were not in `timeout` seconds."""
        with self._news:
            return self._news.wait_for(lambda: self.kept >= count, timeout)

    def end(self) -> None:
        """Cuts all connections and takes no more."""
        self._do(self._end())

    def close(self) -> None:
        self.end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._writers |= {writer, server_writer}
        await asyncio.gather(self._ask(reader, server_writer), self._answer(server_reader, writer))

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes on what the server says, message by message, but for what is to be kept."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                verb, *words = line.split()
                body = await reader.readexactly(int(words[-1]) + 2) if verb == b"MSG" else b""
                if not self._keeps(body):
                    writer.write(line + body)
        writer.close()

    def _keeps(self, body: bytes) -> bool:
        answer = json.loads(body) if body.startswith(b"{") else {}
        if "seq" not in answer:
            return False
        if self._pass or not self._keep:
            self._pass = max(0, self._pass - 1)
            self.repeats += bool(answer.get("duplicate"))
            return False
        self._keep -= 1
        if not self._keep and self._is_to_cut:
            self._cut()
        with self._news:
            self.kept += 1
            self._news.notify_all()
        return True

    def _cut(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _end(self) -> None:
        self._listener.close()
        self._cut()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*serving, return_exceptions=True)

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


@pytest.fixture
def relay(nats_server: Any) -> Iterator[Relay]:
    """Stands before `nats_server`; workers are made with it in the server's place."""
    made = Relay(nats_server)
    yield made
    made.close()


@pytest.fixture
def make_worker(namespace: CacheNamespace) -> Iterator[Callable[..., PublishingWorker]]:
    """make_worker(server, ...): a worker whose events go there; connection options and settings as keywords."""
    workers: list[PublishingWorker] = []

    def make(server: Any, **keywords: Any) -> PublishingWorker:
        fields = {field.name for field in dataclasses.fields(ConnectionOptions)}
        chosen = {name: keywords.pop(name) for name in list(keywords) if name in fields}
        options = ConnectionOptions(**({"servers": (server.url,), "subject": "semantic-kv-events"} | chosen))
        workers.append(PublishingWorker(options, namespace, **keywords))
        return workers[-1]

    yield make
    for worker in workers:
        worker.publisher.close()
