"""One request's next token, and whether it was the last."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine_wrapper.embedded.request import LlmRequest
    from engine_wrapper.embedded.sampler import Sampler


def next_token(request: LlmRequest, logits: torch.Tensor, sampler: Sampler) -> int:
    """The token that follows, sampled from `logits` (float32 [vocabulary]) or the next forced one.

    Keeps the logits where the request asks for them. Raises SemBlendError when a token has to be sampled from logits
    that are not finite.
    """
    params = request.sampling_params
    if params.return_generation_logits:
        request.generation_logits.append(logits.clone())
    if params.forced_token_ids is not None:
        return params.forced_token_ids[request.num_generated]
    if params.is_greedy:
        return _greedy(logits)
    _check_finite(float(logits.max()))
    assert request.generator is not None
    return sampler.sample(logits, params, request.generator)


def _greedy(logits: torch.Tensor) -> int:
    """The first token of the largest logit, in one transfer from the device."""
    best, token = logits.max(0)
    value, index = torch.stack((best.double(), token.double())).tolist()
    _check_finite(value)
    return int(index)


def _check_finite(best: float) -> None:
    if not math.isfinite(best):
        raise SemBlendError("the model's logits are not finite")


def finish_reason(request: LlmRequest, token: int, eos_token_ids: Collection[int]) -> str | None:
    """ "stop" or "length" when `token`, the newest one, ends the request, else None. Forced tokens stop nothing."""
    params = request.sampling_params
    if params.forced_token_ids is None:
        if params.stop_token_ids is not None and token in params.stop_token_ids:
            return "stop"
        if not params.ignore_eos and token in eos_token_ids:
            return "stop"
    return "length" if request.num_generated == request.max_new_tokens else None
