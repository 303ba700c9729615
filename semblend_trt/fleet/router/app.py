"""The router's HTTP application: reads a request's prompt, chooses a replica and forwards the request."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from semblend_trt.answer_kl import least_kl, likelihood_fields, likelihoods_in
from semblend_trt.chats import PromptError
from semblend_trt.cold_runs import ColdRuns, cold_body, said_in
from semblend_trt.discovery.fingerprint import TokenArray, as_token_array
from semblend_trt.drift import BoundedAnswer, DriftMonitor
from semblend_trt.fleet.connection import DirectoryReader
from semblend_trt.fleet.directory import Directory, worker_name
from semblend_trt.fleet.router.config import Shares, Tenants, key_digest, unknown_key
from semblend_trt.fleet.router.counters import FleetGauges, RouterCounters
from semblend_trt.fleet.router.replicas import CLIENT_LEFT, Forwarder, Observed, ReplicaFailedError, ReplicaSet
from semblend_trt.fleet.router.serving import (
    Connections,
    RequestRefusedError,
    json_object,
    listening,
    metrics_page,
    refusing,
)
from semblend_trt.fleet.routing_policy import LeastLoaded, NoReplicaError, RoutingRequest
from semblend_trt.fleet.telemetry import Hasher, ServedRequest, TraceLog, receipt_in
from semblend_trt.outcome import RECEIPT
from semblend_trt.policy import BROKEN_PROFILES
from semblend_trt.prompts import PromptReader, PromptTooLongError, ReadingThreads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from semblend_trt.cold_runs import RunCold, Said
    from semblend_trt.fleet.connection import ConnectionOptions
    from semblend_trt.fleet.directory import Holder, Worker
    from semblend_trt.fleet.router.config import Caller, RouterConfig
    from semblend_trt.fleet.routing_policy import Choice, Replica, RoutingPolicy

logger = logging.getLogger(__name__)

# Assumed bytes per token of a text that could not be read.
BYTES_PER_TOKEN = 4
COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
SALT_FIELD = "cache_salt"
# Makes vLLM return the tokens of an answer.
TOKENS_FIELD = "return_token_ids"
# Seconds that a cold run of the sample waits for its replica to be idle.
AUDIT_SECONDS = 60.0
# Seconds that the router keeps an idle connection to a replica.
IDLE_SECONDS = 2.0
# Connections that the separate address for /health and /metrics accepts.
STATUS_CONNECTIONS = 16


@dataclass(frozen=True, slots=True, eq=False)
class ReadPrompt:
    """A prompt to place: its token ids (int32 [n], None where unreadable), their number or an estimate, and holders."""

    token_ids: TokenArray | None
    tokens: int
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class ColdCheck:
    """How to compare an answer with a cold run: `payload` is that run's body, None where two runs may differ.

    Of the sample (`is_sample`), only counters, log and the monitor of the tenant's bound get the result; the tenant
    has this `salt`. `added`: fields of the request that only the router asked for."""

    payload: bytes | None
    is_sample: bool
    added: dict[str, Any]
    salt: str | None

    @classmethod
    def of(cls, body: Mapping[str, Any], caller: Caller, runs: ColdRuns) -> ColdCheck | None:
        """Return the check of a request's answer; None where the answer is not compared."""
        if not caller.verifies and not runs.draws():
            return None
        added: dict[str, Any] = {}
        if not caller.verifies:
            added = likelihood_fields(body)
        elif not body.get("stream") and not body.get(TOKENS_FIELD):
            added = {TOKENS_FIELD: True}
        return cls(cold_body({**body, **added}), not caller.verifies, added, caller.salt)

    def stripped(self, answer: dict[str, Any], response: web.StreamResponse) -> web.Response:
        """Return the answer without what only the router asked for."""
        for part in (answer, *answer["choices"]):
            for name in ("token_ids", "prompt_token_ids") if TOKENS_FIELD in self.added else ():
                part.pop(name, None)
            if "logprobs" in self.added and "logprobs" in part:
                part["logprobs"] = None
        return web.Response(body=json.dumps(answer).encode(), headers=response.headers)


