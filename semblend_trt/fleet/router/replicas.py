"""A router's replicas: their health and load, and how requests are forwarded to them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import aiohttp
from aiohttp import web

from semblend_trt.errors import SemBlendError
from semblend_trt.fleet.directory import worker_name
from semblend_trt.fleet.router.serving import error_object, refusal
from semblend_trt.fleet.routing_policy import Replica
from semblend_trt.outcome import RECEIPT, VLLM_RECEIPT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Iterator

    from semblend_trt.fleet.directory import Worker
    from semblend_trt.fleet.router.config import RouterConfig


logger = logging.getLogger(__name__)
_T = TypeVar("_T")
# Statuses after which another replica is tried. Redirects are not followed.
_UNWILLING = (*range(300, 400), 502, 503, 504)
# The end of a server-sent event, and the most bytes of one.
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
MAX_EVENT_BYTES = 1 << 20
# The last bytes of a stream are kept: they hold the usage where the client asked for it.
TAIL_BYTES = 8192
# A stream of more bytes is not compared with a cold run.
MAX_KEPT_BYTES = 1 << 20
# The answer is forwarded as it comes, so it must not be compressed for the router.
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
# The status that is recorded when the client left early.
CLIENT_LEFT = 499


@dataclass(slots=True, eq=False)
class ReplicaState:
    """A replica's state. `load` counts tokens of prefill sent to it and not answered yet."""

    worker: Worker
    url: str
    is_healthy: bool = False
    load: int = 0
    in_flight: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class Taken:
    """A request that was sent to a replica."""

    state: ReplicaState
    tokens: int

    def answered(self) -> None:
        """Take the computed prompt off the load; the request may go on."""
        self.state.load -= self.tokens
        self.tokens = 0


class ReplicaSet:
    """The replicas and their health. Belongs to one event loop. A replica is healthy when its last /health was 200 and
    no request found it dead since. From `start` to `stop`, all replicas are checked every `health_seconds`."""

    def __init__(self, config: RouterConfig, session: aiohttp.ClientSession) -> None:
        states = (ReplicaState((each.worker_id, each.dp_rank), each.url) for each in config.replicas)
        self.states = {state.worker: state for state in states}
        self._session, self._health_seconds = session, config.health_seconds
        self._timeout = aiohttp.ClientTimeout(total=config.connect_seconds)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.check()
        self._task = asyncio.create_task(self._watch(), name="semblend-replicas")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def check(self) -> None:
        """Check the health of every replica."""
        await asyncio.gather(*(self._check(state) for state in self.states.values()))

    async def is_well(self, worker: Worker) -> bool:
        """Check and return the health of one replica."""
        await self._check(self.states[worker])
        return self.states[worker].is_healthy

    def seen(self, excluded: Collection[Worker] = ()) -> list[Replica]:
        """Return the replicas for a policy; those `excluded` appear unhealthy."""
        states = self.states.values()
        return [Replica(each.worker, each.load, each.is_healthy and each.worker not in excluded) for each in states]

    def found_dead(self, worker: Worker) -> None:
        """Mark a replica that a request could not reach as unhealthy, until the next check."""
        self._set(self.states[worker], healthy=False)

    @contextmanager
    def taking(self, worker: Worker, tokens: int) -> Iterator[Taken]:
        """Count a request with `tokens` to compute for the replica until the block ends."""
        state = self.states[worker]
        taken = Taken(state, tokens)
        state.load += tokens
        state.in_flight += 1
        state.idle.clear()
        try:
            yield taken
        finally:
            taken.answered()
            state.in_flight -= 1
            if not state.in_flight:
                state.idle.set()

    async def idle(self, worker: Worker, seconds: float) -> None:
        """Wait until the replica has no request under way. Raise asyncio.TimeoutError."""
        state = self.states[worker]

        async def wait() -> None:
            while state.in_flight:  # another one may have come in between
                await state.idle.wait()

        await asyncio.wait_for(wait(), seconds)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._health_seconds)
            await self.check()

    async def _check(self, state: ReplicaState) -> None:
        asking = self._session.get(state.url + "/health", timeout=self._timeout, allow_redirects=False)
        try:
            async with asking as response:
                healthy = response.status == 200
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            healthy = False
        self._set(state, healthy=healthy)

    def _set(self, state: ReplicaState, *, healthy: bool) -> None:
        if healthy != state.is_healthy:
            state.is_healthy = healthy
            logger.warning("replica %d.%d is %s", *state.worker, "healthy" if healthy else "dead")


