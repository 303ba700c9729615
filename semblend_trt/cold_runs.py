"""Cold runs: requests that are computed a second time without reuse, and how far their answers are from the first.

A distance is the KL divergence of two answers, as far as the likelihoods that servers give prove it."""

from __future__ import annotations

import json
import secrets
from math import exp, log
from typing import TYPE_CHECKING, Any

from semblend_trt.policy import COLD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    # What one run said: the tokens of each choice, or its text where the answer has no tokens.
    Said = Sequence[Sequence[int] | str]
    # For each token of an answer: its name, and the log-probabilities of the likeliest tokens in its place.
    Likelihoods = list[tuple[str, dict[str, float]]]

# The most likelihoods for a token that vLLM gives by default.
LIKELIEST = 20
# Answers that may become longer are not judged: each token has some kilobytes of likelihoods.
MAX_TOKENS = 1024
# What all other tokens have together at least: sums of float32 are rounded.
_LEAST = 1e-6


def compared(first: Said, cold: Said) -> dict[str, Any]:
    """Return the receipt's `verified`: whether both runs said the same, else where the first other choice differs."""
    what = "text" if any(isinstance(said, str) for said in (*first, *cold)) else "tokens"
    for one, other in zip(first, cold, strict=False):
        if one != other:
            same = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
            return {"result": "differs", "compared": what, "first_difference": next(same, min(len(one), len(other)))}
    if len(first) != len(cold):
        return {"result": "failed", "reason": f"{len(first)} choices, and {len(cold)} of the cold run"}
    return {"result": "equal", "compared": what}


def cold_body(body: Mapping[str, Any]) -> bytes | None:
    """Return the body of a request's cold run, with a salt that no other request has; None where two runs may differ.
    Greedy requests and those with a seed agree. The API's default temperature is 1."""
    if body.get("temperature") != 0 and body.get("top_k") != 1 and body.get("seed") is None:
        return None
    asked = body.get("kv_transfer_params")
    asked = {**(asked if isinstance(asked, dict) else {}), COLD: True}
    return json.dumps({**body, "cache_salt": f"cold-{secrets.token_hex(16)}", "kv_transfer_params": asked}).encode()


def said_in(answer: bytes) -> list[Sequence[int] | str]:
    """Return what each choice of an answer says: its tokens if it has them, else its text.

    Raises ValueError for what is no answer of the OpenAI API."""
    try:
        choices = sorted(json.loads(answer)["choices"], key=lambda choice: choice.get("index", 0))
        return [choice.get("token_ids") or _text_of(choice) for choice in choices]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("this is no answer of the OpenAI API") from None


def _text_of(choice: Mapping[str, Any]) -> str:
    """Return the reasoning, the text and the calls of a choice, without the calls' random ids."""
    said = choice.get("message") or {}
    calls = [call.get("function") or {} for call in said.get("tool_calls") or ()]
    texts = [said.get("reasoning_content") or said.get("reasoning"), choice.get("text") or said.get("content")]
    return "".join(each or "" for each in (*texts, *(call.get(k) for call in calls for k in ("name", "arguments"))))


def likelihood_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that make a server give an answer's likelihoods; none for an answer that is not judged.

    Judged are greedy answers of one choice and a stated length, whose requests ask for no likelihoods themselves."""
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    is_greedy = body.get("temperature") == 0 or body.get("top_k") == 1
    is_short = type(most) is int and most <= MAX_TOKENS and body.get("n", 1) == 1
    is_stated = any(body.get(name) is not None for name in ("logprobs", "top_logprobs", "prompt_logprobs"))
    if is_stated or not (is_greedy and is_short):
        return {}
    form = {"logprobs": True, "top_logprobs": LIKELIEST} if "messages" in body else {"logprobs": LIKELIEST}
    return {**form, "return_tokens_as_token_ids": True}


def likelihoods_in(answer: bytes) -> Likelihoods:
    """Return the likelihoods of an answer of one choice. Raises ValueError if there are none, or no numbers."""
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

    Up to the first other token both runs have the same text before it. Tokens that not both give count as one, which
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