@dataclass(frozen=True, slots=True, eq=False)
class Placer:
    """Reads prompts and chooses replicas. Counts unreadable prompts, places them by load; refuses too long ones."""

    prompts: ReadingThreads
    directory: Directory | None
    policy: RoutingPolicy
    counters: RouterCounters
    read_seconds: float
    least_loaded: RoutingPolicy = field(default_factory=LeastLoaded)

    async def read(self, body: Mapping[str, Any], body_bytes: int, caller: Caller) -> ReadPrompt:
        """Read the prompt of a body and look up its holders among the caller's own donors.
        Raise RequestRefusedError, 400 prompt_too_long."""
        reading = self.prompts.read(body_bytes, lambda reader: self._read(reader, body, caller.salt))
        reason = "unread_prompt"
        try:
            return await asyncio.wait_for(reading, self.read_seconds)
        except asyncio.TimeoutError:
            reason = "slow_reading"
        except PromptTooLongError as error:
            raise RequestRefusedError(400, "prompt_too_long", str(error)) from None
        except (PromptError, ValueError, OverflowError):
            pass  # the replica decides whether the prompt is bad: its template may differ
        except Exception:
            logger.exception("a prompt could not be read")
        self.counters.fallbacks.labels(reason).inc()
        return ReadPrompt(None, body_bytes // BYTES_PER_TOKEN)

    def choose(self, prompt: ReadPrompt, caller: Caller, replicas: Sequence[Replica]) -> Choice:
        """Choose a replica. Raise NoReplicaError when all are unhealthy."""
        if prompt.token_ids is None:
            return self.least_loaded.choose(RoutingRequest(()), replicas)
        request = RoutingRequest(prompt.token_ids, caller.session, prompt.holders, caller.salt)
        return self.policy.choose(request, replicas)

    def _read(self, reader: PromptReader, body: Mapping[str, Any], salt: str | None) -> ReadPrompt:
        token_ids = as_token_array(reader.chat(body) if "messages" in body else reader.completion(body))
        holders: tuple[Holder, ...] = ()
        try:
            if self.directory is not None:
                holders = self.directory.holders(token_ids, tenant_salt=salt)
        except Exception:
            logger.exception("the look-up in the directory failed")
            self.counters.fallbacks.labels("directory_failed").inc()
        return ReadPrompt(token_ids, len(token_ids), holders)


class Router:
    """One router; `app()` may be served once.

    Raises ConfigurationError. Without `nats`, where donor events are read, requests are placed by load or earlier
    prompts. `tokenizer` is the replicas' Transformers tokenizer. The share `audit_sample` of requests with reuse is
    compared with cold runs."""

    def __init__(
        self,
        config: RouterConfig,
        environment: Mapping[str, str],
        tokenizer: Any,
        nats: ConnectionOptions | None,
        audit_sample: float = 0.0,
    ) -> None:
        self._config, self._bounds = config, config.bounds()
        self._tenants = Tenants(config, environment)
        self._shares = Shares(config.tenant_requests, config.tenant_bytes)
        self._status_key = None
        if config.status is not None and (config.status.sha256 or config.status.env):
            self._status_key = config.status.digest(environment)
        self._name = config.name or Path(config.model).resolve().name
        self.counters = counters = RouterCounters()
        self._cold_runs = ColdRuns(audit_sample, lambda result: counters.cold_runs.labels(result).inc())
        self._drift = DriftMonitor(lambda result: counters.bound_checks.labels(result).inc())
        self._directory, self._reader = None, None
        if nats is not None:
            self._directory = Directory(accepted=[(each.worker_id, each.dp_rank) for each in config.replicas])
            self._reader = DirectoryReader(nats, self._directory)
        threads, policy = ReadingThreads(tokenizer, config.max_prompt_tokens), config.routing_policy()
        self._placer = Placer(threads, self._directory, policy, counters, config.read_seconds)
        self._trace: TraceLog | None = None
        secret = config.secret(environment)
        if config.telemetry is not None and secret is not None:
            # Tokenizers are not thread safe, so the log's thread has its own.
            own = PromptReader(copy.deepcopy(tokenizer))
            self._trace = TraceLog(config.telemetry, Hasher(secret), own, counters)
        # Made when the app starts, in its event loop.
        self._replicas: ReplicaSet
        self._forwarder: Forwarder

    def app(self) -> web.Application:
        """Return the application; background tasks start and end with it."""
        app = web.Application(middlewares=[refusing(self.counters.refused)])
        for path in COMPLETIONS:
            app.router.add_post(path, self._complete)
        app.router.add_get("/v1/models", self._models)
        app.cleanup_ctx.append(self._running)
        if self._config.status is None or self._config.status.host is None:
            self._add_status(app)
        else:
            app.cleanup_ctx.append(self._telling)
        return app

    def connections(self) -> Connections:
        """Return the bounded connections that `app()` is served with."""
        return Connections(self._bounds, self.counters.dropped)

    def _add_status(self, app: web.Application) -> None:
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)

    async def _telling(self, _: web.Application) -> AsyncIterator[None]:
        """Serve /health and /metrics at their own address, which is written to standard error."""
        status = self._config.status
        assert status is not None
        assert status.host is not None
        assert status.port is not None
        app = web.Application(middlewares=[refusing(self.counters.refused)])
        self._add_status(app)
        connections = Connections(replace(self._bounds, max_connections=STATUS_CONNECTIONS))
        async with listening(app, status.host, status.port, connections) as address:
            sys.stderr.write(f"status on {address}\n")
            sys.stderr.flush()
            yield

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        config = self._config
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=config.connect_seconds)
        # Shorter than any server's timeout, so that no server closes a connection while a request is sent.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self._replicas, self._forwarder = ReplicaSet(config, session), Forwarder(session, config)
            self.counters.registry.register(FleetGauges(self._replicas, self._directory))
            await self._replicas.start()
            if self._reader is not None:
                await self._reader.start()
            yield
            if self._reader is not None:
                await self._reader.stop()
            await self._cold_runs.close()
            await self._replicas.stop()
            self._placer.prompts.close()
            if self._trace is not None:
                self._trace.close()

    # -- requests -------------------------------------------------------------------------------------------------

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        caller, most = self._tenants.caller(request.headers), self._bounds.max_body_bytes
        stated = None if "Content-Encoding" in request.headers else request.content_length
        with self._shares.taking(caller.tenant, most if stated is None else min(stated, most)):
            return await self._complete_for(caller, request)

    async def _complete_for(self, caller: Caller, request: web.Request) -> web.StreamResponse:
        body, size = await json_object(request, self._bounds)
        observed, timestamp_ms = Observed(time.perf_counter()), time.time_ns() // 1_000_000
        if body.pop(SALT_FIELD, None) is not None:
            self.counters.client_salts.inc()
        prompt = await self._placer.read(body, size, caller)
        check = ColdCheck.of(body, caller, self._cold_runs)
        if check is not None:
            observed.kept = bytearray() if check.is_sample else None
        plain = self._payload(body, caller)
        payload = self._payload({**body, **check.added}, caller) if check is not None else plain
        if self._trace is None and (check is None or not check.added):
            body = {}  # it is not read again, and a stream may last long
        request_id, attempt_metadata = uuid.uuid4().hex, dict[str, Any]()
        try:
            forward = partial(self._forward, request, request_id, prompt, caller, observed, attempt_metadata)
            response, worker = await forward(payload)
            if observed.status == 400 and check is not None and check.is_sample and check.added:
                check = replace(check, payload=cold_body(body), added={})  # the replica may tell no likelihoods
                response, worker = await forward(plain)
            if check is None or observed.status != 200 or observed.broken is not None:
                return response
            first, tokens = observed.tail, prompt.tokens
            run_cold = check.payload and partial(self._run_cold, check, request.path, worker, tokens, first)
            return await self._compared(check, response, observed, run_cold or None)
        except RequestRefusedError as refusal:
            observed.status = refusal.status
            raise
        except asyncio.CancelledError:
            observed.status = CLIENT_LEFT
            raise
        finally:
            if self._trace is not None:
                metadata = {"policy": self._config.policy, "route": request.path, **attempt_metadata}
                served = ServedRequest(request_id, timestamp_ms, self._name, caller, body, size, observed, metadata)
                self._trace.note(served)

    async def _forward(
        self,
        request: web.Request,
        request_id: str,
        prompt: ReadPrompt,
        caller: Caller,
        observed: Observed,
        metadata: dict[str, Any],
        payload: bytes,
    ) -> tuple[web.StreamResponse, Worker]:
        """Try one replica after another until one answers; add to the trace's `metadata`."""
        tried: set[Worker] = set()
        problem = "no replica is healthy"
        for attempt in range(1, self._config.attempts + 1):
            try:
                choice = self._placer.choose(prompt, caller, self._replicas.seen(tried))
            except NoReplicaError:
                break
            metadata |= {"worker": worker_name(choice.worker), "held_tokens": choice.reused_tokens, "attempts": attempt}
            if attempt == 1:
                self.counters.placement_seconds.observe(time.perf_counter() - observed.began)
            with self._replicas.taking(choice.worker, max(0, prompt.tokens - choice.reused_tokens)) as taken:
                try:
                    response = await self._forwarder.forward(request, payload, request_id, taken, observed)
                    # vLLM answers so when its engine has died. An error of a sound engine would repeat elsewhere.
                    is_error = response.status == 500 and not response.prepared
                    if is_error and not await self._replicas.is_well(choice.worker):
                        raise ReplicaFailedError("unwilling", f"replica {worker_name(choice.worker)} has failed")
                except ReplicaFailedError as error:
                    problem = str(error)
                    tried.add(choice.worker)
                    if error.reason == "unreachable":
                        self._replicas.found_dead(choice.worker)
                    self.counters.failed_attempts.labels(error.reason).inc()
                    continue
            self._count(choice, prompt, observed)
            return response, choice.worker
        raise RequestRefusedError(503, "no_replica", f"the request was not served: {problem}; try again later")

    def _count(self, choice: Choice, prompt: ReadPrompt, observed: Observed) -> None:
        self.counters.requests.labels(worker_name(choice.worker), str(observed.status)).inc()
        self.counters.tokens.labels("prompt").inc(prompt.tokens)
        self.counters.tokens.labels("held").inc(choice.reused_tokens)
        if observed.first_byte_seconds is not None:
            self.counters.first_byte_seconds.observe(observed.first_byte_seconds)
        if observed.broken is not None:
            self.counters.broken_streams.inc()
        if observed.broken == "unreachable":
            self._replicas.found_dead(choice.worker)

    def _payload(self, body: dict[str, Any], caller: Caller) -> bytes:
        """Return what a replica is sent. For profiles whose promise is broken, it is asked for exact reuse alone."""
        asked, broken = body.get("kv_transfer_params") or {}, self._drift.broken(caller.salt)
        if broken and isinstance(asked, dict):
            body = {**body, "kv_transfer_params": {**asked, BROKEN_PROFILES: broken}}
        # Only salts that the router derives may separate or join tenants.
        return json.dumps(body if caller.salt is None else {**body, SALT_FIELD: caller.salt}).encode()

    async def _run_cold(self, check: ColdCheck, path: str, worker: Worker, tokens: int, first: bytes) -> Said:
        """Return the replica's answer without reuse; a run of the sample waits until the replica is idle."""
        assert check.payload is not None
        if check.is_sample:
            await self._replicas.idle(worker, AUDIT_SECONDS)
        with self._replicas.taking(worker, tokens) as taken:
            cold = await self._forwarder.ask(path, check.payload, taken)
        self._judge(check, first, cold)
        return said_in(cold)

    def _judge(self, check: ColdCheck, first: bytes, cold: bytes) -> None:
        """Add an answer of the sample to the test of its bound."""
        if check.is_sample and check.added:
            with suppress(ValueError):  # no bound covers the answer, or the replica tells no likelihoods
                bounded = BoundedAnswer.model_validate(receipt_in(first))
                kl = least_kl(likelihoods_in(first), likelihoods_in(cold))
                self._drift.observe(check.salt, bounded, is_over=kl > bounded.max_kl)

    async def _compared(
        self,
        check: ColdCheck,
        response: web.StreamResponse,
        observed: Observed,
        run_cold: RunCold | None,
    ) -> web.StreamResponse:
        """Return the answer with its cold run's result in the receipt; an answer of the sample is compared later."""
        receipt = receipt_in(observed.tail)
        try:
            if check.is_sample:
                answered = observed.kept if response.prepared else observed.tail
                if answered is None:
                    self.counters.cold_runs.labels("skipped").inc()
                elif receipt.get("reused_tokens") != 0:
                    self._cold_runs.later(said_in(bytes(answered)), run_cold)
                else:  # it is what a cold run answers
                    self._judge(check, observed.tail, observed.tail)
                return check.stripped(json.loads(observed.tail), response) if check.added else response
            if response.prepared:  # a stream has been sent
                return response
            answer = json.loads(observed.tail)
            verified = await self._cold_runs.verdict(said_in(observed.tail), run_cold)
            answer["usage"][RECEIPT] = {**receipt, "verified": verified}
            return check.stripped(answer, response)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            logger.warning("an answer has a form that is not known, and cannot be compared with a cold run")
            return response

    # -- about the router -----------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        self._tenants.caller(request.headers)
        model = {"id": self._name, "object": "model", "owned_by": "semblend-trt"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        self._may_look(request)
        replicas = {worker_name(each.worker): each.is_healthy for each in self._replicas.states.values()}
        followed = {} if self._directory is None else self._directory.workers()
        directory = {worker_name(worker): each.is_synced for worker, each in followed.items()}
        is_well = any(replicas.values())
        status = {"status": "ok" if is_well else "no_replica", "replicas": replicas, "directory": directory}
        return web.json_response(status, status=200 if is_well else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        self._may_look(request)
        return metrics_page(self.counters.registry)

    def _may_look(self, request: web.Request) -> None:
        if self._status_key not in (None, key_digest(request.headers)):
            raise unknown_key()
