"""Cold runs: requests that are computed a second time without reuse, and how far their answers are from the first.

A distance is the KL divergence of two answers, as far as the likelihoods that servers give prove it. Drift is tested
from such spot checks: whether a reuse profile's promise is kept. The tests are valid whenever they are read."""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections import defaultdict
from math import exp, log, log1p
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from semblend_trt.policy import COLD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    # What one run said: the tokens of each choice, or its text where the answer has no tokens.
    Said = Sequence[Sequence[int] | str]
    # For each token of an answer: its name, and the log-probabilities of the likeliest tokens in its place.
    Likelihoods = list[tuple[str, dict[str, float]]]

logger = logging.getLogger(__name__)

# The most likelihoods for a token that vLLM gives by default.
LIKELIEST = 20
# Answers that may become longer are not judged: each token has some kilobytes of likelihoods.
MAX_TOKENS = 1024
# What all other tokens have together at least: sums of float32 are rounded.
_LEAST = 1e-6
# Highest probability that a test ever calls a promise broken which is kept.
ALPHA = 0.01
# Most tests of one process.
MAX_TESTS = 4096
# Shares of answers over the bound that are bet on, as multiples of the risk.
_MULTIPLES = (1.5, 2.0, 3.0, 6.0)


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
        pairs = [(exp(theirs[each]), exp(ours[each])) for each in theirs.keys() & ours.keys()]
        pairs.append((max(_LEAST, 1 - sum(p for p, _ in pairs)), max(_LEAST, 1 - sum(q for _, q in pairs))))
        total += max(0.0, sum(p * log(p / q) for p, q in pairs if p and q))
        if token != other:
            break
    return total / len(cold)


class RiskTest:
    """A sequential test of "an answer is over its bound with a probability of at most `risk`", 0 < risk < 1.

    `evidence` is the wealth of bets against that (Waudby-Smith and Ramdas, JRSS B 2023, arXiv 2010.09686). While it
    holds, the evidence ever reaches 1 / a with a probability of at most a (Ville's inequality). Each check puts a part
    of what is left into the bets, so that drift is found late as well as early."""

    def __init__(self, risk: float) -> None:
        rates = np.minimum(np.multiply(_MULTIPLES, risk), (1 + risk) / 2)
        self._factors = (1 - rates) / (1 - risk), rates / risk
        self._bets, self._left, self._checks, self.evidence = np.zeros(len(rates)), 1.0, 0, 1.0

    def add(self, *, is_over: bool) -> None:
        """Settle the bets on one answer."""
        self._checks += 1
        left = 1 / (1 + log1p(self._checks))
        self._bets = (self._bets + self._left - left) * self._factors[is_over]
        self._left, self.evidence = left, float(self._bets.mean()) + left


class BoundedAnswer(BaseModel):
    """The part of a receipt that tells which bound covers the answer; `max_kl` is in nats.
    Raises ValidationError where none does: a bound holds for plans whose deviation was sampled."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    profile: str
    max_kl: Annotated[float, Field(gt=0)]
    risk: Annotated[float, Field(gt=0, lt=1)]
    sampled_tokens: Annotated[int, Field(gt=0)]
    namespace: str | None = None


class DriftMonitor:
    """Tests the promise of each tenant's salt, profile, max KL and risk. Thread safe.

    `count` gets the result of each check: within its bound, over it, broken by it, or untested, as one of too many
    tenants. A broken promise stays so until the process ends."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count, self._lock = count, threading.Lock()
        self._tests: dict[tuple[str | None, str, float, float], RiskTest] = {}
        self._broken: defaultdict[str | None, list[str]] = defaultdict(list)

    def broken(self, salt: str | None) -> list[str]:
        """Return the SHA-256 of each profile whose promise to the tenant is broken."""
        return self._broken.get(salt, [])

    def observe(self, salt: str | None, answer: BoundedAnswer, *, is_over: bool) -> str:
        """Add one spot check; return its result. The one that breaks a promise is logged."""
        key, result = (salt, answer.profile, answer.max_kl, answer.risk), "over" if is_over else "within"
        with self._lock:
            if key not in self._tests and len(self._tests) < MAX_TESTS:
                self._tests[key] = RiskTest(answer.risk)
            if (test := self._tests.get(key)) is None:
                result = "untested"
            elif answer.profile not in self._broken[salt]:
                test.add(is_over=is_over)
                if test.evidence >= 1 / ALPHA:
                    self._broken[salt].append(answer.profile)
                    result = "broken"
        self._count(result)
        if result == "broken":
            text = "answers break the promise of reuse profile %s (%g nats, risk %g); calibrate on this traffic"
            logger.error(text, answer.profile, answer.max_kl, answer.risk)
        return result
