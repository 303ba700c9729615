"""A worker: the embedded engine behind the OpenAI API.

`python -m engine_wrapper.embedded.server --model FOLDER --port 8001 --worker-id 1` serves /v1/completions,
/v1/chat/completions (where the tokenizer has a template), /v1/models, /health and /metrics. Requests that come together
run together; one whose client leaves is aborted. `cache_salt` in a body keeps the KV of its tenant apart: whoever sets
it must be trusted, so the server listens on this machine only unless it is told otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine_wrapper.embedded.llm import LLM, KvCacheConnectorConfig
from engine_wrapper.embedded.sampling import SamplingParams
from engine_wrapper.embedded.server_engine import BusyError, EngineStoppedError, EngineThread
from semblend_trt.command_line import ended, named
from semblend_trt.errors import CapacityError, ConfigurationError
from semblend_trt.fleet.router.connections import Connections, ServerBounds, json_object
from semblend_trt.fleet.router.prompts import PromptError, PromptReader, PromptTooLongError, ReadingThreads
from semblend_trt.fleet.router.refusals import RequestRefusedError, error_object, refusing
from semblend_trt.fleet.router.serving import metrics_page, serve
from semblend_trt.printable import printable
from semblend_trt.settings.environment import PREFIXES

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from engine_wrapper.embedded.request import RequestOutput

DEFAULT_MAX_TOKENS = 16
MAX_STOPS = 16
# Fields that would change the answer and that this engine does not know, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "early_stopping": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "lora_request": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "no_repeat_ngram_size": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class StreamOptions(BaseModel):
    """What a stream ends with."""

    include_usage: bool = False


class CompletionBody(BaseModel):
    """The fields that are read of either kind of request; None stands for the default, as clients send it."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

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

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, default_max_tokens: int) -> SamplingParams:
        """Where nothing is said the OpenAI API samples at temperature 1. Raises RequestRefusedError."""
        given = {
            "max_tokens": self.max_completion_tokens if self.max_tokens is None else self.max_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": self.stop_token_ids,
        }
        fields: dict[str, Any] = {"max_tokens": default_max_tokens}
        fields |= {name: value for name, value in given.items() if value is not None}
        try:
            return SamplingParams(**fields)
        except ConfigurationError as error:
            raise RequestRefusedError(400, "bad_field", str(error)) from None


def read_body(body: dict[str, Any]) -> CompletionBody:
    """Checks a body's fields. Raises RequestRefusedError for wrong values, and for what this engine cannot do."""
    for name, neutral in _UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and not any(_is_same(value, each) for each in neutral):
            raise RequestRefusedError(400, "unsupported_field", f"{name} is not supported by this engine; leave it out")
    try:
        return CompletionBody.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestRefusedError(400, "bad_field", f"{place}: {first['msg']}") from None


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal, and a truth value where that is one: `logprobs` 0 asks for the tokens' own, and false for none."""
    return bool(value == neutral) and isinstance(value, bool) is isinstance(neutral, bool)


STREAM_END = b"data: [DONE]\n\n"
_UNFINISHED = "\ufffd"


