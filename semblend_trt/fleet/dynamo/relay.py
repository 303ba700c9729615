"""Relay: places a request, hands on a worker's answer, and goes on elsewhere when the worker breaks off."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from semblend_trt.background import OnceAMinute
from semblend_trt.errors import SemBlendError
from semblend_trt.fleet.directory import worker_name
from semblend_trt.fleet.dynamo.workers import SILENT_SECONDS
from semblend_trt.fleet.placement import Loads
from semblend_trt.outcome import RECEIPT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from semblend_trt.fleet.dynamo.workers import EngineWorkers
    from semblend_trt.fleet.placement import Placement, Score

logger = logging.getLogger(__name__)
logger.addFilter(OnceAMinute())

# Workers that a request is tried with: one that ends workers must not end them all.
ATTEMPTS = 3
# How errors begin that are a worker's end or its refusal of more work. Others are the same everywhere.
_ELSEWHERE = ("Unavailable", "CapacityExhausted", "DeadlineExceeded")


# Dynamo's workers put this before a client's salt, in the engine and so in the donors' namespaces.
SALT_PREFIX = "dynamo-cache-salt:"


class AskedRequest:
    """A request as Dynamo's frontend hands it over, with the tokens that its client has so far."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._stops: dict[str, Any] = request.get("stop_conditions") or {}
        tokens: Any = request["token_ids"]
        # One buffer of little-endian int32 where the frontend has DYN_TOKEN_IDS_AS_BYTES.
        self._prompt = np.frombuffer(tokens, "<i4") if isinstance(tokens, bytes) else np.asarray(tokens, np.int64)
        self._sent: list[int] = []
        self._continued_at = 0
        salt = (request.get("routing") or {}).get("cache_salt")
        self.salt = SALT_PREFIX + salt if salt else None

    @property
    def tokens(self) -> Any:
        """Return the tokens to compute: the prompt and what was answered, integers [n]."""
        return np.concatenate([self._prompt, self._sent]) if self._sent else self._prompt

    @property
    def is_whole(self) -> bool:
        """Return whether all tokens that were asked for are there, so that only the end is missing."""
        most = self._stops.get("max_tokens")
        return self.is_continuable and isinstance(most, int) and 0 < most <= len(self._sent)

    @property
    def is_continuable(self) -> bool:
        """Return whether another worker can go on. After the first token it cannot where an engine's state is in the
        answer: several choices, a grammar, likelihoods of the prompt."""
        sampling, output = self._request.get("sampling_options") or {}, self._request.get("output_options") or {}
        in_engine = (sampling.get("guided_decoding"), output.get("prompt_logprobs"))
        has_state = in_engine != (None, None) or max(sampling.get("n") or 1, sampling.get("best_of") or 1) > 1
        return not (self._sent and has_state)

    def next_request(self) -> dict[str, Any]:
        """Return the request for another worker: at first as it came, then to continue after what was answered."""
        self._continued_at = done = len(self._sent)
        if not done:
            return self._request
        bounds = {name: self._stops.get(name) for name in ("max_tokens", "min_tokens")}
        left = {name: max(0, bound - done) for name, bound in bounds.items() if isinstance(bound, int)}
        return {**self._request, "token_ids": self.tokens.tolist(), "stop_conditions": self._stops | left}

    def take(self, out: dict[str, Any]) -> bool:
        """Note a piece of the answer and correct its usage; return whether it ends a choice."""
        self._sent += out.get("token_ids") or ()
        usage = out.get("completion_usage")
        if self._continued_at and isinstance(usage, dict):
            usage["prompt_tokens"] -= self._continued_at
            usage["completion_tokens"] += self._continued_at
        return out.get("finish_reason") is not None


class WorkerLostError(SemBlendError):
    """A worker broke a request off, or does not take it."""


