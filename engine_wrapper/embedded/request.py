"""Requests: prompts as callers give them, requests as executor and connector see them, and outputs.

Attributes have the names of TensorRT-LLM's LlmRequest, outputs those of its RequestOutput and CompletionOutput.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from numbers import Integral
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast

import numpy as np
import torch

from engine_wrapper.embedded.block_manager import RootKey
from semblend_trt.errors import ConfigurationError
from semblend_trt.outcome import RECEIPT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from engine_wrapper.embedded.sampling import SamplingParams

Prompt = Union[str, "Sequence[int]"]

T = TypeVar("T")


# -- prompts ----------------------------------------------------------------------------------------------------------


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list. A sequence that starts with an integer is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = prompts if isinstance(prompts, list) else list(prompts)
    if not items:
        raise ConfigurationError("the prompt is empty; give text, token ids, or a list with at least one of them")
    if isinstance(items[0], Integral):
        return [cast("Sequence[int]", items)]
    return cast("list[Prompt]", items)


def token_ids_of(prompt: Prompt, tokenizer: Any, vocabulary: int) -> tuple[list[int], npt.NDArray[np.int32]]:
    """Token ids of a prompt, as a new list and as int32 [n]. Raises ConfigurationError for ids outside of
    0..`vocabulary` - 1."""
    listed = list(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    # A tokenizer may begin even an empty text with a token of its own.
    if len(prompt) == 0 or not listed:
        raise ConfigurationError("the prompt is empty; at least one token is needed")
    try:
        # An array of the standard library, or NumPy's own, reads a list three times as slowly.
        tokens = np.frombuffer(struct.pack(f"{len(listed)}q", *listed), dtype=np.int64)
    except struct.error:
        if not all(isinstance(token, Integral) for token in listed):
            raise ConfigurationError("a prompt is text or a sequence of integer token ids, nothing mixed") from None
        raise ConfigurationError(f"the prompt holds a token id beyond the model's ids, 0..{vocabulary - 1}") from None
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        outside = tokens[(tokens < 0) | (tokens >= vocabulary)][0]
        raise ConfigurationError(f"the prompt holds token id {outside}; the model's ids are 0..{vocabulary - 1}")
    # A list holds either NumPy's integers or Python's; a connector is promised Python's.
    return listed if type(listed[0]) is int else tokens.tolist(), tokens.astype(np.int32)


def one_each(name: str, values: Any, number: int, kind: type[T]) -> list[T]:
    """`values`, one of `kind` (or None) for all or a sequence with one each, as a list of `number`."""
    if values is None or isinstance(values, kind):
        return [cast("T", values)] * number
    if not isinstance(values, (list, tuple)) or not all(value is None or isinstance(value, kind) for value in values):
        raise ConfigurationError(f"{name} is {values!r}; give one {kind.__name__}, or a list with one for each prompt")
    if len(values) != number:
        raise ConfigurationError(f"{name} has {len(values)} entries for {number} prompts; give one for each")
    return list(values)


# -- requests ---------------------------------------------------------------------------------------------------------


class LlmRequestState(str, Enum):
    """Upstream's names. A request whose KV is loaded asynchronously "generates elsewhere", one being saved is
    "context in transmission"."""

    QUEUED = "queued"
    CONTEXT_INIT = "context_init"
    DISAGG_GENERATION_TRANS_IN_PROGRESS = "disagg_generation_trans_in_progress"
    GENERATION_IN_PROGRESS = "generation_in_progress"
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = "disagg_context_trans_in_progress"
    GENERATION_COMPLETE = "generation_complete"


class LlmRequest:
    """A prompt, the tokens generated so far, and how far the engine has come with it.

    `context_current_position` is the first prompt token not computed yet. `prepopulated_prompt_len` tokens needed no
    computing at the start: `cached_tokens` from the reuse tree, then `py_num_connector_matched_tokens`.
    `prompt_token_array`: the prompt as int32 [prompt_len]; with it, the given list becomes the request's own.
    `priority`: it waits while a request with a lower number waits or runs. `exact_only`: our connector reuses nothing
    for it that differs from a cold run, so that it becomes a donor. `cold`: it reuses nothing and keeps nothing.
    `pending_token` was sampled and is not handled yet. `reuse_report` is the connector's, for which it was asked in the
    present run if `is_reported`. Times are those of `time.perf_counter`.
    """

    # Attributes that the connector may read and that have one value in this engine.
    multimodal_hashes = None
    kv_cache_retention_config = None
    is_dummy_request = False
    is_context_only_request = False
    sampling_config = SimpleNamespace(beam_width=1)

    state = LlmRequestState.QUEUED
    context_current_position = 0
    context_chunk_size = 0
    chunk_allowance = 0
    prepopulated_prompt_len = 0
    cached_tokens = 0
    py_num_connector_matched_tokens = 0
    is_paused = False
    pending_token: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    first_token_time: float | None = None
    is_reported = False
    reuse_report: Any = None

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        max_new_tokens: int,
        prompt_token_array: npt.NDArray[np.int32] | None = None,
        cache_salt: str | None = None,
        lora_task_id: int | None = None,
        lora_path: str | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        exact_only: bool = False,
        cold: bool = False,
    ) -> None:
        self.request_id = self.py_request_id = self.client_id = request_id
        self.prompt_len = self.py_prompt_len = self.orig_prompt_len = len(prompt_token_ids)
        self.max_new_tokens = max_new_tokens
        self.sampling_params = sampling_params
        self.cache_salt, self.cache_salt_id = cache_salt, _salt_id(cache_salt)
        self.lora_task_id, self.py_lora_path = lora_task_id, lora_path
        self.arrival_time = perf_counter() if arrival_time is None else arrival_time
        self.priority, self.exact_only, self.cold = priority, exact_only, cold
        self.generation_logits: list[torch.Tensor] = []
        if prompt_token_array is None:
            prompt_token_array = np.array(prompt_token_ids, dtype=np.int32)
            prompt_token_ids = prompt_token_array.tolist()
        self.prompt_token_array, self._tokens = prompt_token_array, prompt_token_ids

    def get_tokens(self, beam: int = 0) -> list[int]:  # noqa: ARG002 - upstream's signature; there is one beam
        """Prompt and generated tokens."""
        return list(self._tokens)

    def get_token(self, beam: int, position: int) -> int:  # noqa: ARG002
        return self._tokens[position]

    def get_num_tokens(self, beam: int = 0) -> int:  # noqa: ARG002
        return len(self._tokens)

    def tokens(self, begin: int, end: int) -> list[int]:
        return self._tokens[begin:end]

    @property
    def all_tokens(self) -> Sequence[int]:
        """The list that `get_tokens` copies: do not change or keep it."""
        return self._tokens

    def token_array(self, end: int) -> npt.NDArray[np.int32]:
        """The first `end` tokens, int32 [end]; not a copy as long as they are the prompt's."""
        if end <= self.prompt_len:
            return self.prompt_token_array[:end]
        return np.concatenate([self.prompt_token_array, np.array(self._tokens[self.prompt_len : end], dtype=np.int32)])

    def add_new_token(self, token: int) -> None:
        self._tokens.append(token)

    def is_generation_only_request(self) -> bool:
        """False: a method, as in upstream's Python subclass."""
        return False

    @cached_property
    def generator(self) -> torch.Generator:
        """The request's own random numbers; a greedy request needs none."""
        return self.sampling_params.generator()

    @property
    def root_key(self) -> RootKey:
        return RootKey(self.lora_task_id, self.cache_salt)

    @property
    def generated_token_ids(self) -> list[int]:
        return self._tokens[self.orig_prompt_len :]

    @property
    def num_generated(self) -> int:
        return len(self._tokens) - self.orig_prompt_len

    @property
    def max_total_tokens(self) -> int:
        return self.orig_prompt_len + self.max_new_tokens

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position

    @property
    def chunk_end(self) -> int:
        """Where the chunk that is scheduled ends."""
        return self.context_current_position + self.context_chunk_size

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def is_last_context_chunk(self) -> bool:
        return self.chunk_end == self.prompt_len

    @property
    def is_in_context(self) -> bool:
        return self.state is LlmRequestState.CONTEXT_INIT

    @property
    def num_written_tokens(self) -> int:
        """Leading tokens whose KV is written: never the newest generated one."""
        return self.context_current_position if len(self._tokens) == self.prompt_len else len(self._tokens) - 1

    @property
    def is_finished(self) -> bool:
        """The answer is complete; blocks may still be held for a save."""
        return self.finish_reason is not None

    def complete(self, reason: str) -> None:
        """The request has ended and holds no blocks any more."""
        self.finish_reason, self.state = reason, LlmRequestState.GENERATION_COMPLETE

    def set_prepopulated_prompt_len(self, cached: int, connector_matched: int) -> None:
        """Sets how many leading tokens need not be scheduled: from the reuse tree, then from the connector."""
        self.cached_tokens = cached
        self.py_num_connector_matched_tokens = connector_matched
        self.prepopulated_prompt_len = self.context_current_position = cached + connector_matched

    def next_row(self) -> tuple[int, int]:
        """Position and token of the row that generation computes next."""
        if self.pending_token is not None:
            return len(self._tokens), self.pending_token
        return len(self._tokens) - 1, self._tokens[-1]

    def pause(self) -> None:
        """Its blocks are gone: generated tokens become part of the prompt, which will be computed again."""
        self.prompt_token_array = self.token_array(len(self._tokens))
        self.prompt_len = self.py_prompt_len = len(self._tokens)
        self.context_chunk_size = 0
        self.set_prepopulated_prompt_len(0, 0)
        self.state, self.is_paused, self.is_reported = LlmRequestState.QUEUED, True, False


