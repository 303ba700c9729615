"""Relay: places a request, hands on a worker's answer, and goes on elsewhere when the worker breaks off.

EngineWorkers: the instances of an endpoint of Dynamo, and which worker of the donor events each of them is."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from semblend_trt.background import quiet_logger
from semblend_trt.errors import SemBlendError
from semblend_trt.fleet.directory import worker_name
from semblend_trt.fleet.placement import Loads
from semblend_trt.metrics import counter as series
from semblend_trt.outcome import RECEIPT, VLLM_RECEIPT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping

    from prometheus_client import CollectorRegistry

    from semblend_trt.fleet.directory import Worker
    from semblend_trt.fleet.placement import Placement, Score

logger = quiet_logger(__name__)

# What became of requests; `continued`: by another worker, after the first broke off.
RESULTS = ("answered", "continued", "unanswered")
# What was wrong with an instance, once for each request that it was a candidate for, or answered.
PROBLEMS = ("no_connector", "other_tokenizer", "same_worker_id")
# The file of a worker's DYN_TOPOLOGY_MOUNT_PATH that holds its id: any engine's model card repeats it.
TOPOLOGY_DOMAIN = "semblend-worker"
# Seconds for which an instance that failed is asked only where no other is left.
REST_SECONDS = 5.0
# An instance that Dynamo no longer counts as alive has lost its requests after that number of silent seconds. One that
# drains is not counted either, but sends on; one that is merely slow is counted.
SILENT_SECONDS = 5
_WORKER_NAME = re.compile(r"(\d{1,16})(?:\.(\d{1,4}))?")
# Workers that a request is tried with: one that ends workers must not end them all.
ATTEMPTS = 3
# How errors begin that are a worker's end or its refusal of more work. Others are the same everywhere.
_ELSEWHERE = ("Unavailable", "CapacityExhausted", "DeadlineExceeded")
# Dynamo's workers put this before a client's salt, in the engine and so in the donors' namespaces.
SALT_PREFIX = "dynamo-cache-salt:"


class ModelCard(NamedTuple):
    """What an instance's model card says: the digests of its tokenizer, and its worker id if it tells one."""

    tokenizer: frozenset[str]
    worker: Worker | None

    @classmethod
    def of(cls, text: str) -> ModelCard:
        """Read a card, JSON as Dynamo keeps it. Raise ValueError, TypeError or AttributeError for anything else."""
        card = json.loads(text)
        digests = re.findall(r'"checksum": "([^"]+)"', json.dumps(card.get("tokenizer")))
        name = ((card.get("runtime_config") or {}).get("topology_domains") or {}).get(TOPOLOGY_DOMAIN)
        return cls(frozenset(digests), None if name is None else worker_of(name))


@dataclass(eq=False)
class EngineWorkers:
    """The instances that may be asked, by Dynamo's ids. Belongs to the event loop's thread.

    `present` gives the instances of the endpoint and `cards` their model cards. Only those with the digests `tokenizer`
    are asked. An instance's worker id comes from its card, or from the receipt of its first answer. `problem` gets the
    name of what is wrong, one of PROBLEMS."""

    present: Callable[[], Collection[int]]
    cards: Callable[[], Mapping[str, str]]
    tokenizer: frozenset[str]
    problem: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _cards: dict[int, ModelCard] = field(default_factory=dict)
    _worker_of: dict[int, Worker] = field(default_factory=dict)
    _resting: dict[int, float] = field(default_factory=dict)

    def candidates(self, tried: Collection[int] = ()) -> dict[int, Worker | None]:
        """Return the instances to choose from and their workers, None where no donors are known to be theirs."""
        present = self.present()
        if self._cards.keys() != set(present):
            self._learn(present)
        usable = [each for each in present if each not in tried and self._is_usable(each)]
        now = self.clock()
        awake = [each for each in usable if self._resting.get(each, now) <= now] or usable
        # One that failed may have come back under another instance already.
        claims = Counter(self._worker_of[each] for each in self._worker_of.keys() - self._resting.keys())
        return {each: self._only_claimed(each, claims) for each in awake}

    def failed(self, instance: int) -> None:
        self._resting[instance] = self.clock() + REST_SECONDS

    def answered(self, instance: int, engine_data: Any) -> Worker | None:
        """Learn from an answer's end, and return the worker; `engine_data` is what Dynamo hands on from the engine."""
        self._resting.pop(instance, None)
        if instance not in self._worker_of:
            try:
                self._worker_of[instance] = worker_of(engine_data["kv_transfer_params"][VLLM_RECEIPT]["worker"])
            except (TypeError, KeyError, ValueError):
                self.problem("no_connector")
                logger.warning("instance %d names no worker id: load alone places there", instance)
        return self._worker_of.get(instance)

    def _learn(self, present: Collection[int]) -> None:
        """Read the cards of new instances, and forget those that are gone."""
        cards = self.cards()
        for instance in set(present) - self._cards.keys():
            try:
                self._cards[instance] = card = ModelCard.of(cards[str(instance)])
            except KeyError:
                continue  # it comes a moment after its instance
            except (ValueError, TypeError, AttributeError) as error:
                self._cards[instance] = card = ModelCard(frozenset(), None)
                logger.warning("the model card of instance %d cannot be read: %s", instance, error)
            if card.worker is not None:
                self._worker_of[instance] = card.worker
        for known in (self._cards, self._worker_of, self._resting):
            for gone in known.keys() - set(present):
                del known[gone]

    def _is_usable(self, instance: int) -> bool:
        if (card := self._cards.get(instance)) is None or card.tokenizer == self.tokenizer:
            return card is not None
        self.problem("other_tokenizer")
        digests = instance, sorted(card.tokenizer), sorted(self.tokenizer)
        logger.error("instance %d is not asked: its tokenizer has the digests %s, prompts are read with %s", *digests)
        return False

    def _only_claimed(self, instance: int, claims: Counter[Worker]) -> Worker | None:
        if (worker := self._worker_of.get(instance)) is None or claims[worker] <= 1:
            return worker
        self.problem("same_worker_id")
        logger.error(
            "%d instances are worker %d: load places there until each has its own id", claims[worker], worker[0]
        )
        return None


def worker_of(name: str) -> Worker:
    """Return the id and rank in a worker's name, `3` or `3.0`. Raise ValueError or TypeError for anything else."""
    if (found := _WORKER_NAME.fullmatch(name)) is None:
        raise ValueError(f"{name!r} is no worker, such as 3 or 3.0")
    return int(found[1]), int(found[2] or 0)


def counter(registry: CollectorRegistry, name: str, label: str, values: tuple[str, ...]) -> Callable[[str], None]:
    """Return what counts one of `values`."""
    made = series(registry, f"semblend_dynamo_{name}", f"The component's {name}, by {label}.", label, known=values)
    return lambda value: made.labels(value).inc()


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
