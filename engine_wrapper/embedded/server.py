"""A worker: the embedded engine behind the OpenAI API.

`python -m engine_wrapper.embedded.server --model FOLDER --port 8001 --worker-id 1` serves /v1/completions,
/v1/chat/completions (where the tokenizer has a template), /v1/models, /health and /metrics. Requests that come together
run together; a request whose client leaves is aborted. `cache_salt` in a body keeps the KV of its tenant apart. Only
trusted clients may set it, so by default the server listens on this machine only. A request with a `priority` above 0
waits while one with a lower number waits or runs. With the header `X-SemBlend-Verify: cold` an answer is compared with
one without reuse, and its usage says whether both are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine_wrapper.embedded.llm import IDLE_PAUSE, LLM, WARM_PRIORITY, RequestStream
from engine_wrapper.embedded.llm_args import KvCacheConfig, KvCacheConnectorConfig
from engine_wrapper.embedded.sampling import SamplingParams
from semblend_trt.chats import PromptError
from semblend_trt.command_line import ended, named, printable
from semblend_trt.config import PREFIXES, load_settings
from semblend_trt.errors import CapacityError, ConfigurationError, SemBlendError
from semblend_trt.fleet.router.cold_runs import VERIFY_HEADER, ColdRuns, asks_to_verify, is_repeatable
from semblend_trt.fleet.router.prompts import PromptReader, PromptTooLongError, ReadingThreads
from semblend_trt.fleet.router.serving import (
    Connections,
    RequestRefusedError,
    ServerBounds,
    error_object,
    json_object,
    metrics_page,
    refusing,
    serve,
)
from semblend_trt.metrics import metrics_for
from semblend_trt.outcome import RECEIPT
from semblend_trt.policy import COLD, EXACT_ONLY

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

    from engine_wrapper.embedded.request import RequestOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")
Parts: TypeAlias = "AsyncIterator[tuple[str, str | None, RequestOutput]]"
UsageOf: TypeAlias = "Callable[[RequestOutput], Awaitable[dict[str, Any]]]"

BOUNDS = ServerBounds()
DEFAULT_MAX_TOKENS = 16
MAX_STOPS = 16
MAX_REQUESTS = 256
# Fields that are known with one value alone, which changes nothing.
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("best_of", "length_penalty", "n", "repetition_penalty"), 1),
    **dict.fromkeys(("frequency_penalty", "min_p", "min_tokens", "no_repeat_ngram_size", "presence_penalty"), 0),
    **dict.fromkeys(("early_stopping", "echo", "include_stop_str_in_output", "logprobs", "use_beam_search"), False),
    "bad_words": [],
    "logit_bias": {},
    "response_format": {"type": "text"},
    "skip_special_tokens": True,
    "top_logprobs": 0,
}
# Fields that say who asks, or what else to tell; answers are the same with them.
_PASSED_OVER = {"metadata", "request_id", "return_token_ids", "user"}
# Fields of which the prompt is made; PromptReader checks them.
_OF_PROMPT = {
    False: {"prompt", "add_special_tokens"},
    True: {
        *("messages", "documents", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("chat_template_kwargs", "reasoning_effort"),
    },
}

StopText = Annotated[str, Field(min_length=1, max_length=1024)]


# -- request bodies ---------------------------------------------------------------------------------------------------


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class KvTransferParams(BaseModel):
    """What a request asks of the connector."""

    model_config = ConfigDict(extra="forbid")

    exact_only: Annotated[bool, Field(alias=EXACT_ONLY)] = False
    cold: Annotated[bool, Field(alias=COLD)] = False


class CompletionBody(BaseModel):
    """The supported fields of completion and chat requests; None is the default, which clients send as null."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    kv_transfer_params: KvTransferParams | None = None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def options(self) -> dict[str, Any]:
        """The options of `LLM.generate_async`."""
        asked = self.kv_transfer_params or KvTransferParams()
        return {"priority": self.priority or 0, "exact_only": asked.exact_only, "cold": asked.cold}

    def sampling_params(self, default_max_tokens: int) -> SamplingParams:
        """The sampling parameters; the API's default temperature is 1. Raises RequestRefusedError."""
        given = {
            "max_tokens": self.max_completion_tokens if self.max_tokens is None else self.max_tokens,
            **self.model_dump(include={"temperature", "top_p", "top_k", "seed", "ignore_eos", "stop_token_ids"}),
        }
        fields: dict[str, Any] = {"max_tokens": default_max_tokens, "temperature": 1.0}
        try:
            return SamplingParams(**fields | {name: value for name, value in given.items() if value is not None})
        except ConfigurationError as error:
            raise RequestRefusedError(400, "bad_field", str(error)) from None