def _salt_id(cache_salt: str | None) -> int | None:
    if cache_salt is None:
        return None
    digest = hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little")


class BoundRequest:
    """A request as V1's C++ cache manager hands it to the connector's query: another object, with `attributes` only."""

    __slots__ = ("_attributes", "_request")

    def __init__(self, request: LlmRequest, attributes: frozenset[str]) -> None:
        self._request, self._attributes = request, attributes

    @property
    def is_generation_only_request(self) -> bool:
        """A property here, and a method of the Python class."""
        return self._request.is_generation_only_request()

    def __getattr__(self, name: str) -> Any:
        if name not in self._attributes:
            raise AttributeError(f"the bound LlmRequest has no attribute {name}")
        return getattr(self._request, name)


# -- outputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The tokens so far and their text. A token that stops the generation is in `token_ids`, not in `text`.

    `finish_reason`: "stop", "length", "cancelled", "error", or None while tokens are still to come.
    `generation_logits`: float32 [tokens, vocabulary] of a finished request that asked for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    generation_logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's answer, or the part of it that exists so far.

    `cached_tokens` come from the engine's exact prefix cache and `reused_tokens` from the connector;
    `computed_tokens` are the prompt's rows that went through the last layer. Of a request that was paused they tell its
    last run. `reuse_outcome` and `reuse_reason` are what the connector reports, None without a report; `receipt` is
    what it tells whoever asked. `time_to_first_token` is in seconds from submission. `error` says why the finish reason
    is "error".
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int
    reused_tokens: int
    computed_tokens: int
    time_to_first_token: float | None
    finished: bool
    reuse_outcome: str | None = None
    reuse_reason: str | None = None
    receipt: dict[str, Any] | None = None
    error: str | None = None

    @property
    def usage(self) -> dict[str, Any]:
        """The `usage` of the OpenAI API: token counts of prompt and answer, and the connector's receipt."""
        prompt, answer = len(self.prompt_token_ids), len(self.outputs[0].token_ids)
        details = ("cached_tokens", "reused_tokens", "computed_tokens")
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {name: getattr(self, name) for name in details},
            **({} if self.receipt is None else {RECEIPT: self.receipt}),
        }


