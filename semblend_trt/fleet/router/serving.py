"""Runs an aiohttp application until the process is told to end, and answers for its metrics and its log."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.router.connections import Connections, accept

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from prometheus_client import CollectorRegistry

# How long requests may go on after the process was told to end, in seconds.
GRACE_SECONDS = 5.0
# Connections that the kernel holds until they are accepted.
BACKLOG = 1024
QUIET_SECONDS = 60.0
MAX_KINDS = 1024


class OnceAMinute(logging.Filter):
    """Lets a warning or error of one kind through once a minute, and says how many were left out since.

    Records are of a kind when they come from one line of the code, with equal arguments and the same type of exception.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # When a record of the kind was last let through, and how many were not since.
        self._kinds: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        failure = record.exc_info[0] if record.exc_info else None
        kind = (record.pathname, record.lineno, failure, str(record.args)[:256])
        now = self._clock()
        shown, left_out = self._kinds.get(kind, (None, 0))
        if shown is not None and now - shown < QUIET_SECONDS:
            self._kinds[kind] = (shown, left_out + 1)
            return False
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            self._kinds.pop(next(iter(self._kinds)))
        self._kinds[kind] = (now, 0)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (and {left_out} more like it since it was last said)", ()
        return True


async def serve(app: web.Application, host: str, port: int, what: str, connections: Connections) -> None:
    """Listens until SIGINT or SIGTERM; port 0 takes a free one. The address is written to standard error.

    A client that leaves cancels the handler of its request. Raises ConfigurationError when it cannot listen there.
    """
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    handlers = [each for each in (*logging.getLogger().handlers, logging.lastResort) if each is not None]
    quiet = OnceAMinute()
    for handler in handlers:
        handler.addFilter(quiet)
    try:
        async with listening(app, host, port, connections) as address:
            sys.stderr.write(f"{what} on {address}\n")
            sys.stderr.flush()
            await ended.wait()
    finally:
        for handler in handlers:
            handler.removeFilter(quiet)


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int, connections: Connections) -> AsyncIterator[str]:
    """Serves an application within the bounds of `connections` until the block ends; yields its address.

    Raises ConfigurationError when it cannot listen there.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=GRACE_SECONDS)
    await runner.setup()
    listeners: list[socket.socket] = []
    tasks: list[asyncio.Task[None]] = []
    try:
        try:
            for family, address in await _addresses(host, port):
                listeners.append(socket.create_server(address, family=family, backlog=BACKLOG))
        except OSError as error:
            reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            raise ConfigurationError(
                f"{host}:{port} cannot be listened on ({reason}); choose another address"
            ) from None
        assert runner.server is not None
        for listener in listeners:
            listener.setblocking(False)
            tasks.append(asyncio.create_task(accept(listener, runner.server, connections)))
        shown_host, shown_port = listeners[0].getsockname()[:2]
        yield f"http://{shown_host}:{shown_port}"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in listeners:
            listener.close()
        await runner.cleanup()


async def _addresses(host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    """The families and addresses of a host."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, (str(address[0]), port)) for family, *_, address in found))


def metrics_page(registry: CollectorRegistry | None = None) -> web.Response:
    """The answer of /metrics: Prometheus' default registry, or the one that is given."""
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

    text = generate_latest(REGISTRY if registry is None else registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
