"""Malformed HTTP requests from a seed, and the answers that a server may give to them."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

AT_ONCE = 64
PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/health",
    "/metrics",
    "/",
    "*",
    "//",
    "/%ff",
    "/v1/\xe9",
]
PATHS += ["http://[::1/v1/completions", "/v1/completions?\x00", "/" + "a" * 9000, "/v1/completions#\xff", "../../etc"]
METHODS = [*["POST"] * 20, "GET", "PUT", "OPTIONS", "CONNECT", "TRACE", "post", "P\xff", ""]
VERSIONS = [*["HTTP/1.1"] * 20, "HTTP/1.0", "HTTP/9.9", "HTTP/2.0", "HTTP/1.1\t", "", "\xff"]
TEXTS = [
    "\xff",
    "\xed\xa0\x80",
    "a" * 9000,
    "",
    "\x00",
    "\x7f",
    "é",
    "-1",
    "1e9",
    "0x10",
    "99999999999999999999",
    "gzip",
    "br",
]
NAMES = ["Authorization", "X-Tenant-ID", "X-Session-ID", "Content-Type", "Content-Encoding", "Content-Length", "Host"]
NAMES += [
    "Transfer-Encoding",
    "Expect",
    "Upgrade",
    "Connection",
    "Accept",
    "Cookie",
    "Range",
    "If-Modified-Since",
    "\xff",
]
VALUES = [
    "Bearer \xff",
    "chunked",
    "gzip",
    "deflate",
    "identity",
    "chunked, gzip",
    "100-continue",
    "websocket",
    "upgrade",
]
VALUES += ["text/event-stream; charset=\xff", "application/json; charset=no-such", "bytes=9-1", *TEXTS]
BODIES = [
    b'{"prompt": "abc"}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": [1, 2',
    b'{"prompt": 1e999, "max_tokens": NaN}',
    b'{"prompt": ' + b"9" * 5000 + b"}",
    b'{"messages": [{"role": 5}], "prompt": {}}',
    b"[" * 5000,
    b"\xff\xfe{\x00}\x00",
    b"null",
    b"",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"zz\r\nhello\r\n",
    b"ffffffffffffffffff\r\n",
    gzip.compress(b'{"prompt": "abc"}'),
    gzip.compress(b'{"prompt": "abc"}')[:-6],
    gzip.compress(b" " * (1 << 20)),
]


def malformed(seed: int) -> Iterator[bytes]:
    """Requests; most have a mistake in their line, headers or body, or random bytes somewhere."""
    drawn = random.Random(seed)
    while True:
        body = drawn.choice(BODIES)
        lines = [f"{drawn.choice(METHODS)} {drawn.choice(PATHS[:2] * 8 + PATHS)} {drawn.choice(VERSIONS)}", "Host: a"]
        if drawn.random() < 0.8:
            lines.append(f"Content-Length: {len(body) + drawn.choice([0, 0, 0, -1, 1])}")
        lines += [f"{drawn.choice(NAMES)}: {drawn.choice(VALUES)}" for _ in range(drawn.randint(0, 3))]
        request = bytearray("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + body)
        for _ in range(drawn.choice([0, 0, 0, 1, 5])):
            request[drawn.randrange(len(request))] = drawn.randrange(256)
        yield bytes(request)


async def answered(address: str, request: bytes) -> bytes:
    """The server's whole answer to these bytes."""
    reader, writer = await asyncio.open_connection(*address.removeprefix("http://").split(":"))
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def error_of(answer: bytes) -> tuple[int, str | None]:
    """An answer's status and the code of its error object, which every error must have."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if head == b"HTTP/1.1 100 Continue":
        return error_of(body)
    status = int(head.split(b" ")[1])
    return status, json.loads(body)["error"]["code"] if status >= 400 else None


async def statuses(address: str, seed: int, count: int) -> list[int]:
    """The statuses of the answers to `count` requests. An incomplete request may get none."""
    found: list[int] = []
    requests = malformed(seed)
    while batch := list(islice(requests, min(AT_ONCE, count))):
        count -= len(batch)
        answers = await asyncio.gather(*(answered(address, request) for request in batch))
        for request, answer in zip(batch, answers, strict=True):
            # One request may be two to a server; the first answer counts.
            if answer and b" HEAD " not in request:
                found.append(error_of(answer)[0])
    return found
