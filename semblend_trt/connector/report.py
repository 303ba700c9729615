"""How one request ended, said in the words of `Outcome` and in tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from semblend_trt.outcome import Outcome
from semblend_trt.plan import PlanKind

if TYPE_CHECKING:
    from semblend_trt.connector.request_table import TrackedRequest
    from semblend_trt.outcome import Settled
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.semantic.neighbours import Neighbour

# Runs were found, but none where it could have helped.
_NOTHING_TO_REUSE = frozenset({"no_donor_match", "short_prompt"})


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """Prompt tokens by what became of them.

    `offered_tokens` were placed from donors; each of them is either reused or recomputed. `checked_tokens` were
    compared with their donor's KV; `largest_kept` is the largest deviation among those that are reused all the same,
    0.0 without one. `computed_holes` are tokens promised to the engine that the wrapper computed, recomputed ones
    among them.

    While a check's result is not known (it has not run yet, or ran on a rank that does not report) `checked_tokens`,
    `recomputed_tokens` and `largest_kept` are None, and only what needs no check counts as reused.

    `nearest` are the held donors whose texts are most like the request's, as far as they are known by now. They are
    found beside serving and have no part in what was reused.
    """

    outcome: str
    reason: str | None
    reused_tokens: int = 0
    computed_holes: int = 0
    offered_tokens: int = 0
    checked_tokens: int | None = 0
    recomputed_tokens: int | None = 0
    largest_kept: float | None = 0.0
    nearest: tuple[Neighbour, ...] = ()

    @classmethod
    def from_settled(cls, settled: Settled) -> ReuseReport:
        return cls(settled.outcome.value, settled.reason, **{name: settled.evidence[name] for name in _FIGURES})

    @property
    def figures(self) -> dict[str, Any]:
        """Everything but outcome, reason and neighbours, by name."""
        return {name: getattr(self, name) for name in _FIGURES}


_FIGURES = tuple(item.name for item in fields(ReuseReport) if item.name not in ("outcome", "reason", "nearest"))


def outcome_of(tracked: TrackedRequest) -> tuple[Outcome, str | None]:
    """The one outcome of a request, with the reason where reuse, or all of it that is not exact, was declined."""
    plan, evidence = tracked.plan, tracked.evidence
    if tracked.forward_failed:
        return Outcome.COLD_FALLBACK if plan is None else Outcome.BACKEND_DECLINED_REUSE, "forward_failed"
    if plan is not None and plan.kind is PlanKind.DISCOVERY_ONLY:
        return Outcome.SEMANTIC_DISCOVERY_ONLY, tracked.reason
    if plan is not None and tracked.load_failed:
        return Outcome.BACKEND_DECLINED_REUSE, "load_failed"
    if plan is not None and evidence is not None and evidence.is_dropped:
        # Exact spans in front of dropped ones stay in use.
        used = evidence.reused_tokens > 0
        return Outcome.BACKEND_MATERIALIZED_REUSE if used else Outcome.BACKEND_DECLINED_REUSE, "deviation"
    if plan is not None:
        return Outcome.BACKEND_MATERIALIZED_REUSE, None
    found = tracked.runs_found > 0 and tracked.reason not in _NOTHING_TO_REUSE
    if found or tracked.reason == "internal_error":
        return Outcome.BACKEND_DECLINED_REUSE, tracked.reason
    if tracked.num_computed_tokens:
        return Outcome.EXACT_PREFIX_ROUTE, tracked.reason
    return Outcome.COLD_FALLBACK, tracked.reason


def report_of(tracked: TrackedRequest) -> ReuseReport:
    """What is known of a request's reuse by now."""
    outcome, reason = outcome_of(tracked)
    plan, evidence = tracked.plan, tracked.evidence
    if plan is None or outcome is Outcome.SEMANTIC_DISCOVERY_ONLY or tracked.forward_failed:
        return ReuseReport(outcome.value, reason)
    if tracked.load_failed:
        return ReuseReport(outcome.value, reason, computed_holes=plan.matched_tokens)
    if not plan.is_checked:
        reused = _without_heads(plan)
        return ReuseReport(
            outcome.value,
            reason,
            reused_tokens=reused,
            computed_holes=plan.matched_tokens - reused,
            offered_tokens=plan.reused_tokens,
            recomputed_tokens=plan.reused_tokens - reused,
        )
    if evidence is None:
        reused = sum(span.length for span in plan.spans if span.exact)
        holes = plan.matched_tokens - reused
        return ReuseReport(outcome.value, reason, reused, holes, plan.reused_tokens, None, None, None)
    return ReuseReport(
        outcome.value,
        reason,
        reused_tokens=evidence.reused_tokens,
        computed_holes=plan.matched_tokens - evidence.reused_tokens,
        offered_tokens=evidence.offered_tokens,
        checked_tokens=evidence.checked_tokens,
        recomputed_tokens=evidence.recomputed_tokens,
        largest_kept=evidence.largest_kept,
    )


def _without_heads(plan: SemanticKvPlan) -> int:
    """Tokens of the plan's spans less those of the heads that are computed in every layer."""
    head = plan.execution.head_tokens
    return sum(span.length if span.exact else max(0, span.length - head) for span in plan.spans)
