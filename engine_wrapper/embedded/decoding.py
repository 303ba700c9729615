"""One request's next token, and whether it was the last."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine_wrapper.embedded.request import LlmRequest
    from engine_wrapper.embedded.sampler import Sampler


class BatchLogits:
    """The logits of one iteration, float32 [requests, vocabulary].

    The largest of every row are fetched from the device at once: each transfer may wait behind a donor's.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def row(self, row: int) -> torch.Tensor:
        """float32 [vocabulary]."""
        return self._logits[row]

    def largest(self, row: int) -> tuple[float, int]:
        """The largest logit of a row, and the first token that has it."""
        value, token = self._largest[row]
        return value, int(token)

    @cached_property
    def _largest(self) -> list[list[float]]:
        best, tokens = self._logits.max(1)
        found: list[list[float]] = torch.stack((best.double(), tokens.double()), 1).tolist()
        return found


def next_token(request: LlmRequest, logits: BatchLogits, row: int, sampler: Sampler) -> int:
    """The token that follows, sampled from the request's row of `logits`, or the next forced one.

    Keeps the row where the request asks for it. Raises SemBlendError when a token has to be sampled from logits that
    are not finite.
    """
    params = request.sampling_params
    if params.return_generation_logits:
        request.generation_logits.append(logits.row(row).clone())
    if params.forced_token_ids is not None:
        return params.forced_token_ids[request.num_generated]
    best, token = logits.largest(row)
    _check_finite(best)
    if params.is_greedy:
        return token
    assert request.generator is not None
    return sampler.sample(logits.row(row), params, request.generator)


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
