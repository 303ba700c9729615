"""LLM: the embedded engine's public face, with the names of TensorRT-LLM's LLM API."""

from __future__ import annotations

import secrets
import time
import weakref
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any

from engine_wrapper.embedded.executor import Executor
from engine_wrapper.embedded.llm_args import KvCacheConfig, KvCacheConnectorConfig, LlmArgs
from engine_wrapper.embedded.model_runner import ModelRunner
from engine_wrapper.embedded.request import (
    CompletionOutput,
    LlmRequest,
    Prompt,
    RequestOutput,
    SamplingParams,
    as_prompts,
    one_each,
    output_of,
    token_ids_of,
)
from semblend_trt.errors import ConfigurationError, SemBlendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = ["LLM", "CompletionOutput", "KvCacheConfig", "KvCacheConnectorConfig", "SamplingParams"]

IDLE_PAUSE = 0.001  # seconds between two looks at transfers when nothing can run


class RequestStream:
    """Iterator over one request's outputs."""

    def __init__(self, llm: LLM, request: LlmRequest, prompt: str | None, streaming: bool) -> None:
        self.request_id = request.request_id
        self._llm, self._request, self._prompt, self._streaming = llm, request, prompt, streaming
        self._given, self._ended = 0, False

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        if self._ended:
            raise StopIteration
        self._llm.run_until(self.has_news)
        self._given += self._has_token()
        given = self._given if self._streaming else None
        output = output_of(self._request, self._llm.tokenizer, self._prompt, given)
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        """End the iteration, and the request if it still runs."""
        self._ended = True
        self._llm.forget(self._request)

    def __del__(self) -> None:
        self.close()

    def has_news(self) -> bool:
        """Return whether the next output can be taken without running an iteration."""
        return self._request.is_finished or self._has_token()

    def _has_token(self) -> bool:
        return self._streaming and self._request.num_generated > self._given


