"""Serve the embedded engine by the OpenAI API, for the fleet's tests and for demonstrations.

`python -m engine_wrapper.embedded.server --model FOLDER --port 8001` serves /v1/completions, /v1/chat/completions (if
the tokenizer has a template), /v1/models, /health and /metrics. It takes settings from the environment, answers
greedily and at once, and trusts its clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine_wrapper.embedded.llm import IDLE_PAUSE, LLM, RequestStream
from engine_wrapper.embedded.llm_args import KvCacheConnectorConfig
from engine_wrapper.embedded.request import SamplingParams
from semblend_trt.command_line import ended, named, printable
from semblend_trt.errors import CapacityError, ConfigurationError, SemBlendError
from semblend_trt.prompts import PromptError, PromptReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp.typedefs import Handler

    from engine_wrapper.embedded.request import RequestOutput

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 2 << 20
# Seconds that requests may take to end after the process got a signal to stop.
GRACE_SECONDS = 5.0

_SAMPLING = {"max_tokens", "ignore_eos", "stop_token_ids"}
# `Body` checks none of these. The first change no answer; PromptReader makes the prompt of the others.
_PASSED_OVER = ["metadata", "request_id", "return_token_ids", "seed", "top_p", "user"]
_COMPLETION = [*_PASSED_OVER, "prompt", "add_special_tokens"]
_CHAT = [*_PASSED_OVER, "messages", "documents", "add_generation_prompt", "continue_final_message"]
_CHAT += ["add_special_tokens", "chat_template_kwargs", "reasoning_effort"]


class RequestRefusedError(SemBlendError):
    """A request that is not served: `status` is the HTTP status, `reason` the code in the answer."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


@web.middleware
async def refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer refusals, aiohttp's among them, as the OpenAI API's error objects; log other exceptions of a handler."""
    try:
        return await handler(request)
    except RequestRefusedError as error:
        refused = error.with_traceback(None)  # else it and this frame hold each other
    except web.HTTPException as error:
        refused = RequestRefusedError(error.status, "http_error", error.reason)
    except Exception:
        logger.exception("a request to %s failed", request.path)
        refused = RequestRefusedError(500, "internal_error", "the request failed here; the log says why")
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    told = {"message": str(refused), "type": kind, "code": refused.reason}
    return web.json_response({"error": told}, status=refused.status)


async def json_object(request: web.Request) -> dict[str, Any]:
    """Return the body of a request, a JSON object. Raise RequestRefusedError for another body or a longer one."""
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        message = f"the body has more than {MAX_BODY_BYTES} bytes; send less"
        raise RequestRefusedError(413, "body_too_large", message) from None
    except web.RequestPayloadError:
        message = "the body is not encoded as its header says; send plain JSON"
        raise RequestRefusedError(400, "bad_encoding", message) from None
    except (ValueError, RecursionError):
        raise RequestRefusedError(400, "bad_json", "the body is not JSON; send a JSON object") from None
    if not isinstance(body, dict):
        raise RequestRefusedError(400, "bad_json", f"the body is a JSON {type(body).__name__}; send a JSON object")
    return body


class Body(BaseModel):
    """The known fields of a request beside its prompt; a client may send null for a default."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: int = 16
    temperature: Annotated[float, Field(ge=0, le=0)] = 0.0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    stream: Literal[False] = False
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    kv_transfer_params: dict[Literal["semblend.exact_only", "semblend.cold"], bool] = {}


def read_body(body: dict[str, Any], *, is_chat: bool) -> Body:
    """Return the checked fields of a request. Raises RequestRefusedError for a wrong value and an unknown field."""
    passed_over = _CHAT if is_chat else _COMPLETION
    given = {name: value for name, value in body.items() if value is not None and name not in passed_over}
    try:
        return Body.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"] if part != "[key]")
    if first["type"] in ("extra_forbidden", "literal_error"):
        raise RequestRefusedError(400, "unsupported_field", f"{place} is not supported by this engine; leave it out")
    raise RequestRefusedError(400, "bad_field", f"{place}: {first['msg']}")


