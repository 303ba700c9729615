"""Servers in processes and threads of their own, what is waited for, and prompts for a fleet."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.resources import files

from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.pages import ROOT
from validation.documents import stock_list
from validation.prompts import render

MODEL = files("validation") / "assets" / "model"


def environment(**variables):
    """The environment of a process: of our settings it has `variables` alone."""
    inherited = {name: value for name, value in os.environ.items() if "SEMBLEND_" not in name}
    return inherited | {"OMP_NUM_THREADS": "1"} | variables


def ended(*command, cwd, **variables):
    """The ended process of a command, with what it printed."""
    given = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    own = environment(**{"PYTHONPATH": str(ROOT)} | variables)
    return subprocess.run([*map(str, command)], cwd=cwd, env=own, check=False, **given)


class ServerProcess:
    """Runs Python with `command`, one thread for torch, which prints its address on standard error when it listens."""

    def __init__(self, *command, **variables):
        given = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
        self._process = subprocess.Popen([sys.executable, *command], env=environment(**variables), **given)
        self._address = Future()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def address(self):
        """Waits for the address. Raises RuntimeError with the log when the process ends before."""
        return self._address.result()

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        self._process.kill()
        self.wait()

    def wait(self):
        """Waits for the process's end."""
        self._process.wait()
        self._listener.join()

    def _listen(self):
        said = []
        for line in self._process.stderr:
            said.append(line)
            if " on http://" in line and not self._address.done():
                self._address.set_result(line.split(" on ")[1].strip())
        if not self._address.done():
            self._address.set_exception(RuntimeError("".join(said)))


@contextmanager
def listening_app(app):
    """The address of an application that a thread serves."""
    loop, server = asyncio.new_event_loop(), TestServer(app)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start_server(), loop).result(60)
        yield str(server.make_url("")).rstrip("/")
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(120)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def answering(answer):
    """The address of a server that answers everything with `answer`, a handler or raw JSON."""

    async def always(_):
        return web.Response(body=answer, content_type="application/json")

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", answer if callable(answer) else always)
    with listening_app(app) as address:
        yield address


def wait_for(holds):
    """Waits until `holds()` is true."""
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline, "nothing came"


def prompts(seed):
    """Prompts and answers: the same documents in other orders, with other instructions and questions."""
    generator = random.Random(seed)
    lists = [stock_list(generator, rows=12) for _ in range(6)]
    orders = (lists, lists[::-1], lists[2:] + lists[:2])
    instructions = ("Answer briefly.", "Look up what is asked for.", "Use the documents.")
    questions = [lists[at].questions[row] for at, row in ((1, 0), (4, 7), (2, 3))]
    parts = zip(instructions, ([each.text for each in order] for order in orders), questions, strict=True)
    return [(render(instruction, texts, question.text), question.answer) for instruction, texts, question in parts]