def read_body(body: dict[str, Any], *, is_chat: bool) -> CompletionBody:
    """Checks a body's fields; null is the same as none. Raises RequestRefusedError for wrong values, and for all fields
    that are not known."""
    asked = {name: value for name, value in body.items() if not _is_neutral(name, value)}
    try:
        return CompletionBody.model_validate({name: asked[name] for name in asked.keys() - _OF_PROMPT[is_chat]})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            message = f"{place} is not supported by this engine; leave it out"
            raise RequestRefusedError(400, "unsupported_field", message) from None
        raise RequestRefusedError(400, "bad_field", f"{place}: {first['msg']}") from None


def _is_neutral(name: str, value: Any) -> bool:
    if value is None or name in _PASSED_OVER:
        return True
    neutral = _NEUTRAL.get(name)
    # `logprobs` 0 asks for the tokens' own log-probabilities, false for none.
    return bool(value == neutral) and isinstance(value, bool) is isinstance(neutral, bool)


# -- the engine's thread ----------------------------------------------------------------------------------------------


class EngineThread:
    """An LLM on its own thread, which runs the requests of an event loop together until `close` shuts it down.

    At most `max_requests` are taken at a time; `running` of them have not ended. Each request asks the thread for one
    iteration after the other. An iteration runs all requests, so the next one in the queue often finds its output
    ready.
    """

    def __init__(self, llm: LLM, max_requests: int = MAX_REQUESTS) -> None:
        self._llm, self._max_requests = llm, max_requests
        self._thread = ThreadPoolExecutor(1, "embedded-engine")
        self._idling: asyncio.Task[None] | None = None
        self.running = 0

    @property
    def failure(self) -> str | None:
        """Why the engine takes no more requests; None while it does."""
        return self._llm.executor.failure

    async def outputs(
        self, token_ids: list[int], params: SamplingParams, cache_salt: str | None, *, streaming: bool, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request: its partial outputs when `streaming`, and the final one. Closing it early aborts it.
        `options` are those of `LLM.generate_async`.

        Raises ConfigurationError or CapacityError when the engine can never take it, and RequestRefusedError when too
        many run or the engine has stopped.
        """
        if self.running >= self._max_requests:
            message = f"{self.running} requests are running or waiting, the most there may be; try later"
            raise RequestRefusedError(503, "too_many_requests", message)
        self.running += 1
        stream: RequestStream | None = None
        try:
            begin = partial(self._llm.generate_async, token_ids, params, streaming, cache_salt, **options)
            stream = await self._call(begin)
            while True:
                for output in await self._call(self._advance, stream):
                    yield output
                    if output.finished:
                        return
        finally:
            self.running -= 1
            if stream is not None:
                with suppress(RuntimeError):  # the thread was closed, and all requests ended with it
                    self._thread.submit(stream.close)
            if self._idling is None or self._idling.done():
                self._idling = asyncio.create_task(self._idle())

    def close(self, timeout: float = 10.0) -> None:
        """Aborts what runs, shuts the engine down and ends the thread."""
        try:
            self._thread.submit(self._llm.shutdown).result(timeout)
        except Exception:
            logger.exception("the engine did not shut down in order")
        self._thread.shutdown(wait=False)

    async def _call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work` on the engine's thread. Raises RequestRefusedError if it fails because the engine has stopped."""
        try:
            result = await asyncio.wrap_future(self._thread.submit(work, *arguments))
        except Exception as error:
            if self.failure is None:
                raise
            if not isinstance(error, SemBlendError):
                logger.exception("the engine has failed and takes no more requests")
        if self.failure is not None:
            raise RequestRefusedError(503, "engine_stopped", f"the engine has stopped: {self.failure}")
        return result

    def _advance(self, stream: RequestStream) -> list[RequestOutput]:
        """Runs one iteration unless an output is ready; returns the ready outputs."""
        if not stream.has_news():
            self._llm.advance()
        outputs: list[RequestOutput] = []
        while stream.has_news() and not (outputs and outputs[-1].finished):
            outputs.append(next(stream))
        return outputs

    async def _idle(self) -> None:
        """While no request runs, polls the connector until its transfers have ended."""
        with suppress(RequestRefusedError):
            while not self.running and self._llm.executor.pending_transfers:
                await self._call(self._llm.executor.poll_transfers)
                await asyncio.sleep(IDLE_PAUSE)


# -- answers ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TextSoFar:
    """Cuts a growing answer at the first of `stops`, and says which part of it may be shown.

    Holds back an incomplete character, and text that may be the beginning of a stop.
    """

    stops: tuple[str, ...] = ()
    shown: str = ""
    is_stopped: bool = False

    def delta(self, text: str, *, is_last: bool) -> str:
        """The next part to show of `text`, the whole answer so far."""
        ends = [at for at in map(text.find, self.stops) if at >= 0]
        if ends:
            self.is_stopped, text = True, text[: min(ends)]
        elif not is_last:
            text = text[: len(text) - self._held_back(text)]
        new, self.shown = text[len(self.shown) :], max(text, self.shown, key=len)
        return new

    def _held_back(self, text: str) -> int:
        held = len(text) - len(text.rstrip("\ufffd"))
        for stop in self.stops:
            fits = (length for length in range(len(stop) - 1, 0, -1) if text.endswith(stop[:length]))
            held = max(held, next(fits, 0))
        return held


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Formats one request's answer as JSON, of a chat or of a completion."""

    model: str
    is_chat: bool
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finish_reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        choice = {**content, "finish_reason": finish_reason}
        return self._answer("chat.completion", [choice]) | {"usage": usage}

    def chunk(self, text: str, finish_reason: str | None, *, is_first: bool) -> bytes:
        """One event of a stream."""
        role = {"role": "assistant"} if is_first else {}
        content = {"delta": {**role, "content": text}} if self.is_chat else {"text": text}
        return event(self._answer("chat.completion.chunk", [{**content, "finish_reason": finish_reason}]))

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The event with the usage, sent behind the last event with text."""
        return event(self._answer("chat.completion.chunk", []) | {"usage": usage})

    def _answer(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + self.answer_id,
            "object": name if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, "logprobs": None, **choice} for choice in choices],
        }


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data).encode("ascii") + b"\n\n"


def usage_of(output: RequestOutput) -> dict[str, Any]:
    """Token counts of prompt and answer. `cached_tokens` of the prompt came from the engine's exact prefix cache,
    `reused_tokens` from donors; `computed_tokens` went through the last layer. With our connector, the receipt."""
    prompt, answer = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {
            "cached_tokens": output.cached_tokens,
            "reused_tokens": output.reused_tokens,
            "computed_tokens": output.computed_tokens,
        },
        **({} if output.receipt is None else {RECEIPT: output.receipt}),
    }


# -- the routes -------------------------------------------------------------------------------------------------------


class Worker:
    """One engine and its HTTP handlers; requests call the model `name`. Close it after the server has ended."""

    def __init__(self, llm: LLM, name: str, bounds: ServerBounds = BOUNDS) -> None:
        self.name, self._bounds = name, bounds
        self._longest = llm.executor.max_seq_len
        # Prompts are read on other threads than the engine's, with other copies of the tokenizer.
        self._prompts = ReadingThreads(llm.tokenizer, self._longest)
        self._engine = EngineThread(llm)
        settings = load_settings()
        self._cold_runs = ColdRuns(settings.audit_sample, metrics_for(settings.metrics).cold_run)

    def close(self) -> None:
        self._engine.close()
        self._prompts.close()

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[refusing()])
        app.router.add_post("/v1/completions", partial(self._serve, is_chat=False))
        app.router.add_post("/v1/chat/completions", partial(self._serve, is_chat=True))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", _metrics)
        app.on_cleanup.append(lambda _: self._cold_runs.close())
        return app

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.name, "object": "model", "owned_by": "semblend-trt", "max_model_len": self._longest}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        failure = self._engine.failure
        if failure is not None:
            return web.json_response({"status": "stopped", "reason": failure}, status=503)
        return web.json_response({"status": "ok", "running": self._engine.running})

    async def _serve(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        is_verified = asks_to_verify(request.headers)
        fields, token_ids = await self._read(request, is_chat=is_chat)
        if is_verified and fields.stream and not fields.includes_usage:
            message = f'{VERIFY_HEADER} is answered in the usage; ask for it with "include_usage" of stream_options'
            raise RequestRefusedError(400, "bad_verify", message)
        rest = max(1, self._longest - len(token_ids))
        params = fields.sampling_params(rest if is_chat else min(DEFAULT_MAX_TOKENS, rest))
        form = AnswerForm(self.name, is_chat)

        async def usage(output: RequestOutput) -> dict[str, Any]:
            return await self._usage(output, params, fields, is_verified=is_verified)

        answers = self._answers(token_ids, params, fields, is_streamed=bool(fields.stream), **fields.options)
        try:
            async with aclosing(answers) as parts:
                if fields.stream:
                    return await _stream(request, form, fields, parts, usage)
                return await _whole(form, parts, usage)
        except (ConfigurationError, CapacityError) as error:
            raise RequestRefusedError(400, "bad_request", str(error)) from None

    async def _usage(
        self, output: RequestOutput, params: SamplingParams, fields: CompletionBody, *, is_verified: bool
    ) -> dict[str, Any]:
        """An answer's usage, compared with a cold run where that is asked for; one of the sample is compared later."""
        usage, first = usage_of(output), [output.outputs[0].token_ids]
        run_cold: Callable[[int], Awaitable[list[list[int]]]] | None = None
        if is_repeatable(params.temperature, params.top_k, params.seed):
            run_cold = partial(
                self._cold, output.prompt_token_ids, replace(params, max_tokens=max(1, len(first[0]))), fields
            )
        if is_verified:
            verified = await self._cold_runs.verdict(first, run_cold and partial(run_cold, fields.priority or 0))
            usage[RECEIPT] = {**usage.get(RECEIPT, {}), "verified": verified}
        elif (usage.get(RECEIPT) or {}).get("reused_tokens") and self._cold_runs.draws():
            self._cold_runs.later(first, run_cold and partial(run_cold, WARM_PRIORITY))
        return usage

    async def _cold(
        self, token_ids: list[int], params: SamplingParams, fields: CompletionBody, priority: int
    ) -> list[list[int]]:
        """The tokens that a request is answered with when nothing is reused."""
        answers = self._answers(token_ids, params, fields, is_streamed=False, priority=priority, cold=True)
        async with aclosing(answers) as parts:
            outputs = [output async for *_, output in parts]
        return [outputs[-1].outputs[0].token_ids]

    async def _answers(
        self, token_ids: list[int], params: SamplingParams, fields: CompletionBody, *, is_streamed: bool, **options: Any
    ) -> AsyncGenerator[tuple[str, str | None, RequestOutput], None]:
        """The growing answer: each new text, the finish reason at the end, and the engine's output."""
        # Stop texts are searched for behind each token.
        streaming = bool(is_streamed or fields.stop_texts)
        text = TextSoFar(fields.stop_texts)
        answers = self._engine.outputs(token_ids, params, fields.cache_salt, streaming=streaming, **options)
        async with aclosing(answers) as outputs:
            async for output in outputs:
                if output.error is not None:
                    raise RequestRefusedError(500, "request_failed", output.error)
                answer = output.outputs[0]
                delta = text.delta(answer.text, is_last=output.finished)
                if text.is_stopped:
                    break
                yield delta, answer.finish_reason, output
            else:
                return
        yield delta, "stop", output  # the engine has ended the request by now

    async def _read(self, request: web.Request, *, is_chat: bool) -> tuple[CompletionBody, list[int]]:
        """A request's fields, and its prompt's token ids."""
        body, size = await json_object(request, self._bounds)
        fields = read_body(body, is_chat=is_chat)
        if fields.model not in (None, self.name):
            raise RequestRefusedError(404, "model_not_found", f"this worker serves the model {self.name} alone")
        read = PromptReader.chat if is_chat else PromptReader.completion
        try:
            return fields, await self._prompts.read(size, lambda reader: read(reader, body))
        except PromptError as error:
            reason = "prompt_too_long" if isinstance(error, PromptTooLongError) else "bad_prompt"
            raise RequestRefusedError(400, reason, str(error)) from None


async def _whole(form: AnswerForm, answers: Parts, usage: UsageOf) -> web.Response:
    parts = [part async for part in answers]
    _, reason, output = parts[-1]
    return web.json_response(form.whole("".join(delta for delta, *_ in parts), reason, await usage(output)))


async def _stream(
    request: web.Request, form: AnswerForm, fields: CompletionBody, answers: Parts, usage: UsageOf
) -> web.StreamResponse:
    """Answers event by event. Sends the status with the first output, so that an earlier refusal has its own status."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        async for delta, reason, output in answers:
            is_first = not response.prepared
            if is_first:
                await response.prepare(request)
            if delta or reason is not None or is_first:
                await response.write(form.chunk(delta, reason, is_first=is_first))
            if reason is not None:
                told = await usage(output)
                if fields.includes_usage:
                    await response.write(form.usage_chunk(told))
    except RequestRefusedError as refusal:
        if not response.prepared:
            raise
        await response.write(event(error_object(refusal.status, refusal.reason, str(refusal))))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _metrics(_: web.Request) -> web.Response:
    return metrics_page()


# -- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until the process is interrupted. Returns 0, or the status of `command_line.ended`."""
    arguments = _parser().parse_args(argv)
    return ended("semblend-trt worker", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    settings = {"WORKER_ID": arguments.worker_id, "NATS_URL": arguments.nats, "PROFILE": arguments.profile}
    os.environ |= {PREFIXES[0] + name: str(value) for name, value in settings.items() if value is not None}
    bounds = ServerBounds(
        arguments.header_seconds,
        arguments.body_seconds,
        arguments.max_connections,
        arguments.max_connections,  # a router is one peer
        arguments.max_body_bytes,
    )
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        kv_cache_config=KvCacheConfig(dtype=arguments.kv_dtype),
        max_batch_size=arguments.max_batch_size,
        kv_connector_config=KvCacheConnectorConfig.ours(),
    )
    worker = Worker(llm, arguments.name or Path(arguments.model).resolve().name, bounds)
    what = f"serving {printable(worker.name)}"
    try:
        asyncio.run(serve(worker.app(), arguments.host, arguments.port, what, Connections(bounds)))
    finally:
        worker.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m engine_wrapper.embedded.server", description=__doc__)
    parser.add_argument("--model", type=named, required=True, help="folder or hub id of the model")
    parser.add_argument("--name", type=named, help="what requests call the model (default: the last part of --model)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8001, help="port, 0 for a free one (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="dtype of weights and KV (default: the checkpoint's)")
    parser.add_argument("--kv-dtype", default="auto", help="dtype of KV, that of the weights or fp8 (default: auto)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: CUDA where it is)")
    parser.add_argument("--max-batch-size", type=int, default=8, help="requests that run together (default: 8)")
    for name, what in (
        ("--header-seconds", "seconds in which the header of a request has to be there"),
        ("--body-seconds", "seconds in which its body has to be there"),
        ("--max-connections", "connections, of which the one that is idle for longest makes room"),
        ("--max-body-bytes", "bytes of a body"),
    ):
        default = getattr(BOUNDS, name[2:].replace("-", "_"))
        parser.add_argument(name, type=_positive(type(default)), default=default, help=f"{what} (default: {default})")
    parser.add_argument("--worker-id", type=int, help="number in the fleet, in place of SEMBLEND_WORKER_ID")
    parser.add_argument("--nats", type=named, help="NATS server for donor events, in place of SEMBLEND_NATS_URL")
    parser.add_argument("--profile", type=named, help="reuse profile of the model, in place of SEMBLEND_PROFILE")
    return parser


def _positive(kind: type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        with suppress(ValueError):
            if 0 < (value := kind(text)) < 1 << 30:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no {kind.__name__} above 0 and below {1 << 30}")

    return read


def _port(text: str) -> int:
    with suppress(ValueError):
        if 0 <= int(text) < 1 << 16:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port from 0 to 65535")


if __name__ == "__main__":
    sys.exit(main())
