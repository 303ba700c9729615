"""Observation: what one request's first token took, and what was computed and reused for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semblend_trt.fleet.telemetry import TraceLine


@dataclass(frozen=True, slots=True)
class Observation:
    """`ttft_ms` milliseconds for a prompt of `computed` and `reused` tokens."""

    ttft_ms: float
    computed: int
    reused: int

    @classmethod
    def of(cls, line: TraceLine) -> Observation | None:
        """None where the request does not say enough, failed, or had its first token with its last.

        What was neither computed nor in the exact prefix cache came from donors: the rest of the prompt's tokens, where
        a router wrote down how many the replica counted.
        """
        ttft, computed = line.observed_ttft_ms, line.observed_prefill_tokens
        if (
            not ttft
            or not computed
            or ttft == line.observed_total_latency_ms
            or line.metadata.get("status", 200) != 200
        ):
            return None
        prompt = line.metadata.get("prompt_tokens")
        rest = prompt - computed if isinstance(prompt, int) else 0
        return cls(ttft, computed, max(rest, line.observed_prefix_hit_tokens or 0))