class ReplicaFailedError(SemBlendError):
    """The replica failed before any of its answer was forwarded. `reason` is the label in counters."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Observed:
    """Observations of an answer: HTTP status, seconds since the request, and the last bytes.

    `began` is on `time.perf_counter`'s clock. `broken`: why a stream broke off. `kept`: all of a stream to compare,
    None for others and for one that is too long."""

    began: float
    status: int = 500
    first_byte_seconds: float | None = None
    seconds: float | None = None
    tail: bytes = b""
    broken: str | None = None
    kept: bytearray | None = None


class Forwarder:
    """Forwards requests with `session`, within the bounds of `config`.

    `first_byte_seconds` ends with the first event or the header. `silence_seconds` bounds the time between events, or
    for the rest of the answer. `max_answer_bytes` bounds an answer that is not streamed."""

    def __init__(self, session: aiohttp.ClientSession, config: RouterConfig) -> None:
        self._session, self._config = session, config

    async def forward(
        self, request: web.Request, payload: bytes, request_id: str, taken: Taken, observed: Observed
    ) -> web.StreamResponse:
        """Answer `request` with the replica's answer. Raise ReplicaFailedError when nothing was forwarded yet."""
        headers = {**_HEADERS, "X-Request-ID": request_id}
        name, bounds = worker_name(taken.state.worker), self._config
        deadline = time.perf_counter() + bounds.first_byte_seconds
        try:
            sending = self._session.post(
                taken.state.url + request.path, data=payload, headers=headers, allow_redirects=False
            )
            async with await _in_time(name, sending, bounds.first_byte_seconds) as answer:
                if answer.status in _UNWILLING:
                    raise ReplicaFailedError("unwilling", f"replica {name} answered with status {answer.status}")
                observed.status = answer.status
                fields = {"X-Request-ID": request_id} | ({"X-SemBlend-Worker": name} if bounds.show_worker else {})
                fields["Content-Type"] = answer.headers.get("Content-Type", "application/json")
                if answer.content_type != "text/event-stream":
                    return await _in_time(name, self._whole(answer, fields, observed), bounds.silence_seconds)
                events = _Events(answer, name, bounds.silence_seconds)
                first = await events.next(deadline - time.perf_counter())
                if not first:
                    raise ReplicaFailedError("unreachable", f"replica {name} ended its answer before it began")
                taken.answered()
                observed.first_byte_seconds = time.perf_counter() - observed.began
                return await _streamed(request, answer.status, first, events, fields, observed)
        finally:
            observed.seconds = time.perf_counter() - observed.began

    async def ask(self, path: str, payload: bytes, taken: Taken) -> bytes:
        """Return a replica's whole answer of status 200. Raise ReplicaFailedError for any other."""
        name, bounds = worker_name(taken.state.worker), self._config
        sending = self._session.post(taken.state.url + path, data=payload, headers=_HEADERS, allow_redirects=False)
        async with await _in_time(name, sending, bounds.first_byte_seconds) as answer:
            observed = Observed(time.perf_counter(), answer.status)
            await _in_time(name, self._whole(answer, {}, observed), bounds.silence_seconds)
            if observed.status != 200:
                raise ReplicaFailedError("unwilling", f"replica {name} answered with status {observed.status}")
            return observed.tail

    async def _whole(self, answer: aiohttp.ClientResponse, headers: dict[str, str], observed: Observed) -> web.Response:
        body, bound = bytearray(), self._config.max_answer_bytes
        async for part in answer.content.iter_any():
            body += part
            if len(body) > bound:
                observed.status = 502
                return refusal(502, "answer_too_large", f"the answer has more than {bound} bytes; stream it")
        observed.tail = with_receipt(bytes(body))
        return web.Response(body=observed.tail, status=answer.status, headers=headers)


def with_receipt(body: bytes) -> bytes:
    """Move the receipt of vLLM's answer from `kv_transfer_params`, where a connector may write, into the usage."""
    if VLLM_RECEIPT.encode() not in body:
        return body
    try:
        answer = json.loads(body)
        carried = answer["kv_transfer_params"]
        answer["usage"][RECEIPT] = carried.pop(VLLM_RECEIPT)
        answer["kv_transfer_params"] = carried or None
        return json.dumps(answer).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return body  # a text that speaks of receipts, and holds no receipt


class _Events:
    """A stream in whole events, so that a client never gets a part of one."""

    def __init__(self, answer: aiohttp.ClientResponse, name: str, silence_seconds: float) -> None:
        self._answer, self._name, self._silence_seconds = answer, name, silence_seconds
        self._unfinished = b""

    async def next(self, seconds: float | None = None) -> bytes:
        """Return the next events, or the rest at the end; empty after the end. Raise ReplicaFailedError."""
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
    request: web.Request, status: int, first: bytes, events: _Events, headers: dict[str, str], observed: Observed
) -> web.StreamResponse:
    """Forward a stream. When the replica breaks off, the last event is an error; a client that leaves ends it."""
    response = web.StreamResponse(status=status, headers=headers | {"Cache-Control": "no-cache"})
    try:
        await response.prepare(request)
        part = first
        while part:
            observed.tail = (observed.tail + part)[-TAIL_BYTES:]
            if observed.kept is not None:
                observed.kept += part
                if len(observed.kept) > MAX_KEPT_BYTES:
                    observed.kept = None
            await response.write(part)
            try:
                part = await events.next()
            except ReplicaFailedError as error:
                logger.warning("a stream broke off: %s", error)
                observed.broken = error.reason
                end = error_object(502, "broken_stream", "the replica broke off its answer; send the request again")
                part = b""
                await response.write(b"data: " + json.dumps(end).encode() + b"\n\n")
        await response.write_eof()
    except ConnectionError:
        observed.status = CLIENT_LEFT
    return response


async def _in_time(name: str, answering: Awaitable[_T], seconds: float) -> _T:
    try:
        return await asyncio.wait_for(answering, seconds)
    except asyncio.TimeoutError:
        raise ReplicaFailedError("slow", f"replica {name} did not answer in time") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ReplicaFailedError("unreachable", f"replica {name} failed ({type(error).__name__})") from None
