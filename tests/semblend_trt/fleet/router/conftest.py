"""Stand-in replicas in the test's event loop, and routers in front of them."""

from __future__ import annotations

import asyncio
import inspect
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import log

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from semblend_trt.fleet.router.app import Router
from semblend_trt.fleet.router.config import RouterConfig
from semblend_trt.fleet.router.serving import listening

WAIT_SECONDS = 120
SECRET = "a secret of the router"


@dataclass
class StandIn:
    """A replica that answers with its number, as `behave` says, and keeps the bodies and headers that it was sent."""

    number: int
    behave: str = "well"
    # What a cold run says, if it is not the same; "" fails it.
    cold_text: str | None = None
    receipt: dict | None = None
    # The probability that it gives its first token, where it tells likelihoods; a cold run gives 0.5.
    likelihood: float | None = None
    bodies: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    # A stream that is cut or torn waits for this, so that its first event arrives.
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    elsewhere: str = ""

    def app(self):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _health(self, _):
        return web.Response(status=500 if self.behave == "ill" else 200)

    async def _complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        is_cold = "semblend.cold" in (body.get("kv_transfer_params") or {})
        text = self.cold_text if is_cold and self.cold_text is not None else str(self.number)
        if self.behave == "busy":
            return web.Response(status=503)
        if self.behave in ("ill", "wrong") or not text:
            return web.json_response({"error": {"message": "the engine"}}, status=500)
        if self.behave == "dying":
            return self._cut(request)
        if self.behave == "away":
            return web.Response(status=307, headers={"Location": self.elsewhere + request.path})
        if self.behave == "silent":
            return await self._stay()
        if self.behave == "large":
            return web.Response(body=b" " * 4096)
        if body.get("max_tokens") == 0:
            return web.json_response({"error": {"message": "max_tokens"}}, status=400)
        details = {"cached_tokens": 2, "reused_tokens": 3, "computed_tokens": 1}
        usage = {"prompt_tokens": 6, "completion_tokens": 1, "prompt_tokens_details": details}
        usage |= {} if self.receipt is None else {"semblend": self.receipt}
        answer = {"choices": [{"text": text}], "usage": usage}
        if body.get("return_token_ids"):
            answer["choices"][0] |= {"token_ids": list(text.encode()), "prompt_token_ids": [7]}
        if body.get("logprobs"):
            if self.likelihood is None:
                return web.json_response({"error": {"message": "logprobs"}}, status=400)
            first = 0.5 if is_cold else self.likelihood
            row = {"token_id:1": log(first), "token_id:2": log(1 - first)}
            answer["choices"][0]["logprobs"] = {"tokens": ["token_id:1"], "top_logprobs": [row]}
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "first"}]}\n\n')
        if self.behave in ("cut", "torn", "stuck"):
            await self.go_on.wait()
        if self.behave in ("torn", "stuck"):
            await response.write(b'data: {"choices": [{"te')
        if self.behave in ("cut", "torn"):
            return self._cut(request)
        if self.behave == "stuck":
            return await self._stay()
        if self.behave in ("dripping", "endless"):
            try:
                while True:
                    await response.write(b"." if self.behave == "dripping" else b": still here\n\n")
                    await asyncio.sleep(0.001)
            finally:
                self.left.set()
        await response.write(b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def _stay(self):
        """Until the request is given up."""
        try:
            return await asyncio.Future()
        finally:
            self.left.set()

    @staticmethod
    def _cut(request):
        request.transport.abort()
        return web.Response()


@dataclass
class Routed:
    """A running router with a client, and its replicas."""

    client: aiohttp.ClientSession
    router: Router
    replicas: list[StandIn]
    address: str

    async def ask(self, path="/v1/completions", *, headers=None, **fields):
        """Status, answer and headers of one request with these fields."""
        async with self.client.post(path, json=fields, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def read(self, *, headers=None, **fields):
        """All that is answered to a completion with these fields."""
        async with self.client.post("/v1/completions", json=fields, headers=headers) as response:
            return await response.read()

    def count(self, name, **labels):
        value = self.router.counters.registry.get_sample_value(name, labels)
        assert value is not None, f"{name} {labels}"
        return value


@asynccontextmanager
async def _running(tokenizer, replicas=2, **fields):
    stand_ins = [StandIn(number) for number in range(1, replicas + 1)]
    async with AsyncExitStack() as servers:
        for stand_in in stand_ins:
            server = await servers.enter_async_context(TestServer(stand_in.app()))
            stand_in.url = str(server.make_url(""))
        table = {"model": "tiny", "secret_env": "SECRET", "health_seconds": 3600, "show_worker": True}
        table["replicas"] = [{"url": each.url, "worker_id": each.number} for each in stand_ins]
        config = RouterConfig.model_validate(table | fields)
        running = Router(config, {"SECRET": SECRET}, tokenizer, None, config.audit_sample or 0.0)
        async with (
            listening(running.app(), "127.0.0.1", 0, running.connections()) as address,
            aiohttp.ClientSession(address) as client,
        ):
            yield Routed(client, running, stand_ins, address)


def run_within(opened, test):
    """Runs the coroutine function `test` with what `opened` yields."""

    async def all_of_it():
        async with opened as parts:
            return await test(parts)

    return asyncio.run(asyncio.wait_for(all_of_it(), WAIT_SECONDS))


def within(opens, *fixtures, **fields):
    """Makes a test of a coroutine function, whose first argument is what `opens(*fixtures, **fields)` yields."""

    def made(test):
        _, *others = inspect.signature(test).parameters

        def run(**given):
            own = {name: given[name] for name in others}
            run_within(opens(*(given[name] for name in fixtures), **fields), lambda parts: test(parts, **own))

        names = dict.fromkeys([*fixtures, *others])
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        run.__signature__ = inspect.Signature(parameters)
        run.__doc__ = test.__doc__
        return run

    return made


router = partial(within, _running, "tokenizer")


@pytest.fixture
def routed(tokenizer):
    """routed(test, **fields of the configuration): for fields that need fixtures."""
    return lambda test, **fields: run_within(_running(tokenizer, **fields), test)
