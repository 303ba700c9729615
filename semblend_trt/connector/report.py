"""How one request ended, said in the words of `Outcome` and in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semblend_trt.outcome import Outcome
from semblend_trt.plan import PlanKind

if TYPE_CHECKING:
    from semblend_trt.connector.request_table import TrackedRequest

# Runs were found, but none where it could have helped.
_NOTHING_TO_REUSE = frozenset({"no_donor_match", "short_prompt"})


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """`reused_tokens` came from donors; `computed_holes` are promised tokens that the engine wrapper computed."""

    outcome: str
    reason: str | None
    reused_tokens: int
    computed_holes: int

    @classmethod
    def from_settled(cls, settled: Any) -> ReuseReport:
        evidence = settled.evidence
        return cls(settled.outcome.value, settled.reason, evidence["reused_tokens"], evidence["computed_holes"])


def outcome_of(tracked: TrackedRequest) -> tuple[Outcome, str | None]:
    """The one outcome of a request, with the reason where reuse was declined."""
    plan = tracked.plan
    if plan is not None and plan.kind is PlanKind.DISCOVERY_ONLY:
        return Outcome.SEMANTIC_DISCOVERY_ONLY, tracked.reason
    if plan is not None and tracked.load_failed:
        return Outcome.BACKEND_DECLINED_REUSE, "load_failed"
    if plan is not None:
        return Outcome.BACKEND_MATERIALIZED_REUSE, None
    found = tracked.runs_found > 0 and tracked.reason not in _NOTHING_TO_REUSE
    if found or tracked.reason == "internal_error":
        return Outcome.BACKEND_DECLINED_REUSE, tracked.reason
    if tracked.num_computed_tokens:
        return Outcome.EXACT_PREFIX_ROUTE, tracked.reason
    return Outcome.COLD_FALLBACK, tracked.reason


def report_of(tracked: TrackedRequest) -> ReuseReport:
    outcome, reason = outcome_of(tracked)
    plan = tracked.plan
    if plan is None or outcome is Outcome.SEMANTIC_DISCOVERY_ONLY:
        return ReuseReport(outcome.value, reason, 0, 0)
    reused = 0 if tracked.load_failed else plan.reused_tokens
    return ReuseReport(outcome.value, reason, reused, plan.matched_tokens - reused)