class Worker:
    """One engine on a thread of its own, and its HTTP handlers; requests call the model `name`."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.name, self._llm = name, llm
        self._reader = PromptReader(llm.tokenizer, llm.executor.max_seq_len)
        self._thread = ThreadPoolExecutor(1, "embedded-engine")
        self._running = 0

    def close(self) -> None:
        self._thread.submit(self._llm.shutdown).result()
        self._thread.shutdown()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[refusing], client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", partial(self._serve, is_chat=False))
        app.router.add_post("/v1/chat/completions", partial(self._serve, is_chat=True))
        for path in ("/v1/models", "/health", "/metrics"):
            app.router.add_get(path, self._told)
        return app

    async def _told(self, request: web.Request) -> web.Response:
        """Answer what is asked of the engine itself: its model, its health, its metrics."""
        executor = self._llm.executor
        if request.path == "/metrics":
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

            return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": self.name, "max_model_len": executor.max_seq_len}]})
        if executor.failure is not None:
            return web.json_response({"status": "stopped", "reason": executor.failure}, status=503)
        return web.json_response({"status": "ok", "running": self._running})

    async def _serve(self, request: web.Request, *, is_chat: bool) -> web.Response:
        body = await json_object(request)
        fields = read_body(body, is_chat=is_chat)
        if fields.model not in (None, self.name):
            raise RequestRefusedError(404, "model_not_found", f"this worker serves the model {self.name} alone")
        prompt = self._reader.chat if is_chat else self._reader.completion

        def enqueue() -> RequestStream:
            return self._llm.generate_async(
                prompt(body),
                SamplingParams(**fields.model_dump(include=_SAMPLING, exclude_none=True)),
                streaming=False,
                cache_salt=fields.cache_salt,
                priority=fields.priority,
                exact_only=fields.kv_transfer_params.get("semblend.exact_only", False),
                cold=fields.kv_transfer_params.get("semblend.cold", False),
            )

        output = await self._output(enqueue)
        answer = output.outputs[0]
        content = {"message": {"role": "assistant", "content": answer.text}} if is_chat else {"text": answer.text}
        choice = {"index": 0, "logprobs": None, **content, "finish_reason": answer.finish_reason}
        form = {"id": uuid.uuid4().hex, "object": "chat.completion" if is_chat else "text_completion"}
        return web.json_response({**form, "model": self.name, "choices": [choice], "usage": output.usage})

    async def _output(self, enqueue: Callable[[], RequestStream]) -> RequestOutput:
        """Return a request's output. Abort it if its client leaves. Raises RequestRefusedError if it cannot run."""
        stream: RequestStream | None = None
        output: RequestOutput | None = None
        self._running += 1
        try:
            stream = await self._on_thread(enqueue)
            while output is None:
                output = await self._on_thread(partial(self._advance, stream))
            if output.error is None:
                return output
            raise RequestRefusedError(500, "request_failed", output.error)
        except (PromptError, ConfigurationError, CapacityError) as error:
            code = "bad_prompt" if isinstance(error, PromptError) else "bad_request"
            raise RequestRefusedError(400, code, str(error)) from None
        except Exception:
            if (failure := self._llm.executor.failure) is None:
                raise
            raise RequestRefusedError(503, "engine_stopped", f"the engine has stopped: {failure}") from None
        finally:
            self._running -= 1
            self._on_thread(partial(self._end, stream))

    def _on_thread(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self._thread.submit(work))

    def _advance(self, stream: RequestStream) -> RequestOutput | None:
        """Run one iteration of all requests, unless the output is ready; return the output if it is."""
        if not stream.has_news():
            self._llm.advance()
        return next(stream) if stream.has_news() else None

    def _end(self, stream: RequestStream | None) -> None:
        """Abort the request if it runs. While no request runs, poll the connector until its transfers have ended."""
        if stream is not None:
            stream.close()
        executor = self._llm.executor
        while not self._running and executor.failure is None and executor.pending_transfers:
            executor.poll_transfers()
            time.sleep(IDLE_PAUSE)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the process is interrupted. Return 0, or the status of `command_line.ended`."""
    parser = argparse.ArgumentParser("python -m engine_wrapper.embedded.server", description=__doc__)
    parser.add_argument("--model", type=named, required=True, help="folder or hub id of the model")
    parser.add_argument("--port", type=int, default=8001, help="port of this machine (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="dtype of weights and KV (default: the checkpoint's)")
    arguments = parser.parse_args(argv)
    return ended("semblend-trt worker", partial(_run, **vars(arguments)))


def _run(model: str, port: int, dtype: str) -> int:
    llm = LLM(model, dtype=dtype, kv_connector_config=KvCacheConnectorConfig.ours())
    worker, host = Worker(llm, Path(model).resolve().name), "127.0.0.1"
    try:
        with socket.create_server((host, port)) as listener:
            sys.stderr.write(f"serving {printable(worker.name)} on http://{host}:{listener.getsockname()[1]}\n")
            sys.stderr.flush()
            # A client that leaves cancels its request's handler.
            options: dict[str, Any] = {"handler_cancellation": True, "access_log": None, "print": None}
            web.run_app(worker.app(), sock=listener, shutdown_timeout=GRACE_SECONDS, **options)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigurationError(f"{host}:{port} cannot be listened on ({reason}); choose another address") from None
    finally:
        worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
