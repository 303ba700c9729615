"""CheckEvidence: what the check of one plan found and decided."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckEvidence:
    """Tokens of one plan by what became of them; `offered_tokens`, those of all spans, are either reused or recomputed.

    `checked_tokens` were compared with their donor's KV. `reused_tokens` keep the donor's KV above the check layer;
    exact spans, which need no check, are among them. `largest_kept` is the largest deviation of a checked token that is
    reused, 0.0 without one. `is_dropped` says that the plan would have saved too little and everything was computed.
    """

    request_id: int
    offered_tokens: int
    checked_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    largest_kept: float
    is_dropped: bool
