"""HTTP servers of tests, on threads of their own."""

import asyncio
import threading
from contextlib import contextmanager
from queue import Queue

from aiohttp import web


@contextmanager
def listening_app(app):
    """The address of an application that a thread serves."""
    told = Queue()

    async def serve():
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        told.put((f"http://127.0.0.1:{runner.addresses[0][1]}", lambda: loop.call_soon_threadsafe(ended.set)))
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    address, end = told.get(timeout=60)
    try:
        yield address
    finally:
        end()
        thread.join()


@contextmanager
def answering(answer):
    """The address of a server that answers everything with `answer`, a handler or raw JSON."""

    async def always(_):
        return web.Response(body=answer, content_type="application/json")

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", answer if callable(answer) else always)
    with listening_app(app) as address:
        yield address
