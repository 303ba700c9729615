"""SamplingParams: how one request's tokens are chosen and when it ends. Names are TensorRT-LLM's where it has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from semblend_trt.errors import ConfigurationError, SemBlendError

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine_wrapper.embedded.request import LlmRequest

_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked on construction; ConfigurationError names the field, its value and its bound.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 leave every token in. `seed` None draws a new one. Generation
    ends at `stop_token_ids`, at the model's end tokens unless `ignore_eos`, or after `max_tokens`. `forced_token_ids`
    are taken in place of sampled tokens, and generation ends with the last of them (teacher forcing).
    """

    max_tokens: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    return_generation_logits: bool = False
    forced_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1)
        _check_integer("top_k", self.top_k, 0)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, _LARGEST_SEED)
        if not _is_number(self.temperature) or not 0.0 <= self.temperature < math.inf:
            raise ConfigurationError(
                f"temperature is {self.temperature!r}; it must be a number >= 0, where 0 is greedy"
            )
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise ConfigurationError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1")
        for name in ("stop_token_ids", "forced_token_ids"):
            ids = getattr(self, name)
            if ids is not None:
                object.__setattr__(self, name, _checked_ids(name, ids))
        if self.forced_token_ids is not None and not 1 <= len(self.forced_token_ids) <= self.max_tokens:
            raise ConfigurationError(
                f"forced_token_ids has {len(self.forced_token_ids)} tokens; it must have 1 to max_tokens "
                f"({self.max_tokens})"
            )

    @property
    def is_greedy(self) -> bool:
        """True when no random number is needed."""
        return self.temperature == 0.0 or self.top_k == 1


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_integer(name: str, value: int, lowest: int, highest: int | None = None) -> None:
    if not _is_integer(value) or value < lowest or (highest is not None and value > highest):
        bound = f">= {lowest}" if highest is None else f"in {lowest}..{highest}"
        raise ConfigurationError(f"{name} is {value!r}; it must be an integer {bound}")


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, (list, tuple, set, frozenset)):
        raise ConfigurationError(f"{name} is {ids!r}; it must be a list of token ids")
    for token in ids:
        if not _is_integer(token) or token < 0:
            raise ConfigurationError(f"{name} holds {token!r}; token ids are integers >= 0")
    return tuple(ids)


class Sampler:
    """Greedy, or temperature, then top-k, then top-p (nucleus sampling, Holtzman et al. 2020).

    One uniform number of the request's own generator is spent per token, so a request's tokens depend on its logits and
    seed alone, never on its neighbours in the batch.
    """

    @staticmethod
    def generator(params: SamplingParams) -> torch.Generator:
        """A generator for one request. It lives on the CPU, so that a seed means the same on every device."""
        generator = torch.Generator()
        if params.seed is None:
            generator.seed()
        else:
            generator.manual_seed(params.seed)
        return generator

    def sample(self, logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
        """`logits`: [vocabulary]; returns the token's id."""
        if params.is_greedy:
            return int(logits.argmax())
        probabilities, tokens = candidates(logits, params)
        reach = probabilities.cumsum(0)
        drawn = torch.rand((), generator=generator, dtype=torch.float64).to(reach.device) * reach[-1]
        # The first candidate whose reach is not below the draw: one of probability 0 is never it.
        return int(tokens[torch.searchsorted(reach, drawn)])


def candidates(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that may be drawn, most probable first, with their probabilities: float64 [n] and int64 [n].

    Top-p keeps the smallest set whose probability reaches it, after top-k; the probabilities sum to 1 before top-p.
    """
    ordered, tokens = logits.float().sort(descending=True, stable=True)
    if params.top_k:
        ordered, tokens = ordered[: params.top_k], tokens[: params.top_k]
    # Differences, in double precision: a tiny temperature must neither overflow nor round to 0.
    probabilities = ((ordered - ordered[0]).double() / params.temperature).softmax(0)
    if params.top_p < 1.0:
        before = probabilities.cumsum(0) - probabilities
        kept = int((before < params.top_p).sum())
        probabilities, tokens = probabilities[:kept], tokens[:kept]
    return probabilities, tokens


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
