"""What a request gives back, shaped after TensorRT-LLM's RequestOutput and CompletionOutput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from engine_wrapper.embedded.request import LlmRequest


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The tokens so far and their text; the token that stopped the generation is in `token_ids`, not in `text`.

    `finish_reason`: "stop", "length", "cancelled", "error", or None while tokens are still to come.
    `generation_logits`: float32 [tokens, vocabulary] of a finished request that asked for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    generation_logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's answer, or the part of it that there is.

    `cached_tokens` come from the engine's exact prefix cache and `reused_tokens` from the connector; `computed_tokens`
    are the prompt's rows that went through the last layer. `reuse_outcome` and `reuse_reason` are the connector's word
    on it, None where it says nothing. `time_to_first_token` is in seconds from submission. `error` says why the finish
    reason is "error".
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
    error: str | None = None


def output_of(request: LlmRequest, tokenizer: Any, prompt: str | None, num_tokens: int | None = None) -> RequestOutput:
    """The output of `request` after its first `num_tokens` generated tokens; after all of them when None."""
    token_ids = request.generated_token_ids
    finished = request.is_finished and num_tokens in (None, len(token_ids))
    token_ids = token_ids if num_tokens is None else token_ids[:num_tokens]
    reason = request.finish_reason if finished else None
    logits = torch.stack(request.generation_logits) if finished and request.generation_logits else None
    text = _text(tokenizer, token_ids[:-1] if reason == "stop" else token_ids)
    reused, holes = _reuse(request)
    report = request.reuse_report
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt,
        prompt_token_ids=request.tokens(0, request.orig_prompt_len),
        outputs=[CompletionOutput(text, token_ids, reason, logits)],
        cached_tokens=request.cached_tokens,
        reused_tokens=reused,
        computed_tokens=request.prompt_len - request.prepopulated_prompt_len + holes,
        time_to_first_token=(
            None if request.first_token_time is None else request.first_token_time - request.arrival_time
        ),
        finished=finished,
        reuse_outcome=None if report is None else report.outcome,
        reuse_reason=None if report is None else report.reason,
        error=request.error,
    )


def _reuse(request: LlmRequest) -> tuple[int, int]:
    """Tokens that came from donors, and promised tokens that had to be computed after all."""
    report = request.reuse_report
    if report is None:
        return request.py_num_connector_matched_tokens, 0
    return report.reused_tokens, report.computed_holes


def _text(tokenizer: Any, token_ids: list[int]) -> str:
    return "" if tokenizer is None else str(tokenizer.decode(token_ids, skip_special_tokens=True))
