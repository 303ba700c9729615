"""Runs an aiohttp application until the process is told to end, and answers for its metrics."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

from aiohttp import web

from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

# How long requests may go on after the process was told to end, in seconds.
GRACE_SECONDS = 5.0


async def serve(app: web.Application, host: str, port: int, what: str) -> None:
    """Listens until SIGINT or SIGTERM; port 0 takes a free one. The address is written to standard error.

    A client that leaves cancels the handler of its request. Raises ConfigurationError when it cannot listen there.
    """
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=GRACE_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigurationError(
                f"{host}:{port} cannot be listened on ({error.strerror}); choose another address"
            ) from None
        shown_host, shown_port = runner.addresses[0][:2]
        sys.stderr.write(f"{what} on http://{shown_host}:{shown_port}\n")
        sys.stderr.flush()
        await ended.wait()
    finally:
        await runner.cleanup()


def metrics_page(registry: CollectorRegistry | None = None) -> web.Response:
    """The answer of /metrics: Prometheus' default registry, or the one that is given."""
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

    text = generate_latest(REGISTRY if registry is None else registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
