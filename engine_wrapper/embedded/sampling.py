"""SamplingParams: how one request's tokens are chosen and when it ends. Names are TensorRT-LLM's where it has them."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