class WorkerCall:
    """One request at one worker."""

    def __init__(self, client: Any, request: dict[str, Any], instance: int, context: Any) -> None:
        self.instance, self.silent_seconds, self._is_lost = instance, 0, False
        self._stream: Any = None
        self._pending = client.direct(request, instance, annotated=False, context=context)

    async def piece(self) -> Any:
        """Return the next piece of the answer, None after the last. Raise WorkerLostError, or what the engine says."""
        try:
            if self._stream is None:
                self._stream = await self._pending
            self._pending = self._stream.__anext__()
            piece = await self._pending
        except StopAsyncIteration:
            return None
        except asyncio.CancelledError:
            if self._is_lost:
                raise WorkerLostError("it is silent, and Dynamo does not count it as alive") from None
            raise
        except Exception as error:
            from dynamo.llm.exceptions import InvalidArgument

            if self._stream is None or str(error).startswith(_ELSEWHERE):
                raise WorkerLostError(str(error)) from None
            if isinstance(error, InvalidArgument) or str(error).startswith("InvalidRequest"):
                raise
            # It comes as ValueError, which would be the client's mistake when it is raised again.
            raise RuntimeError(str(error)) from None
        self.silent_seconds = 0
        return piece

    def lose(self) -> None:
        """Give the worker up: `piece` raises WorkerLostError."""
        self._is_lost = True
        self._pending.cancel()


@dataclass(eq=False)
class Relay:
    """Answers the requests of one model. `client` calls the endpoint whose instances are `workers`; `sent` gets the
    tokens and held ones of each attempt, `ended` what became of a request. Belongs to the event loop's thread."""

    client: Any
    workers: EngineWorkers
    placement: Placement
    sent: Callable[[int, int], None]
    ended: Callable[[str], None]
    _calls: set[WorkerCall] = field(default_factory=set)
    _loads: Loads[int] = field(default_factory=Loads)

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the pieces of the answer. Raise what an engine says of the request; HttpError 503 without workers."""
        from dynamo.llm.exceptions import HttpError

        asked, tried = AskedRequest(request), set[int]()
        while len(tried) < ATTEMPTS and asked.is_continuable:
            candidates = self.workers.candidates(tried)
            scores = self.placement.place(asked.tokens, asked.salt, candidates, self._loads.tokens)
            if not scores:
                break
            tried.add(scores[0].name)
            try:
                async for piece in self._ask(asked, scores[0], len(tried), context):
                    yield piece
            except WorkerLostError as error:
                self.workers.failed(scores[0].name)
                logger.warning("instance %d broke a request off: %s", scores[0].name, error)
                if context.is_stopped():
                    return
                if not asked.is_whole:
                    continue
                yield {"token_ids": [], "finish_reason": "length"}
            self.ended("answered" if len(tried) == 1 else "continued")
            return
        self.ended("unanswered")
        raise HttpError(503, f"no worker could answer the request, {len(tried)} tried")

    async def watch(self, components: Callable[[], Collection[str]]) -> None:
        """Give up, every second, what instances owe that are silent and not alive; say when `components` get more."""
        known = 1
        while await asyncio.sleep(1, result=True):
            present = self.workers.present()
            for call in list(self._calls):
                call.silent_seconds += 1
                if call.silent_seconds > SILENT_SECONDS and call.instance not in present:
                    call.lose()
            before, known = known, len(components())
            if known > before:
                logger.warning("%d components serve this model; load is not shared, each counts its own", known)

    async def _ask(self, asked: AskedRequest, chosen: Score[int], attempt: int, context: Any) -> AsyncIterator[Any]:
        """Yield what one worker answers, and add to its end who it is."""
        self.sent(len(asked.tokens), chosen.held)
        answered = self._loads.sent(chosen.name, max(0, len(asked.tokens) - chosen.held))
        call, has_ended = WorkerCall(self.client, asked.next_request(), chosen.name, context), False
        self._calls.add(call)
        try:
            while (piece := await call.piece()) is not None:
                answered()
                if piece.get("finish_reason") == "cancelled" and not context.is_stopped():
                    raise WorkerLostError("its engine dropped it")
                if asked.take(piece):
                    has_ended, told = True, piece.get("engine_data")
                    worker = self.workers.answered(chosen.name, told)
                    name = None if worker is None else worker_name(worker)
                    receipt = {"worker": name, "held_tokens": chosen.held, "attempts": attempt}
                    piece["engine_data"] = {**(told if isinstance(told, dict) else {}), RECEIPT: receipt}
                yield piece
            if not (has_ended or context.is_stopped()):
                raise WorkerLostError("its answer has no end")
        finally:
            answered()
            self._calls.discard(call)
