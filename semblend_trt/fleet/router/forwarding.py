"""Sends a request to a replica and its answer back, byte by byte where it is streamed."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from semblend_trt.errors import SemBlendError
from semblend_trt.fleet.router.counters import worker_name
from semblend_trt.fleet.router.refusals import error_object

if TYPE_CHECKING:
    from collections.abc import Iterator

    from semblend_trt.fleet.router.replicas import Taken

logger = logging.getLogger(__name__)

# Statuses that say that another replica may serve the request.
_UNWILLING = (502, 503, 504)
# Of a stream, its end is kept: the usage stands there where the client asked for it.
TAIL_BYTES = 8192
# What is noted as the status of a request whose client left before its end.
CLIENT_LEFT = 499


class ReplicaFailedError(SemBlendError):
    """The replica did not answer, and nothing of an answer has been sent on. `reason` is its name in counters."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Observed:
    """What was seen of an answer: HTTP status, times in seconds from the request on, and its last bytes.

    `began` is on the clock of `time.perf_counter`.
    """

    began: float
    status: int = 500
    first_byte_seconds: float | None = None
    seconds: float | None = None
    tail: bytes = b""
    is_broken: bool = False


class Forwarder:
    """Sends bodies on with `session`, which bounds how long a replica may be silent."""

    def __init__(self, session: aiohttp.ClientSession, max_answer_bytes: int) -> None:
        self._session, self._max_answer_bytes = session, max_answer_bytes

    async def forward(
        self, request: web.Request, payload: bytes, request_id: str, taken: Taken, observed: Observed
    ) -> web.StreamResponse:
        """Answers `request` with what the replica says. Raises ReplicaFailedError while nothing was sent on."""
        # What comes back is sent on as it is, so it has to come as it is.
        headers = {"Content-Type": "application/json", "X-Request-ID": request_id, "Accept-Encoding": "identity"}
        name = worker_name(taken.state.worker)
        try:
            with _failures_of(name):
                answer = await self._session.post(taken.state.url + request.path, data=payload, headers=headers)
            async with answer:
                if answer.status in _UNWILLING:
                    raise ReplicaFailedError("unwilling", f"replica {name} answered with status {answer.status}")
                observed.status = answer.status
                said = {"X-Request-ID": request_id, "X-SemBlend-Worker": name}
                said["Content-Type"] = answer.headers.get("Content-Type", "application/json")
                if answer.content_type != "text/event-stream":
                    with _failures_of(name):
                        return await self._whole(answer, said, observed)
                with _failures_of(name):
                    first = await answer.content.readany()
                if not first:
                    raise ReplicaFailedError("unreachable", f"replica {name} said nothing")
                taken.answered()
                observed.first_byte_seconds = time.perf_counter() - observed.began
                return await _streamed(request, answer, first, said, observed)
        finally:
            observed.seconds = time.perf_counter() - observed.began

    async def _whole(self, answer: aiohttp.ClientResponse, said: dict[str, str], observed: Observed) -> web.Response:
        body = bytearray()
        async for part in answer.content.iter_any():
            body += part
            if len(body) > self._max_answer_bytes:
                observed.status = 502
                message = f"the answer has more than {self._max_answer_bytes} bytes; stream it"
                return web.json_response(error_object(502, "answer_too_large", message), status=502)
        observed.tail = bytes(body)
        return web.Response(body=bytes(body), status=answer.status, headers=said)


async def _streamed(
    request: web.Request, answer: aiohttp.ClientResponse, first: bytes, said: dict[str, str], observed: Observed
) -> web.StreamResponse:
    """Sends a stream on, part by part. A client that leaves ends it; so does a replica, with an error as last event."""
    response = web.StreamResponse(status=answer.status, headers=said | {"Cache-Control": "no-cache"})
    try:
        await response.prepare(request)
        part = first
        while part:
            observed.tail = (observed.tail + part)[-TAIL_BYTES:]
            await response.write(part)
            try:
                with _failures_of(said["X-SemBlend-Worker"]):
                    part = await answer.content.readany()
            except ReplicaFailedError as error:
                logger.warning("a stream was not ended: %s", error)
                observed.is_broken = True
                end = error_object(502, "broken_stream", "the replica did not end its answer; send the request again")
                part = b""
                await response.write(b"data: " + json.dumps(end).encode() + b"\n\n")
        await response.write_eof()
    except ConnectionError:
        observed.status = CLIENT_LEFT
    return response


@contextmanager
def _failures_of(name: str) -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        raise ReplicaFailedError("unreachable", f"replica {name} failed ({type(error).__name__})") from None
