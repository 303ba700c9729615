"""The replicas behind a router: which of them answer, what each has to compute, and the requests that they are sent."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import aiohttp
from aiohttp import web

from semblend_trt.errors import SemBlendError
from semblend_trt.fleet.router.counters import worker_name
from semblend_trt.fleet.router.serving import error_object
from semblend_trt.fleet.routing_policy import Replica

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Iterator, Sequence

    from semblend_trt.fleet.directory import Worker
    from semblend_trt.fleet.router.config import ReplicaConfig


logger = logging.getLogger(__name__)
_T = TypeVar("_T")
# Statuses that say that another replica may serve the request. Redirects are not followed.
_UNWILLING = (*range(300, 400), 502, 503, 504)
# The end of a server-sent event, and how long one may be.
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
MAX_EVENT_BYTES = 1 << 20
# Of a stream, its end is kept: the usage stands there where the client asked for it.
TAIL_BYTES = 8192
# What is noted as the status of a request whose client left before its end.
CLIENT_LEFT = 499


@dataclass(slots=True, eq=False)
class ReplicaState:
    """What is known of a replica. `load` are the tokens of prefill that it was sent and has not answered."""

    worker: Worker
    url: str
    is_healthy: bool = False
    load: int = 0
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class Taken:
    """A request that a replica was given."""

    state: ReplicaState
    tokens: int

    def answered(self) -> None:
        """The prompt is computed: it is no load any more, though the request goes on."""
        self.state.load -= self.tokens
        self.tokens = 0


class ReplicaSet:
    """Belongs to one event loop. A replica is healthy when its /health said so and no request found it dead since.

    `start` checks all of them once, and from then on each `health_seconds`, until `stop`.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaConfig],
        session: aiohttp.ClientSession,
        *,
        health_seconds: float,
        answer_seconds: float,
    ) -> None:
        states = (ReplicaState((each.worker_id, each.dp_rank), each.url) for each in replicas)
        self.states = {state.worker: state for state in states}
        self._session, self._health_seconds = session, health_seconds
        self._timeout = aiohttp.ClientTimeout(total=answer_seconds)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.check()
        self._task = asyncio.create_task(self._watch(), name="semblend-replicas")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def check(self) -> None:
        """Asks every replica once whether it is healthy."""
        await asyncio.gather(*(self._check(state) for state in self.states.values()))

    async def is_well(self, worker: Worker) -> bool:
        """Asks one replica whether it is healthy."""
        await self._check(self.states[worker])
        return self.states[worker].is_healthy

    def seen(self, excluded: Collection[Worker] = ()) -> list[Replica]:
        """The replicas as a policy sees them; those `excluded` look dead."""
        return [
            Replica(state.worker, state.load, state.is_healthy and state.worker not in excluded)
            for state in self.states.values()
        ]

    def found_dead(self, worker: Worker) -> None:
        """A request could not reach the replica; it is left alone until a check finds it healthy."""
        self._set(self.states[worker], healthy=False)

    @contextmanager
    def taking(self, worker: Worker, tokens: int) -> Iterator[Taken]:
        """The replica has one more request, of so many tokens to compute, until the block ends."""
        state = self.states[worker]
        taken = Taken(state, tokens)
        state.load += tokens
        state.in_flight += 1
        try:
            yield taken
        finally:
            taken.answered()
            state.in_flight -= 1

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._health_seconds)
            await self.check()

    async def _check(self, state: ReplicaState) -> None:
        try:
            async with self._session.get(
                state.url + "/health", timeout=self._timeout, allow_redirects=False
            ) as response:
                healthy = response.status == 200
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            healthy = False
        self._set(state, healthy=healthy)

    def _set(self, state: ReplicaState, *, healthy: bool) -> None:
        if healthy != state.is_healthy:
            state.is_healthy = healthy
            logger.warning("replica %d.%d is %s", *state.worker, "healthy" if healthy else "dead")


