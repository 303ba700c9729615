"""An HTTP server for the OpenAI API: bounds of clients, refusals, log, start and end."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from semblend_trt.background import OnceAMinute
from semblend_trt.errors import ConfigurationError, SemBlendError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiohttp.typedefs import Handler, Middleware
    from prometheus_client import CollectorRegistry


logger = logging.getLogger(__name__)
# File descriptors kept free for files, health checks and the like.
RESERVED_DESCRIPTORS = 32
# Seconds without accepting connections when the process has no descriptors left.
ACCEPT_PAUSE = 0.1
# Why a connection was closed: to make room for another one, or because there was no room for it.
DROPPED = ("made_room", "no_room")
# Seconds that requests may take to end after the process got a signal to stop.
GRACE_SECONDS = 5.0
# Connections that the kernel holds until they are accepted.
BACKLOG = 1024


class RequestRefusedError(SemBlendError):
    """A request that is not served: `status` is the HTTP status, `reason` the code in answers and counters."""

    def __init__(self, status: int, reason: str, message: str, retry_seconds: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_seconds = retry_seconds


def error_object(status: int, reason: str, message: str) -> dict[str, Any]:
    """Return the body of a refusal, as in the OpenAI API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": reason}}


def refusal(status: int, reason: str, message: str, retry_seconds: int | None = None) -> web.Response:
    """Return the answer to a request that is refused."""
    headers = {} if retry_seconds is None else {"Retry-After": str(retry_seconds)}
    return web.json_response(error_object(status, reason, message), status=status, headers=headers)


def refusing(count: Callable[[str], None] = lambda _: None) -> Middleware:
    """Make a middleware that answers refusals, aiohttp's among them, as error objects; `count` gets each reason.
    It logs other exceptions of a handler and answers them with status 500."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestRefusedError as error:
            refused = error.with_traceback(None)  # else it and this frame hold each other
        except web.HTTPException as error:
            refused = RequestRefusedError(error.status, "http_error", error.reason)
        except Exception:
            logger.exception("a request to %s failed", request.path)
            refused = RequestRefusedError(500, "internal_error", "the request failed here; the log says why")
        count(refused.reason)
        return refusal(refused.status, refused.reason, str(refused), refused.retry_seconds)

    return answer


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """Bounds of clients. `header_seconds`: for a request's header, from the connection or the last answer on.
    `body_seconds`: for its body, and for a client to take the answer."""

    header_seconds: float = 10.0
    body_seconds: float = 30.0
    max_connections: int = 1024
    max_peer_connections: int = 256
    max_body_bytes: int = 2 << 20


class Connections:
    """The connections of one server, bounded in all and per peer.

    Belongs to the server's event loop. A new connection closes the one that has waited longest for its client. Where no
    connection waits, the new one is closed. `count` gets the reason, one of DROPPED."""

    def __init__(self, bounds: ServerBounds, count: Callable[[str], None] = lambda _: None) -> None:
        self.bounds, self._count = bounds, count
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # A request may need a second descriptor, for its replica.
        self.limit = max(1, min(bounds.max_connections, (descriptors - RESERVED_DESCRIPTORS) // 2))
        self._by_peer: Counter[str] = Counter()
        self._waiting: dict[Connection, None] = {}

    def __len__(self) -> int:
        return self._by_peer.total()

    def add(self, connection: Connection) -> None:
        """Accept a new connection, closing another one if need be, or close the new one."""
        has_room = True
        if self._by_peer[connection.peer] >= self.bounds.max_peer_connections:
            has_room = self.make_room(connection.peer)
        elif len(self) >= self.limit:
            has_room = self.make_room()
        self._by_peer[connection.peer] += 1
        self._waiting[connection] = None
        if not has_room:
            self._end(connection, "no_room")

    def make_room(self, peer: str | None = None) -> bool:
        """Close the connection (of `peer` if given) that waits longest for its client; False when all are served."""
        oldest = next((each for each in self._waiting if peer is None or each.peer == peer), None)
        if oldest is not None:
            self._end(oldest, "made_room")
        return oldest is not None

    def serving(self, connection: Connection) -> None:
        """Note that a request has arrived completely: its client waits for the server."""
        self._waiting.pop(connection, None)

    def answered(self, connection: Connection) -> None:
        """Note that the server waits for the client again."""
        if connection.is_counted:
            self._waiting[connection] = None

    def remove(self, connection: Connection) -> None:
        """Note that the connection has ended."""
        self._waiting.pop(connection, None)
        if connection.is_counted:
            connection.is_counted = False
            self._by_peer[connection.peer] -= 1
            if not self._by_peer[connection.peer]:
                del self._by_peer[connection.peer]

    def _end(self, connection: Connection, why: str) -> None:
        self._count(why)
        self.remove(connection)
        if connection.transport is not None:
            connection.transport.abort()


class Connection(web.RequestHandler):
    """A connection of `connections`; invalid requests are answered with an error object too."""

    def __init__(self, server: web.Server, connections: Connections) -> None:
        # aiohttp's timeout for idle connections also covers the first header and lasts to the end of each header.
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=connections.bounds.header_seconds,
            lingering_time=connections.bounds.header_seconds,
        )
        self.peer = ""
        self.is_counted = True
        self.connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        name = transport.get_extra_info("peername")
        self.peer = name[0] if name else ""
        # The kernel closes the connection of a client that does not take its answer.
        client, patience = transport.get_extra_info("socket"), int(self.connections.bounds.body_seconds * 1000)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)
        self.connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.connections.remove(self)
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **keywords: Any) -> None:
        """Shorten the log for a refused body whose rest cannot be decoded."""
        if isinstance(keywords.get("exc_info"), web.RequestPayloadError):
            logger.warning("the rest of a refused body could not be decoded")
        else:
            super().log_exception(*args, **keywords)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; refusals before any handler become error objects."""
        if isinstance(resp, web.HTTPException):
            resp = refusal(resp.status, "http_error", resp.reason)
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.connections.answered(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - it repeats bytes of the request
    ) -> web.StreamResponse:
        """Answer a request that reached no handler: invalid HTTP, or a header that aiohttp cannot repeat."""
        if isinstance(exc, UnicodeError):
            status = 400
        if status < 500:
            logger.warning("a request that is not HTTP was refused: %s", type(exc).__name__)
            response = refusal(status, "bad_http", "the request is not valid HTTP; send another")
        else:
            logger.error("a request failed", exc_info=exc)
            response = refusal(status, "internal_error", "the request failed here; the log says why")
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was started, and cannot be replaced")
        response.force_close()
        return response


