"""The HTTP of the embedded engine's server: bodies, refusals, start and end. It bounds bodies and trusts clients."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from semblend_trt.errors import ConfigurationError, SemBlendError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp.typedefs import Handler
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 2 << 20
# Seconds that requests may take to end after the process got a signal to stop.
GRACE_SECONDS = 5.0


class RequestRefusedError(SemBlendError):
    """A request that is not served: `status` is the HTTP status, `reason` the code in the answer."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


@web.middleware
async def refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer refusals, aiohttp's among them, as the OpenAI API's error objects; log other exceptions of a handler."""
    try:
        return await handler(request)
    except RequestRefusedError as error:
        refused = error.with_traceback(None)  # else it and this frame hold each other
    except web.HTTPException as error:
        refused = RequestRefusedError(error.status, "http_error", error.reason)
    except Exception:
        logger.exception("a request to %s failed", request.path)
        refused = RequestRefusedError(500, "internal_error", "the request failed here; the log says why")
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    told = {"message": str(refused), "type": kind, "code": refused.reason}
    return web.json_response({"error": told}, status=refused.status)


async def json_object(request: web.Request) -> dict[str, Any]:
    """Return the body of a request, a JSON object. Raise RequestRefusedError for another body or a longer one."""
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        message = f"the body has more than {MAX_BODY_BYTES} bytes; send less"
        raise RequestRefusedError(413, "body_too_large", message) from None
    except web.RequestPayloadError:
        message = "the body is not encoded as its header says; send plain JSON"
        raise RequestRefusedError(400, "bad_encoding", message) from None
    except (ValueError, RecursionError):
        raise RequestRefusedError(400, "bad_json", "the body is not JSON; send a JSON object") from None
    if not isinstance(body, dict):
        raise RequestRefusedError(400, "bad_json", f"the body is a JSON {type(body).__name__}; send a JSON object")
    return body


async def serve(app: web.Application, host: str, port: int, what: str) -> None:
    """Serve until SIGINT or SIGTERM; write the address to standard error. Port 0 takes a free port.
    Raise ConfigurationError when it cannot listen there."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with listening(app, host, port) as address:
        sys.stderr.write(f"{what} on {address}\n")
        sys.stderr.flush()
        await ended.wait()


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """Serve an application until the block ends; yield its address. A client that leaves cancels its request's handler.
    Raise ConfigurationError when it cannot listen there."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=GRACE_SECONDS)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            raise ConfigurationError(
                f"{host}:{port} cannot be listened on ({reason}); choose another address"
            ) from None
        shown_host, shown_port = runner.addresses[0][:2]
        yield f"http://{shown_host}:{shown_port}"
    finally:
        await runner.cleanup()


def metrics_page(registry: CollectorRegistry | None = None) -> web.Response:
    """Return the answer of /metrics, from `registry` or Prometheus' default one."""
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

    text = generate_latest(REGISTRY if registry is None else registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
