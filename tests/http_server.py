"""HTTP servers of tests, on threads of their own."""

import asyncio
import threading
from contextlib import contextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer


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