class LLM:
    """One engine and its requests. Takes every field of `LlmArgs` by name.

    Several engines can share the weights of one `runner`, which has loaded `model`. Use it as a context manager, or
    call `shutdown`. `connector_scheduler` and `connector_worker` are the connector's halves, None without a connector.
    Raises ConfigurationError, CapacityError or UnsupportedModelError, each with one sentence."""

    executor_type = Executor

    def __init__(self, model: str | Path, *, runner: ModelRunner | None = None, **fields: Any) -> None:
        asked = LlmArgs(model=model, **fields)  # type: ignore[arg-type]
        if runner is None:
            runner = ModelRunner(asked.model, asked.dtype, asked.device)
        runner.check_source(asked.model)
        # The connector binds KV to these fields, so they name what runs, not "auto" or what was asked for.
        running = {"dtype": str(runner.dtype).removeprefix("torch.")}
        running |= {"load_format": "dummy"} if runner.files is None else {}
        self.llm_args = args = asked.model_copy(update=running)
        self._vocabulary = int(runner.config.vocab_size)
        self.tokenizer = runner.tokenizer
        self.executor = self.executor_type(args, runner)
        self.block_manager = self.executor.block_manager
        self.connector_scheduler: Any = getattr(self.executor.connector, "scheduler", None)
        self.connector_worker: Any = getattr(self.executor.connector, "worker", None)
        self._ids = count(1)
        self._live: dict[int, LlmRequest] = {}
        # When the wait for the connector's transfers ends; None while iterations run.
        self._deadline: float | None = None
        self._finalizer = weakref.finalize(self, self.executor.shutdown)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        lora_request: str | None = None,
    ) -> list[RequestOutput]:
        """Run one prompt (text or token ids) or several together; return one output for each, in their order.

        `sampling_params` and `cache_salt` are one for all or one each. When one prompt is empty or can never fit, no
        prompt is enqueued. A request that fails has finish reason "error" and says why in `error`."""
        texts = as_prompts(prompts)
        params = one_each("sampling_params", sampling_params or SamplingParams(), len(texts), SamplingParams)
        salts = one_each("cache_salt", cache_salt, len(texts), str)
        given = zip(texts, params, salts, strict=True)
        requests = [self._request(prompt, param, salt, lora_request) for prompt, param, salt in given]
        return [next(stream) for stream in self._streams(requests, texts, streaming=False)]

    def generate_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        streaming: bool = True,
        cache_salt: str | None = None,
        lora_request: str | None = None,
        *,
        priority: int = 0,
        exact_only: bool = False,
        cold: bool = False,
    ) -> RequestStream:
        """Enqueue a prompt and return an iterator over its partial outputs, one for every new token.

        Without `streaming` the iterator gives the final output only. Taking an output runs all requests, not only this
        one. Closing or dropping the iterator aborts its request. The request waits while one with a lower `priority`
        waits or runs. With `exact_only` it reuses nothing that differs from a cold run's KV. With `cold` it reuses
        nothing at all, under a salt of its own, so that no other request reuses anything of it."""
        (salt,) = one_each("cache_salt", cache_salt, 1, str)
        if cold:
            salt = f"cold-{secrets.token_hex(8)}"
        params = sampling_params or SamplingParams()
        options = {"priority": priority, "exact_only": exact_only, "cold": cold}
        request = self._request(prompt, params, salt, lora_request, **options)
        return self._streams([request], [prompt], streaming)[0]

    def abort(self, request_id: int) -> bool:
        """End a request with finish reason "cancelled"; False when it is unknown or has finished."""
        request = self._live.get(request_id)
        return request is not None and self.executor.abort(request)

    def reset_prefix_cache(self) -> bool:
        """Forget all exact prefixes, as after weights were written. Returns False while a request reads one."""
        return self.block_manager.reset_reuse_state()

    def settle(self) -> None:
        """Wait until the connector has ended every transfer: what was served is then a donor. Raises as `advance`."""
        self.executor.poll_transfers()
        while self.executor.pending_transfers:
            self.advance()

    def shutdown(self) -> None:
        """Abort what is running and close the connector; the engine takes no more requests."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _request(
        self, prompt: Prompt, params: SamplingParams, cache_salt: str | None, lora_request: str | None, **options: Any
    ) -> LlmRequest:
        arrival_time = perf_counter()
        forced, vocabulary = params.forced_token_ids, self._vocabulary
        if forced is not None and max(forced) >= vocabulary:
            raise ConfigurationError(
                f"forced_token_ids holds {max(forced)}; the model's token ids end at {vocabulary - 1}"
            )
        token_ids = token_ids_of(prompt, self.tokenizer, vocabulary)
        adapters = self.llm_args.lora_config or {}
        if lora_request is not None and (not isinstance(lora_request, str) or lora_request not in adapters):
            names = ", ".join(adapters) or "no adapter"
            raise ConfigurationError(f"lora_request {lora_request!r} is not in lora_config, which names {names}")
        return LlmRequest(
            next(self._ids),
            token_ids,
            params,
            max_new_tokens=params.max_tokens if forced is None else len(forced),
            cache_salt=cache_salt,
            lora_task_id=None if lora_request is None else adapters[lora_request],
            py_lora_path=lora_request,
            arrival_time=arrival_time,
            **options,
        )

    def _streams(self, requests: list[LlmRequest], prompts: list[Prompt], streaming: bool) -> list[RequestStream]:
        self.executor.enqueue(requests)
        self._deadline = None
        self._live.update((request.request_id, request) for request in requests)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        return [RequestStream(self, request, text, streaming) for request, text in zip(requests, texts, strict=True)]

    def forget(self, request: LlmRequest) -> None:
        """Drop a request for good; end it if it still runs."""
        if self._live.pop(request.request_id, None) is not None:
            self.executor.abort(request)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run iterations until `done`; wait for the connector when no request can run."""
        while not done():
            self.advance()

    def advance(self) -> None:
        """Run one iteration. When no request can run, wait a moment for the connector.

        Raises SemBlendError, naming the requests, when that has lasted for `transfer_timeout` seconds."""
        if self.executor.step():
            self._deadline = None
        else:
            self._deadline = self._deadline or time.monotonic() + self.llm_args.transfer_timeout
            if time.monotonic() > self._deadline:
                pending = ", ".join(map(str, self.executor.pending_transfers))
                raise SemBlendError(
                    f"the connector has not ended the transfers of requests {pending or 'none'} within "
                    f"{self.llm_args.transfer_timeout} seconds (transfer_timeout); see what its get_finished waits for"
                )
            time.sleep(IDLE_PAUSE)
