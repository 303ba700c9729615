"""Serve the embedded engine by the OpenAI API, for the fleet's tests and for demonstrations.

`python -m engine_wrapper.embedded.server --model FOLDER --port 8001` serves /v1/completions, /v1/chat/completions (if
the tokenizer has a template), /v1/models, /health and /metrics. It takes settings from the environment, answers
greedily and at once, and trusts its clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine_wrapper.embedded.llm import LLM, RequestStream
from engine_wrapper.embedded.llm_args import KvCacheConnectorConfig
from engine_wrapper.embedded.request import SamplingParams
from semblend_trt.command_line import ended, named, printable
from semblend_trt.errors import CapacityError, ConfigurationError
from semblend_trt.prompts import PromptError, PromptReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_wrapper.embedded.request import RequestOutput

# Known fields that are not read here: the first ones change no answer, and PromptReader reads the others.
_UNREAD = ("metadata", "request_id", "return_token_ids", "seed", "top_p", "user", "add_special_tokens")
_CHAT = ["messages", "documents", "add_generation_prompt", "continue_final_message"]
_CHAT += ["chat_template_kwargs", "reasoning_effort"]


def refused(kind: type[web.HTTPError], code: str, message: str) -> web.HTTPError:
    """Return a status with an error object of the OpenAI API: `code` names the reason."""
    return kind(text=json.dumps({"error": {"message": message, "code": code}}), content_type="application/json")


class Body(BaseModel):
    """The fields of a request that are read here."""

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
    """Return the checked fields; null means the default. A wrong value and an unknown field are refused."""
    unread = (*_UNREAD, *(_CHAT if is_chat else ("prompt",)))
    given = {name: value for name, value in body.items() if value is not None and name not in unread}
    try:
        return Body.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"] if part != "[key]")
    if first["type"] in ("extra_forbidden", "literal_error"):
        reason = f"{place} is not supported by this engine; leave it out"
        raise refused(web.HTTPBadRequest, "unsupported_field", reason)
    raise refused(web.HTTPBadRequest, "bad_field", f"{place}: {first['msg']}")


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
        app = web.Application(client_max_size=2 << 20)
        app.router.add_post("/v1/completions", partial(self._serve, is_chat=False))
        app.router.add_post("/v1/chat/completions", partial(self._serve, is_chat=True))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.name, "max_model_len": self._llm.executor.max_seq_len}]})

    async def _health(self, _: web.Request) -> web.Response:
        if (failure := self._llm.executor.failure) is not None:
            return web.json_response({"status": "stopped", "reason": failure}, status=503)
        return web.json_response({"status": "ok", "running": self._running})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _serve(self, request: web.Request, *, is_chat: bool) -> web.Response:
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise refused(web.HTTPBadRequest, "bad_json", "the body is not JSON; send a JSON object")
        fields, read = read_body(body, is_chat=is_chat), self._reader.chat if is_chat else self._reader.completion
        if fields.model not in (None, self.name):
            raise refused(web.HTTPNotFound, "model_not_found", f"this worker serves the model {self.name} alone")

        def enqueue() -> RequestStream:
            params = SamplingParams(fields.max_tokens, tuple(fields.stop_token_ids or ()), fields.ignore_eos)
            asked = {name.removeprefix("semblend."): value for name, value in fields.kv_transfer_params.items()}
            place = {"cache_salt": fields.cache_salt, "priority": fields.priority}
            return self._llm.generate_async(read(body), params, streaming=False, **place, **asked)  # type: ignore[arg-type]

        output = await self._output(enqueue)
        answer = output.outputs[0]
        content = {"message": {"role": "assistant", "content": answer.text}} if is_chat else {"text": answer.text}
        choice = {"index": 0, "logprobs": None, **content, "finish_reason": answer.finish_reason}
        form = {"id": str(output.request_id), "object": "chat.completion" if is_chat else "text_completion"}
        return web.json_response({**form, "model": self.name, "choices": [choice], "usage": output.usage})

    async def _output(self, enqueue: Callable[[], RequestStream]) -> RequestOutput:
        """Return a request's output, or refuse it. Abort it if its client leaves."""
        stream: RequestStream | None = None
        self._running += 1
        try:
            stream = await self._on_thread(enqueue)
            while not stream.has_news():
                await self._on_thread(self._llm.advance)
            output: RequestOutput = await self._on_thread(partial(next, stream))
        except (PromptError, ConfigurationError, CapacityError) as error:
            code = "bad_prompt" if isinstance(error, PromptError) else "bad_request"
            raise refused(web.HTTPBadRequest, code, str(error)) from None
        except Exception:
            if (failure := self._llm.executor.failure) is None:
                raise
            raise refused(web.HTTPServiceUnavailable, "engine_stopped", f"the engine has stopped: {failure}") from None
        finally:
            self._running -= 1
            self._on_thread(partial(self._end, stream))
        if output.error is not None:
            raise refused(web.HTTPInternalServerError, "request_failed", output.error)
        return output

    def _on_thread(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self._thread.submit(work))

    def _end(self, stream: RequestStream | None) -> None:
        """Abort the request if it runs. While no request runs, wait until what was served is a donor."""
        if stream is not None:
            stream.close()
        if not self._running and self._llm.executor.failure is None:
            self._llm.settle()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the process is interrupted. Return 0, or the status of `command_line.ended`."""
    parser = argparse.ArgumentParser("python -m engine_wrapper.embedded.server", description=__doc__)
    parser.add_argument("--model", type=named, required=True, help="folder or hub id of the model")
    parser.add_argument("--port", type=int, default=8001, help="port of this machine (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="dtype of weights and KV (default: the checkpoint's)")
    return ended("semblend-trt worker", partial(_run, **vars(parser.parse_args(argv))))


def _run(model: str, port: int, dtype: str) -> int:
    llm = LLM(model, dtype=dtype, kv_connector_config=KvCacheConnectorConfig.ours())
    worker = Worker(llm, Path(model).resolve().name)
    try:
        with socket.create_server(("127.0.0.1", port)) as listener:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            sys.stderr.write(f"serving {printable(worker.name)} on {address}\n")
            sys.stderr.flush()
            # A client that leaves cancels its request's handler.
            options: dict[str, Any] = {"handler_cancellation": True, "access_log": None, "print": None}
            web.run_app(worker.app(), sock=listener, shutdown_timeout=5.0, **options)
    except OSError as error:
        raise ConfigurationError(f"port {port} cannot be listened on ({error}); choose another one") from None
    finally:
        worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
