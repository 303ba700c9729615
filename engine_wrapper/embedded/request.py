"""Prompts and sampling as callers give them, requests as executor and connector see them, and outputs.

Names are those of TensorRT-LLM's SamplingParams, LlmRequest, RequestOutput and CompletionOutput."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from numbers import Integral
from time import perf_counter
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar, Union, cast

import torch

from engine_wrapper.embedded.block_manager import RootKey
from semblend_trt.errors import ConfigurationError
from semblend_trt.outcome import RECEIPT

Prompt = Union[str, "Sequence[int]"]

T = TypeVar("T")


# -- prompts ----------------------------------------------------------------------------------------------------------


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. A sequence that starts with an integer is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = prompts if isinstance(prompts, list) else list(prompts)
    if not items:
        raise ConfigurationError("the prompt is empty; give text, token ids, or a list with at least one of them")
    if isinstance(items[0], Integral):
        return [cast("Sequence[int]", items)]
    return cast("list[Prompt]", items)


def token_ids_of(prompt: Prompt, tokenizer: Any, vocabulary: int) -> list[int]:
    """Return a prompt's token ids. Raises ConfigurationError for ids outside of 0..`vocabulary` - 1."""
    tokens = list(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    # A tokenizer may begin even an empty text with a token of its own.
    if len(prompt) == 0 or not tokens:
        raise ConfigurationError("the prompt is empty; at least one token is needed")
    if not all(isinstance(token, Integral) for token in tokens):
        raise ConfigurationError("a prompt is text or a sequence of integer token ids, nothing mixed")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        outside = next(token for token in tokens if not 0 <= token < vocabulary)
        raise ConfigurationError(f"the prompt holds token id {outside}; the model's ids are 0..{vocabulary - 1}")
    return list(map(int, tokens))


def one_each(name: str, values: Any, number: int, kind: type[T]) -> list[T]:
    """Return a list of `number` values: one of `kind` (or None) for all, or a sequence with one each."""
    if values is None or isinstance(values, kind):
        return [cast("T", values)] * number
    if not isinstance(values, (list, tuple)) or not all(value is None or isinstance(value, kind) for value in values):
        raise ConfigurationError(f"{name} is {values!r}; give one {kind.__name__}, or a list with one for each prompt")
    if len(values) != number:
        raise ConfigurationError(f"{name} has {len(values)} entries for {number} prompts; give one for each")
    return list(values)


# -- sampling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked on construction; ConfigurationError names the field, its value and its bound.

    The engine is greedy. Generation ends at `stop_token_ids`, at the model's end tokens unless `ignore_eos`, or after
    `max_tokens`. `forced_token_ids` replace the model's tokens, and generation ends with the last of them (teacher
    forcing)."""

    max_tokens: int = 32
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    return_generation_logits: bool = False
    forced_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ConfigurationError(f"max_tokens is {self.max_tokens!r}; it must be an integer >= 1")
        for name in ("stop_token_ids", "forced_token_ids"):
            if (ids := getattr(self, name)) is None:
                continue
            if not isinstance(ids, (list, tuple, set, frozenset)):
                raise ConfigurationError(f"{name} is {ids!r}; it must be a list of token ids")
            for token in ids:
                if type(token) is not int or token < 0:
                    raise ConfigurationError(f"{name} holds {token!r}; token ids are integers >= 0")
            object.__setattr__(self, name, tuple(ids))
        if self.forced_token_ids is not None and not 1 <= len(self.forced_token_ids) <= self.max_tokens:
            raise ConfigurationError(
                f"forced_token_ids has {len(self.forced_token_ids)} tokens; it must have 1 to max_tokens "
                f"({self.max_tokens})"
            )


def largest_of(logits: torch.Tensor) -> list[tuple[float, int]]:
    """Return each row's largest logit and the first token that has it; `logits`: [requests, vocabulary].

    One transfer fetches all of them from the device: each transfer may wait for a donor's."""
    best, tokens = logits.max(1)
    return [(value, int(token)) for value, token in torch.stack((best.double(), tokens.double()), 1).tolist()]


# -- requests ---------------------------------------------------------------------------------------------------------


_BOUND_ATTRIBUTES = (
    "request_id get_tokens prompt_len orig_prompt_len max_new_tokens context_current_position lora_task_id "
    "multimodal_hashes sampling_config is_dummy_request cache_salt_id"
)


