"""The bounds of clients, the answers when they exceed them, and the log."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import socket
import weakref
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
from aiohttp import web

from semblend_trt.fleet.router import serving
from tests.semblend_trt.fleet.router.conftest import run_within, within
from tests.semblend_trt.fleet.router.malformed import answered, error_of, statuses

GOOD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
HALF = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Le"
WITHOUT_BODY = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
STAY = b"POST /stay HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"


class Served:
    """A server of two paths: one that answers, and one that answers without end."""

    def __init__(self, bounds):
        self.bounds, self.dropped, self.left, self.opened = bounds, [], asyncio.Event(), AsyncExitStack()
        self.connections, self.address = serving.Connections(bounds, self.dropped.append), ""

    async def answer(self, request):
        return web.json_response({"size": (await serving.json_object(request, self.bounds))[1]})

    async def stay(self, request):
        await serving.json_object(request, self.bounds)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"." * 4096)
                await asyncio.sleep(0)
        finally:
            self.left.set()

    async def open(self, sent, source="127.0.0.1"):
        """A connection that stays open, with some bytes sent."""
        host, port = self.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0), limit=4096)
        self.opened.callback(writer.close)
        writer.write(sent)
        await writer.drain()
        return reader


@asynccontextmanager
async def running(**bounds):
    served = Served(serving.ServerBounds(**bounds))
    app = web.Application(middlewares=[serving.refusing()])
    app.router.add_post("/", served.answer)
    app.router.add_post("/stay", served.stay)
    async with serving.listening(app, "127.0.0.1", 0, served.connections) as served.address, served.opened:
        yield served


server = partial(within, running)


async def ended(reader):
    """Waits until the server has ended a connection without a word."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", HALF, GOOD.replace(b"close", b"keep-alive")])
@server(header_seconds=0.1)
async def test_a_client_without_a_header_is_closed(served, sent):
    reader = await served.open(sent)
    assert await reader.read() == b"" or sent.endswith(b"{}")
    while len(served.connections):
        await asyncio.sleep(0)


@server(header_seconds=0.1, body_seconds=0.1)
async def test_a_client_without_a_body_is_told(served):
    assert error_of(await answered(served.address, WITHOUT_BODY)) == (408, "body_timeout")


@server(header_seconds=3600, body_seconds=0.5)
async def test_a_client_that_takes_no_answer_is_closed(served):
    reader = await served.open(STAY)
    await served.left.wait()
    assert reader is not None


@pytest.mark.parametrize("sent", [b"", HALF, WITHOUT_BODY])
def test_the_oldest_that_is_waited_for_makes_room(sent, caplog):
    async def test(served):
        streams = [await served.open(STAY)]
        await streams[0].readuntil(b"\r\n\r\n")
        readers = [await served.open(sent) for _ in range(12)]
        assert error_of(await answered(served.address, GOOD)) == (200, None)
        for reader in readers[:9]:
            assert await ended(reader)
        assert not any(reader.at_eof() for reader in readers[10:])
        assert set(served.dropped) == {"made_room"}
        # A connection that is served never makes room.
        assert await streams[0].readexactly(4096)

    run_within(running(header_seconds=3600, body_seconds=3600, max_connections=4), test)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@server(header_seconds=3600, body_seconds=3600, max_peer_connections=3)
async def test_a_peer_makes_room_for_itself_alone(served):
    other = await served.open(HALF, "127.0.0.2")
    for _ in range(9):
        await served.open(HALF)
    assert error_of(await answered(served.address, GOOD)) == (200, None)
    assert not other.at_eof()
    assert len(served.connections) <= 4


@server(header_seconds=3600, body_seconds=3600, max_connections=2)
async def test_where_all_are_served_a_new_connection_is_closed(served):
    streams = [await served.open(STAY) for _ in range(2)]
    for stream in streams:
        await stream.readuntil(b"\r\n\r\n")
    assert await answered(served.address, GOOD) == b""
    assert served.dropped == ["no_room"]
    assert len(served.connections) == 2


def test_without_descriptors_it_waits_and_goes_on(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def test(served):
        half = await served.open(HALF)
        host, port = served.address.removeprefix("http://").split(":")
        clients = [socket.socket() for _ in range(20)]
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        fill = []
        with contextlib.suppress(OSError):
            while True:
                fill.append(os.open("/dev/null", os.O_RDONLY))
        try:
            for client in clients:
                client.connect((host, int(port)))
            assert await ended(half)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in fill:
                os.close(descriptor)
        for client in clients:
            client.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(client, GOOD)
            assert b" 200 " in await asyncio.get_running_loop().sock_recv(client, 4096)
            client.close()

    try:
        run_within(running(header_seconds=3600, body_seconds=3600), test)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    told = [record for record in caplog.records if "could not be accepted" in record.getMessage()]
    assert told
    assert {record.levelno for record in told} == {logging.ERROR}
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("lines", "body", "status", "code"),
    [
        ("Content-Length: 2\r\nContent-Encoding: gzip", b"{}", 400, "bad_encoding"),
        ("Content-Length: 2\r\nContent-Encoding: deflate", b"{}", 400, "bad_http"),
        ("Transfer-Encoding: chunked", b"zz\r\n{}\r\n", 400, "bad_http"),
        ("Content-Length: 3", b"{\xff}", 400, "bad_json"),
        ("Content-Length: 4096", b"{", 413, "body_too_large"),
        ("Transfer-Encoding: chunked", b"1000\r\n" + b"{" * 4096 + b"\r\n0\r\n\r\n", 413, "body_too_large"),
        ("Content-Length: two", b"{}", 400, "bad_http"),
        ("Content-Length: -2", b"{}", 400, "bad_http"),
        ("Content-Length: 2\r\nContent-Length: 3", b"{}", 400, "bad_http"),
        ("X-Long: " + "a" * 9000, b"", 400, "bad_http"),
        ("no header", b"", 400, "bad_http"),
        ("Content-Length: 2\r\nExpect: something", b"{}", 417, "http_error"),
    ],
)
@server(header_seconds=0.2, max_body_bytes=2048)
async def test_what_is_wrong_in_a_request_is_named(served, lines, body, status, code):
    request = f"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{lines}\r\n\r\n".encode() + body
    assert error_of(await answered(served.address, request)) == (status, code)


def test_no_malformed_request_is_an_error_of_the_routers(routed, caplog):
    async def test(parts):
        found = await statuses(parts.address, 0, 300)
        assert len(found) > 150
        assert max(found) < 500
        assert {400, 404, 405} <= set(found)
        assert (await parts.ask(prompt="abc"))[0] == 200

    routed(test, header_seconds=0.5, body_seconds=0.5)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_refused_request_is_freed_at_once():
    """A cycle of a refusal and its frames would keep a body until the garbage collector runs."""

    class Body(dict):
        """A body that a weak reference can point to."""

    bodies = []

    async def refuse(_):
        body = Body()
        bodies.append(weakref.ref(body))
        raise serving.RequestRefusedError(400, "bad_json", f"{len(body)} fields")

    async def test():
        assert (await serving.refusing()(None, refuse)).status == 400

    gc.collect()
    gc.disable()
    try:
        asyncio.run(test())
        assert bodies[0]() is None
    finally:
        gc.enable()