def output_of(request: LlmRequest, tokenizer: Any, prompt: str | None, num_tokens: int | None = None) -> RequestOutput:
    """The output of `request` after its first `num_tokens` generated tokens; after all of them when None."""
    token_ids = request.generated_token_ids[:num_tokens]
    finished = request.is_finished and len(token_ids) == request.num_generated
    reason = request.finish_reason if finished else None
    shown = token_ids[:-1] if reason == "stop" else token_ids
    text = "" if tokenizer is None else str(tokenizer.decode(shown, skip_special_tokens=True))
    logits = torch.stack(request.generation_logits) if finished and request.generation_logits else None
    report, first = request.reuse_report, request.first_token_time
    # What was promised is used once the connector was asked; one without reports keeps all promises.
    promised = request.py_num_connector_matched_tokens if request.is_reported else 0
    reused = promised if report is None else report.reused_tokens
    cached = getattr(report, "exact_prefix_tokens", request.cached_tokens)
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt,
        prompt_token_ids=request.tokens(0, request.orig_prompt_len),
        outputs=[CompletionOutput(text, token_ids, reason, logits)],
        cached_tokens=cached,
        reused_tokens=reused,
        computed_tokens=request.prompt_len - cached - reused,
        time_to_first_token=None if first is None else first - request.arrival_time,
        finished=finished,
        reuse_outcome=report.outcome if report else None,
        reuse_reason=report.reason if report else None,
        receipt=getattr(report, "receipt", None),
        error=request.error,
    )


@dataclass(slots=True)
class ScheduledBatch:
    """One iteration in the order of its rows: context requests, then generation requests. `admitted` are the context
    requests that entered in this iteration."""

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)
    admitted: list[LlmRequest] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.context_requests) + len(self.generation_requests)

    @property
    def requests(self) -> list[LlmRequest]:
        return [*self.context_requests, *self.generation_requests]

    def remove(self, request: LlmRequest) -> None:
        """Takes the request out of the iteration."""
        for requests in (self.context_requests, self.generation_requests, self.admitted):
            if request in requests:
                requests.remove(request)
