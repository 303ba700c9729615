"""One request: its prompt, what was answered so far, and the request that continues it elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np

# Dynamo's workers put this before a client's salt, in the engine and so in the donors' namespaces.
SALT_PREFIX = "dynamo-cache-salt:"


class AskedRequest:
    """A request as Dynamo's frontend hands it over, with the tokens that its client has so far."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._stops: dict[str, Any] = request.get("stop_conditions") or {}
        tokens: Any = request["token_ids"]
        # One buffer of little-endian int32 where the frontend has DYN_TOKEN_IDS_AS_BYTES.
        self._prompt = np.frombuffer(tokens, "<i4") if isinstance(tokens, bytes) else np.asarray(tokens, np.int64)
        self._sent: list[int] = []
        self._continued_at = 0
        salt = (request.get("routing") or {}).get("cache_salt")
        self.salt = SALT_PREFIX + salt if salt else None

    @property
    def tokens(self) -> Any:
        """Return the tokens to compute: the prompt and what was answered, integers [n]."""
        return np.concatenate([self._prompt, self._sent]) if self._sent else self._prompt

    @property
    def is_whole(self) -> bool:
        """Return whether all tokens that were asked for are there, so that only the end is missing."""
        most = self._stops.get("max_tokens")
        return self.is_continuable and isinstance(most, int) and 0 < most <= len(self._sent)

    @property
    def is_continuable(self) -> bool:
        """Return whether another worker can go on. After the first token it cannot where an engine's state is in the
        answer: several choices, a grammar, likelihoods of the prompt."""
        sampling, output = self._request.get("sampling_options") or {}, self._request.get("output_options") or {}
        in_engine = (sampling.get("guided_decoding"), output.get("prompt_logprobs"))
        has_state = in_engine != (None, None) or max(sampling.get("n") or 1, sampling.get("best_of") or 1) > 1
        return not (self._sent and has_state)

    def next_request(self) -> dict[str, Any]:
        """Return the request for another worker: at first as it came, then to continue after what was answered."""
        self._continued_at = done = len(self._sent)
        if not done:
            return self._request
        stops = dict(self._stops)
        for bound in ("max_tokens", "min_tokens"):
            if isinstance(stops.get(bound), int):
                stops[bound] = max(0, stops[bound] - done)
        return {**self._request, "token_ids": self.tokens.tolist(), "stop_conditions": stops}

    def take(self, out: dict[str, Any]) -> bool:
        """Note a piece of the answer and correct its usage; return whether it ends a choice."""
        self._sent += out.get("token_ids") or ()
        usage = out.get("completion_usage")
        if self._continued_at and isinstance(usage, dict):
            usage["prompt_tokens"] -= self._continued_at
            usage["completion_tokens"] += self._continued_at
        return out.get("finish_reason") is not None
