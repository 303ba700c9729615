"""How one request's tokens are chosen. Names are TensorRT-LLM's where it has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from semblend_trt.errors import ConfigurationError

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
        for name, value, low, high in (
            ("max_tokens", self.max_tokens, 1, None),
            ("top_k", self.top_k, 0, None),
            ("seed", 0 if self.seed is None else self.seed, 0, _LARGEST_SEED),
        ):
            if not _is_a(int, value) or value < low or (high is not None and value > high):
                bound = f">= {low}" if high is None else f"in {low}..{high}"
                raise ConfigurationError(f"{name} is {value!r}; it must be an integer {bound}")
        if not _is_a((int, float), self.temperature) or not 0.0 <= self.temperature < math.inf:
            raise ConfigurationError(
                f"temperature is {self.temperature!r}; it must be a number >= 0, where 0 is greedy"
            )
        if not _is_a((int, float), self.top_p) or not 0.0 < self.top_p <= 1.0:
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

    def generator(self) -> torch.Generator:
        """The random numbers of one request. They come from the CPU, so that a seed means the same on every device."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def _is_a(kind: type | tuple[type, ...], value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _checked_ids(name: str, ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, (list, tuple, set, frozenset)):
        raise ConfigurationError(f"{name} is {ids!r}; it must be a list of token ids")
    for token in ids:
        if not _is_a(int, token) or token < 0:
            raise ConfigurationError(f"{name} holds {token!r}; token ids are integers >= 0")
    return tuple(ids)


def largest_of(logits: torch.Tensor) -> list[tuple[float, int]]:
    """Of every row of `logits`, [requests, vocabulary], the largest one and the first token that has it.

    One transfer fetches all of them from the device: each transfer may wait behind a donor's.
    """
    best, tokens = logits.max(1)
    return [(value, int(token)) for value, token in torch.stack((best.double(), tokens.double()), 1).tolist()]


def sample(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """The next token by `logits`, [vocabulary]: temperature, then top-k, then top-p (nucleus sampling, Holtzman et al.
    2020).

    Each token takes one uniform number of the request's own generator, so a request's tokens depend on its logits and
    seed alone, never on its neighbours in the batch.
    """
    probabilities, tokens = candidates(logits, params)
    cumulative = probabilities.cumsum(0)
    drawn = torch.rand((), generator=generator, dtype=torch.float64).to(cumulative.device) * cumulative[-1]
    # The first candidate whose cumulative probability is not below the draw: never one of probability 0.
    return int(tokens[torch.searchsorted(cumulative, drawn)])


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
