"""A callback of LiteLLM's proxy: it narrows a model group's healthy deployments to the one that holds most of a prompt.

`litellm_settings: callbacks: [semblend_trt.fleet.litellm.placement]` loads it, with the settings of the environment;
docs/litellm.yaml is an example. In `model_info` a deployment has `semblend_worker_id`, its replica's
SEMBLEND_WORKER_ID, and `semblend_tokenizer`, the folder of the model's tokenizer. Facts: LiteLLM 1.108.7, `router.py`
and `utils.py`."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import Counter
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from litellm.integrations.custom_logger import CustomLogger

from semblend_trt.background import quiet_logger
from semblend_trt.config import load_settings
from semblend_trt.fleet.placement import Loads, counted_placement
from semblend_trt.model_files import tokenizer_digest
from semblend_trt.model_tokenizer import load_tokenizer
from semblend_trt.policy import COLD
from semblend_trt.prompts import PromptError, ReadingThreads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from semblend_trt.config import Settings
    from semblend_trt.fleet.directory import Worker
    from semblend_trt.prompts import PromptReader

logger = quiet_logger(__name__)

SALT_FIELD = "cache_salt"
WORKER_FIELD, TOKENIZER_FIELD = "semblend_worker_id", "semblend_tokenizer"
# Calls of the proxy whose body has a chat, or else a prompt, as the replica gets it.
_IS_CHAT = {"acompletion": True, "completion": True, "atext_completion": False, "text_completion": False}
# Seconds that a request waits for its prompt to be read, its model's first tokenizer to be loaded among them.
READ_SECONDS = 10.0
# Seconds after which a request counts as computed, for a client that left: no hook tells of it.
LOAD_SECONDS = 60.0
# Longer prompts are not read.
MAX_CHARACTERS = 8 << 20
# Assumed characters of a token that was not read.
_CHARACTERS_PER_TOKEN = 4


@dataclass(slots=True, eq=False)
class _Request:
    """A request on its way through the proxy. A body that the replica gets in another form has no `is_chat`.

    `tried`: the deployments that it was given. `read`: its token ids and the tokenizer's digest, by the latter's
    folder; None for what is not known."""

    body: dict[str, Any]
    is_chat: bool | None
    salt: str | None
    tried: set[str] = field(default_factory=set)
    answered: Callable[[], None] = lambda: None
    read: dict[str, tuple[list[int] | None, str | None]] = field(default_factory=dict)

    @property
    def prompt(self) -> Any:
        return self.body.get("messages") or self.body.get("prompt") or ""

    def tokens(self, reader: PromptReader) -> list[int]:
        return reader.chat(self.body) if self.is_chat else reader.completion(self.body)


# LiteLLM awaits all hooks of a request in one task or in copies of its context.
_current: ContextVar[_Request | None] = ContextVar("semblend_request", default=None)


class SpanPlacement(CustomLogger):  # type: ignore[misc]
    """Makes each tenant's salt and places requests. Raises ConfigurationError for settings that cannot be used."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._placement, self._counters = counted_placement(settings)
        self._loads: Loads[str] = Loads()
        self._tokenizers: dict[str, asyncio.Task[tuple[ReadingThreads, str | None]]] = {}
        self._secret = None if settings.tenant_secret is None else settings.tenant_secret.get_secret_value().encode()
        self._is_started = False
        if self._secret is None:
            logger.warning("SEMBLEND_TENANT_SECRET is not set: all callers share their KV")

    # -- LiteLLM's hooks -------------------------------------------------------------------------------------------

    async def async_pre_call_hook(
        self,
        user_api_key_dict: Any,
        cache: Any,  # noqa: ARG002 - LiteLLM names it
        data: dict[str, Any],
        call_type: str,
    ) -> dict[str, Any]:
        """Remove the client's salt, and keep that of the key's tenant, or in a cold run one of its own."""
        extra = data.get("extra_body")
        for place in (data, extra):
            if isinstance(place, dict) and place.pop(SALT_FIELD, None) is not None:
                self._counters.client_salt()
        body = {**data, **(extra if isinstance(extra, dict) else {})}
        asked = body.get("kv_transfer_params")
        is_cold = isinstance(asked, dict) and bool(asked.get(COLD))
        # A cold run has a salt of its own, so that the engine's prefix cache holds nothing for it either.
        salt = _fresh_salt() if is_cold else self._salt_of(user_api_key_dict)
        _current.set(_Request(body, _IS_CHAT.get(call_type), salt))
        return data

    async def async_filter_deployments(
        self,
        model: str,  # noqa: ARG002
        healthy_deployments: list[dict[str, Any]],
        messages: Any,  # noqa: ARG002 - of a completion they are a chat that no client sent
        request_kwargs: Any = None,  # noqa: ARG002
        parent_otel_span: Any = None,  # noqa: ARG002
    ) -> list[dict[str, Any]]:
        """Return the best deployment alone; all of them where none is a worker of ours, or where placing fails."""
        try:
            request = _current.get()
            if request is not None and any(_worker_of(each) for each in healthy_deployments):
                return await self._placed(request, healthy_deployments)
        except Exception:
            logger.exception("a request could not be placed; LiteLLM's own strategy places it")
            self._counters.placed("failed", 0.0)
        return healthy_deployments

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any] | None:  # noqa: ARG002
        """Give a worker of ours the request's salt; other deployments may refuse the field."""
        request = _current.get()
        # A call of the proxy itself, or of a route that names no key, shares nothing with any tenant.
        salt = request.salt if request is not None else _fresh_salt() if self._secret is not None else None
        if salt is None or _worker_of(kwargs) is None:
            return None
        if "input" in kwargs:  # of a body of /v1/responses LiteLLM sends no field that it does not know
            return {**kwargs, "extra_body": {**(kwargs.get("extra_body") or {}), SALT_FIELD: salt}}
        return {**kwargs, SALT_FIELD: salt}

    async def async_post_call_success_deployment_hook(self, *_: Any, **__: Any) -> None:
        _answered()

    async_post_call_failure_deployment_hook = async_post_call_success_deployment_hook

    async def async_post_call_streaming_iterator_hook(
        self,
        user_api_key_dict: Any,  # noqa: ARG002
        response: AsyncIterator[Any],
        request_data: Any,  # noqa: ARG002
    ) -> AsyncIterator[Any]:
        """Pass a stream on; from its first event on the prompt is computed."""
        async for item in response:
            _answered()
            yield item

    async def _placed(self, request: _Request, deployments: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the best deployment that the request was not given yet: what was tried has failed."""
        by_id = {str(each["model_info"]["id"]): each for each in deployments}
        workers = {name: _worker_of(each) for name, each in by_id.items()}
        for worker, count in Counter(filter(None, workers.values())).items():
            if count > 1:
                logger.error("%d deployments have %s %d; give each replica its own", count, WORKER_FIELD, worker[0])
                workers = {name: None if each == worker else each for name, each in workers.items()}
        left = {name: worker for name, worker in workers.items() if name not in request.tried} or workers
        if not self._is_started:
            self._is_started = True
            await _detached(self._placement.start())
        token_ids, digest = await self._token_ids(request, deployments)
        request.answered()
        best = self._placement.place(token_ids, request.salt, left, self._loads.tokens, tokenizer=digest)[0]
        tokens = len(str(request.prompt)) // _CHARACTERS_PER_TOKEN if token_ids is None else len(token_ids)
        self._counters.sent(tokens, best.held)
        request.answered = self._loads.sent(best.name, max(0, tokens - best.held))
        asyncio.get_running_loop().call_later(LOAD_SECONDS, request.answered, context=Context())
        request.tried.add(best.name)
        return [by_id[best.name]]

    async def _token_ids(
        self, request: _Request, deployments: list[dict[str, Any]]
    ) -> tuple[list[int] | None, str | None]:
        """Return the prompt's token ids by the group's tokenizer, and its digest; None for a prompt that cannot be
        read, or not in time."""
        folder = next(filter(None, (each["model_info"].get(TOKENIZER_FIELD) for each in deployments)), None)
        if folder is None or request.is_chat is None:
            return None, None
        if folder not in request.read:
            request.read[folder] = None, None
            try:
                request.read[folder] = await asyncio.wait_for(self._read(request, str(folder)), READ_SECONDS)
            except (PromptError, ValueError, OverflowError):
                pass  # the replica decides whether the prompt is bad
            except asyncio.TimeoutError:
                logger.warning("a prompt was not read within %g s, and is placed by load", READ_SECONDS)
        return request.read[folder]

    async def _read(self, request: _Request, folder: str) -> tuple[list[int] | None, str | None]:
        if folder not in self._tokenizers:
            made = asyncio.to_thread(lambda: (ReadingThreads(load_tokenizer(folder)), tokenizer_digest(folder)))
            self._tokenizers[folder] = _detached(made)
        threads, digest = await asyncio.shield(self._tokenizers[folder])
        size = len(str(request.prompt))
        token_ids = None if size > MAX_CHARACTERS else await threads.read(size, request.tokens)
        return token_ids, digest

    def _salt_of(self, key: Any) -> str | None:
        """Return the salt of a key's tenant: its team, or the key itself. Under the secret no client can compute it."""
        if self._secret is None:
            return None
        tenant = f"team {key.team_id}" if key.team_id else f"key {key.api_key}"
        return hmac.new(self._secret, b"semblend:cache-salt:v1\0" + tenant.encode(), hashlib.sha256).hexdigest()


def _fresh_salt() -> str:
    return f"once-{secrets.token_hex(16)}"


def _answered() -> None:
    if (request := _current.get()) is not None:
        request.answered()


def _worker_of(deployment: Mapping[str, Any]) -> Worker | None:
    """Return the worker of a deployment or a call; None for one that is no worker of ours."""
    number = (deployment.get("model_info") or {}).get(WORKER_FIELD)
    return (number, 0) if isinstance(number, int) else None


def _detached(work: Any) -> asyncio.Task[Any]:
    """Run `work` without the first request's context, which would live as long."""
    return Context().run(asyncio.get_running_loop().create_task, work)


placement = SpanPlacement(load_settings())