@dataclass(slots=True)
class TextSoFar:
    """Cuts an answer that grows at the first of `stops`, and says what may be shown of it.

    A character whose bytes are not all there yet is held back, and so is what may be the beginning of a stop.
    """

    stops: tuple[str, ...] = ()
    shown: str = ""
    is_stopped: bool = False

    def delta(self, text: str, *, is_last: bool) -> str:
        """What can be shown of `text`, the whole answer so far, beyond what was shown."""
        ends = [at for at in map(text.find, self.stops) if at >= 0]
        if ends:
            self.is_stopped, text = True, text[: min(ends)]
        elif not is_last:
            text = text[: len(text) - self._held_back(text)]
        new, self.shown = text[len(self.shown) :], max(text, self.shown, key=len)
        return new

    def _held_back(self, text: str) -> int:
        held = len(text) - len(text.rstrip(_UNFINISHED))
        for stop in self.stops:
            fits = (length for length in range(len(stop) - 1, 0, -1) if text.endswith(stop[:length]))
            held = max(held, next(fits, 0))
        return held


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """One request's answer as JSON, of a chat or of a completion."""

    model: str
    is_chat: bool
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finish_reason: str | None, output: RequestOutput) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": text}}
        return self._answer({**content, "finish_reason": finish_reason}, is_chunk=False) | {"usage": usage_of(output)}

    def chunk(self, text: str, finish_reason: str | None, *, is_first: bool) -> bytes:
        """One event of a stream."""
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"delta": ({"role": "assistant"} if is_first else {}) | {"content": text}}
        return event(self._answer({**content, "finish_reason": finish_reason}, is_chunk=True))

    def usage_chunk(self, output: RequestOutput) -> bytes:
        """The event with the usage, behind the last one with text."""
        return event(self._answer(None, is_chunk=True) | {"usage": usage_of(output)})

    def _answer(self, choice: dict[str, Any] | None, *, is_chunk: bool) -> dict[str, Any]:
        name = "text_completion"
        if self.is_chat:
            name = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + self.answer_id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": [] if choice is None else [{"index": 0, "logprobs": None, **choice}],
        }


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data).encode("ascii") + b"\n\n"


def usage_of(output: RequestOutput) -> dict[str, Any]:
    """Tokens of prompt and answer. Of the prompt's, `cached_tokens` came from the engine's exact prefix cache,
    `reused_tokens` from donors, and `computed_tokens` went through the last layer."""
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
    }


