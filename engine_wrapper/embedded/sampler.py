"""Chooses the next token of one request from its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine_wrapper.embedded.sampling import SamplingParams


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