async def accept(listener: socket.socket, server: web.Server, connections: Connections) -> None:
    """Accept the connections of a listening, non-blocking socket until cancelled.
    Without free descriptors, close a waiting connection and pause for ACCEPT_PAUSE seconds."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            client, _ = await loop.sock_accept(listener)
        except OSError as error:
            if error.errno != errno.ECONNABORTED:
                logger.error("a connection could not be accepted: %s", error.strerror)
                connections.make_room()
                await asyncio.sleep(ACCEPT_PAUSE)
            continue
        try:
            await loop.connect_accepted_socket(lambda: Connection(server, connections), client)
        except OSError as error:
            logger.warning("a connection ended as it began: %s", error.strerror)
            client.close()


async def json_object(request: web.Request, bounds: ServerBounds) -> tuple[dict[str, Any], int]:
    """Return the body of a request, a JSON object, and its length in bytes.
    Raise RequestRefusedError for another body, and for one that is too long, wrongly encoded or too late."""
    try:
        text = await asyncio.wait_for(_read(request, bounds.max_body_bytes), bounds.body_seconds)
    except asyncio.TimeoutError:
        message = f"the body did not arrive within {bounds.body_seconds:g} s; send it faster"
        raise RequestRefusedError(408, "body_timeout", message) from None
    except web.RequestPayloadError:
        message = "the body is not encoded as its header says; send plain JSON"
        raise RequestRefusedError(400, "bad_encoding", message) from None
    except ConnectionError:
        raise RequestRefusedError(400, "body_cut", "the connection ended within the body") from None
    if isinstance(request.protocol, Connection):
        request.protocol.connections.serving(request.protocol)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestRefusedError(400, "bad_json", "the body is not JSON; send a JSON object") from None
    if not isinstance(body, dict):
        raise RequestRefusedError(400, "bad_json", f"the body is a JSON {type(body).__name__}; send a JSON object")
    return body, len(text)


async def _read(request: web.Request, bound: int) -> bytearray:
    """Read the body; aiohttp's own `read` would keep its bytes as long as the request is served."""
    body = bytearray()
    if (request.content_length or 0) <= bound:
        async for part in request.content.iter_any():
            body += part
            if len(body) > bound:
                break
        else:
            return body
    raise RequestRefusedError(413, "body_too_large", f"the body has more than {bound} bytes; send less")


async def serve(app: web.Application, host: str, port: int, what: str, connections: Connections) -> None:
    """Serve until SIGINT or SIGTERM; write the address to standard error. Port 0 takes a free port. A client that
    leaves cancels its request's handler. Raise ConfigurationError when it cannot listen there."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    handlers, quiet = [*filter(None, (*logging.getLogger().handlers, logging.lastResort))], OnceAMinute()
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
    """Serve an application within the bounds of `connections` until the block ends; yield its address.
    Raise ConfigurationError when it cannot listen there."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=GRACE_SECONDS)
    await runner.setup()
    listeners: list[socket.socket] = []
    tasks: list[asyncio.Task[None]] = []
    try:
        try:
            loop, kind, use = asyncio.get_running_loop(), socket.SOCK_STREAM, socket.AI_PASSIVE
            found = await loop.getaddrinfo(host, port, type=kind, flags=use)
            for family, name in dict.fromkeys((family, str(address[0])) for family, *_, address in found):
                listeners.append(socket.create_server((name, port), family=family, backlog=BACKLOG))
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


def metrics_page(registry: CollectorRegistry | None = None) -> web.Response:
    """Return the answer of /metrics, from `registry` or Prometheus' default one."""
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

    text = generate_latest(REGISTRY if registry is None else registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