class ReplicaFailedError(SemBlendError):
    """The replica did not answer, and nothing of an answer has been sent on. `reason` is its name in counters."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Observed:
    """What was seen of an answer: HTTP status, times in seconds from the request on, and its last bytes.

    `began` is on the clock of `time.perf_counter`. `broken` is the reason for which a stream was not ended.
    """

    began: float
    status: int = 500
    first_byte_seconds: float | None = None
    seconds: float | None = None
    tail: bytes = b""
    broken: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """What replicas are granted: seconds to the first event or the header of an answer, then from event to event or for
    the rest of it, and bytes of an answer that is not streamed."""

    first_byte_seconds: float
    silence_seconds: float
    max_answer_bytes: int


class Forwarder:
    """Sends bodies on with `session`. Answers say which replica they come from where `shows_worker`."""

    def __init__(self, session: aiohttp.ClientSession, bounds: AnswerBounds, *, shows_worker: bool) -> None:
        self._session, self._bounds, self._shows_worker = session, bounds, shows_worker

    async def forward(
        self, request: web.Request, payload: bytes, request_id: str, taken: Taken, observed: Observed
    ) -> web.StreamResponse:
        """Answers `request` with what the replica says. Raises ReplicaFailedError while nothing was sent on."""
        # What comes back is sent on as it is, so it has to come as it is.
        headers = {"Content-Type": "application/json", "X-Request-ID": request_id, "Accept-Encoding": "identity"}
        name, bounds = worker_name(taken.state.worker), self._bounds
        deadline = time.perf_counter() + bounds.first_byte_seconds
        try:
            sending = self._session.post(
                taken.state.url + request.path, data=payload, headers=headers, allow_redirects=False
            )
            async with await _in_time(name, sending, bounds.first_byte_seconds) as answer:
                if answer.status in _UNWILLING:
                    raise ReplicaFailedError("unwilling", f"replica {name} answered with status {answer.status}")
                observed.status = answer.status
                said = {"X-Request-ID": request_id} | ({"X-SemBlend-Worker": name} if self._shows_worker else {})
                said["Content-Type"] = answer.headers.get("Content-Type", "application/json")
                if answer.content_type != "text/event-stream":
                    return await _in_time(name, self._whole(answer, said, observed), bounds.silence_seconds)
                events = _Events(answer, name, bounds.silence_seconds)
                first = await events.next(deadline - time.perf_counter())
                if not first:
                    raise ReplicaFailedError("unreachable", f"replica {name} said nothing")
                taken.answered()
                observed.first_byte_seconds = time.perf_counter() - observed.began
                return await _streamed(request, answer.status, first, events, said, observed)
        finally:
            observed.seconds = time.perf_counter() - observed.began

    async def _whole(self, answer: aiohttp.ClientResponse, said: dict[str, str], observed: Observed) -> web.Response:
        body, bound = bytearray(), self._bounds.max_answer_bytes
        async for part in answer.content.iter_any():
            body += part
            if len(body) > bound:
                observed.status = 502
                message = f"the answer has more than {bound} bytes; stream it"
                return web.json_response(error_object(502, "answer_too_large", message), status=502)
        observed.tail = bytes(body)
        return web.Response(body=observed.tail, status=answer.status, headers=said)


class _Events:
    """A stream as whole events, so that what a replica leaves unfinished never reaches a client."""

    def __init__(self, answer: aiohttp.ClientResponse, name: str, silence_seconds: float) -> None:
        self._answer, self._name, self._silence_seconds = answer, name, silence_seconds
        self._unfinished = b""

    async def next(self, seconds: float | None = None) -> bytes:
        """The next events, or what is left at the end; empty behind it. Raises ReplicaFailedError."""
        return await _in_time(self._name, self._next(), self._silence_seconds if seconds is None else seconds)

    async def _next(self) -> bytes:
        while part := await self._answer.content.readany():
            part = self._unfinished + part
            end = max((found.end() for found in _EVENT_END.finditer(part)), default=0)
            whole, self._unfinished = part[:end], part[end:]
            if whole:
                return whole
            if len(part) > MAX_EVENT_BYTES:
                raise ReplicaFailedError("unreachable", f"replica {self._name} sent an event without an end")
        rest, self._unfinished = self._unfinished, b""
        return rest


async def _streamed(
    request: web.Request, status: int, first: bytes, events: _Events, said: dict[str, str], observed: Observed
) -> web.StreamResponse:
    """Sends a stream on. A client that leaves ends it; so does a replica, with an error as last event."""
    response = web.StreamResponse(status=status, headers=said | {"Cache-Control": "no-cache"})
    try:
        await response.prepare(request)
        part = first
        while part:
            observed.tail = (observed.tail + part)[-TAIL_BYTES:]
            await response.write(part)
            try:
                part = await events.next()
            except ReplicaFailedError as error:
                logger.warning("a stream was not ended: %s", error)
                observed.broken = error.reason
                end = error_object(502, "broken_stream", "the replica did not end its answer; send the request again")
                part = b""
                await response.write(b"data: " + json.dumps(end).encode() + b"\n\n")
        await response.write_eof()
    except ConnectionError:
        observed.status = CLIENT_LEFT
    return response


async def _in_time(name: str, answering: Awaitable[_T], seconds: float) -> _T:
    """What a replica answers. Raises ReplicaFailedError, for which another one may be asked."""
    try:
        return await asyncio.wait_for(answering, seconds)
    except asyncio.TimeoutError:
        raise ReplicaFailedError("slow", f"replica {name} did not answer in time") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ReplicaFailedError("unreachable", f"replica {name} failed ({type(error).__name__})") from None
