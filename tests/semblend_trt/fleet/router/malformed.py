"""Malformed HTTP requests from a seed, and the answers that a server may give to them."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import islice
from typing import TYPE_CHECKING

from validation.benchmarks.bad_data import spoiled_bytes
from validation.benchmarks.bad_inputs import bad_requests, good_request

if TYPE_CHECKING:
    from collections.abc import Iterator

AT_ONCE = 64


def malformed(seed: int) -> Iterator[bytes]:
    """Requests that the benchmark of bad inputs sends, and spoiled ones, of which some are still good."""
    drawn, bad = random.Random(seed), [request for _, request, _ in bad_requests("worker")]
    while True:
        yield drawn.choice(bad) if drawn.random() < 0.5 else spoiled_bytes(drawn, good_request())


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
    """An answer's status and the code of its error object, if it is one."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if head == b"HTTP/1.1 100 Continue":
        return error_of(body)
    status = int(head.split(b" ")[1])
    # One request may be two to a server; the first answer counts.
    return status, json.JSONDecoder().raw_decode(body.decode())[0]["error"].get("code") if status >= 400 else None


async def statuses(address: str, seed: int, count: int) -> list[int]:
    """The statuses of the answers to `count` requests. An incomplete request may get none."""
    found: list[int] = []
    requests = malformed(seed)
    while batch := list(islice(requests, min(AT_ONCE, count))):
        count -= len(batch)
        answers = await asyncio.gather(*(answered(address, request) for request in batch))
        found += [error_of(answer)[0] for answer in answers if answer]
    return found