BOUNDS = ServerBounds()
_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class Worker:
    """One engine and the handlers of its requests. Close it when nothing is served any more."""

    def __init__(self, llm: LLM, name: str, bounds: ServerBounds = BOUNDS) -> None:
        """`name` is what requests call the model."""
        self.name, self._bounds = name, bounds
        self._longest = llm.executor.max_seq_len
        # The engine's own tokenizer belongs to its thread.
        self._prompts = ReadingThreads(llm.tokenizer, self._longest)
        self._engine = EngineThread(llm)

    def close(self) -> None:
        self._engine.close()
        self._prompts.close()

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[refusing()])
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", _metrics)
        return app

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, is_chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, is_chat=True)

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.name, "object": "model", "owned_by": "semblend-trt", "max_model_len": self._longest}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        failure = self._engine.failure
        if failure is not None:
            return web.json_response({"status": "stopped", "reason": failure}, status=503)
        return web.json_response({"status": "ok", "running": self._engine.running})

    async def _serve(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        fields, token_ids = await self._read(request, is_chat=is_chat)
        rest = max(1, self._longest - len(token_ids))
        params = fields.sampling_params(rest if is_chat else min(DEFAULT_MAX_TOKENS, rest))
        form = AnswerForm(self.name, is_chat)
        # Stops are looked for in the text, so each token has to be seen.
        streaming = bool(fields.stream or fields.stop_texts)
        async with aclosing(self._outputs(token_ids, params, fields.cache_salt, streaming=streaming)) as outputs:
            if fields.stream:
                return await _stream(request, form, fields, outputs)
            return await _answer(form, fields, outputs)

    async def _read(self, request: web.Request, *, is_chat: bool) -> tuple[CompletionBody, list[int]]:
        """What a request asks for, and its prompt. The body is not kept."""
        body, size = await json_object(request, self._bounds)
        fields = read_body(body)
        if fields.model not in (None, self.name):
            raise RequestRefusedError(404, "model_not_found", f"this worker serves the model {self.name} alone")
        read = PromptReader.chat if is_chat else PromptReader.completion
        try:
            return fields, await self._prompts.read(size, lambda reader: read(reader, body))
        except PromptTooLongError as error:
            raise RequestRefusedError(400, "prompt_too_long", str(error)) from None
        except PromptError as error:
            raise RequestRefusedError(400, "bad_prompt", str(error)) from None

    async def _outputs(
        self, token_ids: list[int], params: SamplingParams, cache_salt: str | None, *, streaming: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        try:
            async with aclosing(self._engine.outputs(token_ids, params, cache_salt, streaming=streaming)) as outputs:
                async for output in outputs:
                    if output.error is not None:
                        raise RequestRefusedError(500, "request_failed", output.error)
                    yield output
        except (ConfigurationError, CapacityError) as error:
            raise RequestRefusedError(400, "bad_request", str(error)) from None
        except BusyError as error:
            raise RequestRefusedError(503, "too_many_requests", str(error)) from None
        except EngineStoppedError as error:
            raise RequestRefusedError(503, "engine_stopped", str(error)) from None


async def _answer(form: AnswerForm, fields: CompletionBody, outputs: AsyncIterator[RequestOutput]) -> web.Response:
    text = TextSoFar(fields.stop_texts)
    async for output in outputs:
        answer = output.outputs[0]
        text.delta(answer.text, is_last=output.finished)
        if output.finished or text.is_stopped:
            reason = "stop" if text.is_stopped else answer.finish_reason
            return web.json_response(form.whole(text.shown, reason, output))
    raise RequestRefusedError(500, "request_failed", "the engine ended without an answer")


async def _stream(
    request: web.Request, form: AnswerForm, fields: CompletionBody, outputs: AsyncIterator[RequestOutput]
) -> web.StreamResponse:
    """Answers event by event. The status is sent with the first output, so that refusals before it have their own."""
    text = TextSoFar(fields.stop_texts)
    response: web.StreamResponse | None = None
    try:
        async for output in outputs:
            is_first = response is None
            if response is None:
                response = web.StreamResponse(headers=_STREAM_HEADERS)
                await response.prepare(request)
            answer = output.outputs[0]
            delta = text.delta(answer.text, is_last=output.finished)
            is_end = output.finished or text.is_stopped
            reason = ("stop" if text.is_stopped else answer.finish_reason) if is_end else None
            if delta or is_end or is_first:
                await response.write(form.chunk(delta, reason, is_first=is_first))
            if is_end:
                if fields.includes_usage:
                    await response.write(form.usage_chunk(output))
                break
    except RequestRefusedError as refusal:
        if response is None:
            raise
        await response.write(event(error_object(refusal.status, refusal.reason, str(refusal))))
    if response is None:
        raise RequestRefusedError(500, "request_failed", "the engine ended without an answer")
    await response.write(STREAM_END)
    await response.write_eof()
    return response


async def _metrics(_: web.Request) -> web.Response:
    return metrics_page()


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until the process is told to end. Returns 0, or the status of `command_line.ended`."""
    arguments = _parser().parse_args(argv)
    return ended("semblend-trt worker", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    for name, value in (
        ("WORKER_ID", arguments.worker_id),
        ("NATS_URL", arguments.nats),
        ("PROFILE", arguments.profile),
    ):
        if value is not None:
            os.environ[PREFIXES[0] + name] = str(value)
    bounds = ServerBounds(
        arguments.header_seconds,
        arguments.body_seconds,
        arguments.max_connections,
        arguments.max_connections,  # a router is one peer
        arguments.max_body_bytes,
    )
    worker = Worker(_llm(arguments), arguments.name or Path(arguments.model).resolve().name, bounds)
    what = f"serving {printable(worker.name)}"
    try:
        asyncio.run(serve(worker.app(), arguments.host, arguments.port, what, Connections(bounds)))
    finally:
        worker.close()
    return 0


def _llm(arguments: argparse.Namespace) -> LLM:
    connector = KvCacheConnectorConfig.ours()
    return LLM(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        max_batch_size=arguments.max_batch_size,
        kv_connector_config=connector,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m engine_wrapper.embedded.server", description=__doc__)
    parser.add_argument("--model", type=named, required=True, help="folder or hub id of the model")
    parser.add_argument("--name", type=named, help="what requests call the model (default: the last part of --model)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8001, help="port, 0 for a free one (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="dtype of weights and KV (default: the checkpoint's)")
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
