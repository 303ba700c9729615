"""The KL divergence of two answers, as far as the likelihoods that replicas tell prove it."""

from __future__ import annotations

import json
from math import exp, log
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    # For each token of an answer: its name, and the log-probabilities of the likeliest tokens in its place.
    Likelihoods = list[tuple[str, dict[str, float]]]

# The most that vLLM tells by default.
LIKELIEST = 20
# Answers that may become longer are not judged: each token tells some kilobytes.
MAX_TOKENS = 1024
# What all other tokens have together at least: sums of float32 are rounded.
_LEAST = 1e-6


def likelihood_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that make a request's answer tell its likelihoods; none where it is not judged.

    Judged are greedy answers of one choice and a stated length that are not streamed and tell none by themselves."""
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    is_greedy = body.get("temperature") == 0 or body.get("top_k") == 1
    is_short = type(most) is int and most <= MAX_TOKENS and body.get("n", 1) == 1 and not body.get("stream")
    is_stated = any(body.get(name) is not None for name in ("logprobs", "top_logprobs", "prompt_logprobs"))
    if is_stated or not (is_greedy and is_short):
        return {}
    form = {"logprobs": True, "top_logprobs": LIKELIEST} if "messages" in body else {"logprobs": LIKELIEST}
    return {**form, "return_tokens_as_token_ids": True}


def likelihoods_in(answer: bytes) -> Likelihoods:
    """Return what an answer of one choice tells. Raises ValueError where it tells nothing, or no numbers."""
    try:
        [choice] = json.loads(answer)["choices"]
        stated = choice["logprobs"]
        if "content" in stated:  # a chat's
            rows = stated["content"]
            found = [(row["token"], {each["token"]: each["logprob"] for each in row["top_logprobs"]}) for row in rows]
        else:
            found = list(zip(stated["tokens"], stated["top_logprobs"], strict=True))
        if found and all(value < 1 for _, likeliest in found for value in likeliest.values()):  # NaN is not
            return found
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        pass
    raise ValueError("the answer tells no likelihoods")


def least_kl(first: Likelihoods, cold: Likelihoods) -> float:
    """Return the mean over the cold run's tokens, in nats, of a lower bound on KL(cold || first).

    Up to the first other token both runs have the same text before it. Tokens that not both tell count as one, which
    adds to no divergence (data processing inequality). What comes after the first other token counts as 0."""
    total = 0.0
    for (token, ours), (other, theirs) in zip(first, cold, strict=False):
        total += _least(theirs, ours)
        if token != other:
            break
    return total / len(cold)


def _least(cold: Mapping[str, float], first: Mapping[str, float]) -> float:
    pairs = [(exp(cold[token]), exp(first[token])) for token in cold.keys() & first.keys()]
    pairs.append((max(_LEAST, 1 - sum(p for p, _ in pairs)), max(_LEAST, 1 - sum(q for _, q in pairs))))
    return max(0.0, sum(p * log(p / q) for p, q in pairs if p and q))