@dataclass(eq=False, repr=False)
class LlmRequest:
    """A prompt, the tokens generated so far, and the engine's progress with it. Times are of `time.perf_counter`.

    `context_current_position` is the first prompt token not computed yet, at the start that after `cached_tokens` from
    the reuse tree and `py_num_connector_matched_tokens`. A request waits while one with a lower `priority` number waits
    or runs. With `exact_only`, our connector reuses nothing that differs from a cold run, so that the request becomes a
    donor. With `cold`, the request reuses nothing and keeps nothing. The engine has sampled `pending_token`, but not
    handled it. `reuse_report` is the connector's, of the present run."""

    # Attributes that the connector may read and that have one value in this engine.
    multimodal_hashes: ClassVar[None] = None
    is_dummy_request: ClassVar[bool] = False
    sampling_config: ClassVar[Any] = SimpleNamespace(beam_width=1)

    request_id: int
    prompt_token_ids: InitVar[Sequence[int]]
    sampling_params: SamplingParams
    _: KW_ONLY
    max_new_tokens: int
    cache_salt: str | None = None
    lora_task_id: int | None = None
    py_lora_path: str | None = None
    arrival_time: float = field(default_factory=perf_counter)
    priority: int = 0
    exact_only: bool = False
    cold: bool = False
    context_current_position: int = 0
    context_chunk_size: int = 0
    cached_tokens: int = 0
    py_num_connector_matched_tokens: int = 0
    is_paused: bool = False
    pending_token: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    first_token_time: float | None = None
    reuse_report: Any = None
    generation_logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.py_request_id = self.request_id
        self.prompt_len = self.orig_prompt_len = len(prompt_token_ids)
        self.all_tokens = list(prompt_token_ids)
        self.cache_salt_id: int | None = None
        if self.cache_salt is not None:
            digest = hashlib.sha256(self.cache_salt.encode("utf-8", "surrogatepass")).digest()
            self.cache_salt_id = int.from_bytes(digest[:8], "little")

    def get_tokens(self, beam: int = 0) -> list[int]:  # noqa: ARG002 - upstream's signature; there is one beam
        """Return prompt and generated tokens."""
        return list(self.all_tokens)

    def is_generation_only_request(self) -> bool:
        """Return False: a method, as in upstream's Python subclass."""
        return False

    @property
    def root_key(self) -> RootKey:
        return RootKey(self.lora_task_id, self.cache_salt)

    @property
    def num_generated(self) -> int:
        return len(self.all_tokens) - self.orig_prompt_len

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
    def is_in_context(self) -> bool:
        return self.context_remaining_length > 0

    @property
    def is_finished(self) -> bool:
        """The answer is complete; blocks may still be held for a save."""
        return self.finish_reason is not None

    @property
    def was_cut_short(self) -> bool:
        """The request failed or was cancelled."""
        return self.finish_reason in ("error", "cancelled")

    def set_prepopulated_prompt_len(self, cached: int, connector_matched: int) -> None:
        """Set how many leading tokens need not be scheduled: from the reuse tree, then from the connector."""
        self.cached_tokens = cached
        self.py_num_connector_matched_tokens = connector_matched
        self.context_current_position = cached + connector_matched

    def next_row(self) -> tuple[int, int]:
        """Return position and token of the row that generation computes next."""
        if self.pending_token is not None:
            return len(self.all_tokens), self.pending_token
        return len(self.all_tokens) - 1, self.all_tokens[-1]

    def pause(self) -> None:
        """Make generated tokens part of the prompt, which is computed again: the blocks are gone."""
        self.prompt_len = len(self.all_tokens)
        self.context_chunk_size = 0
        self.set_prepopulated_prompt_len(0, 0)
        self.is_paused, self.reuse_report = True, None

    def bound(self) -> SimpleNamespace:
        """Return what V1's C++ manager gives to the connector's query: another object, with what nanobind binds."""
        values = {name: getattr(self, name) for name in _BOUND_ATTRIBUTES.split()}
        # A property there, and a method here.
        return SimpleNamespace(**values | {"is_generation_only_request": self.is_generation_only_request()})


# -- outputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The tokens so far and their text. A token that stops the generation is in `token_ids`, not in `text`.

    `finish_reason`: "stop", "length", "cancelled", "error", or None while tokens are still to come.
    `generation_logits`: float32 [tokens, vocabulary] of a finished request that asked for them."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    generation_logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's answer, or the part of it that exists so far.

    `cached_tokens` come from the engine's prefix cache and `reused_tokens` from the connector. `computed_tokens` are
    the prompt's rows that went through the last layer. Of a paused request, all three count its last run. The connector
    reports `reuse_outcome`, `reuse_reason` and, for the client, `receipt`; they are None without a report.
    `time_to_first_token` is in seconds from submission. `error` says why the finish reason is "error"."""

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
    """Return the output of `request` after its first `num_tokens` generated tokens; after all of them when None."""
    token_ids = request.all_tokens[request.orig_prompt_len :][:num_tokens]
    finished = request.is_finished and len(token_ids) == request.num_generated
    reason = request.finish_reason if finished else None
    shown = token_ids[:-1] if reason == "stop" else token_ids
    text = "" if tokenizer is None else str(tokenizer.decode(shown, skip_special_tokens=True))
    logits = torch.stack(request.generation_logits) if finished and request.generation_logits else None
    report, first = request.reuse_report, request.first_token_time
    reused = 0 if report is None else report.reused_tokens
    cached = getattr(report, "exact_prefix_tokens", request.cached_tokens)
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt,
        prompt_token_ids=request.all_tokens[: request.orig_prompt_len],
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
    """One iteration's requests in the order of its rows."""

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.context_requests) + len(self.generation_requests)

    @property
    def requests(self) -> list[LlmRequest]:
        return [*self.context_requests, *self.generation_requests]

    @property
    def runs_as_decode(self) -> bool:
        """True if no context has more than the last token of its prompt left: the batch then runs as a decode step."""
        return all(each.context_chunk_size == each.context_remaining_length == 1 for each in self.context_requests)

    def remove(self, request: LlmRequest) -> None:
        """Take the request out of the iteration."""
        for requests in (self.context_requests, self.generation_requests):
            if request in requests:
                requests.remove(request)
