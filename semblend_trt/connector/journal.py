"""The scheduler's audit events, each with the fields that operators of the SemBlend package know."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from semblend_trt.audit import AuditLog

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.layout import KvGeometry
    from semblend_trt.config import Settings
    from semblend_trt.connector.profile_match import ProfileMatch
    from semblend_trt.connector.report import ReuseReport
    from semblend_trt.connector.request_table import TrackedRequest
    from semblend_trt.namespace import CacheNamespace
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.runtime import SavedDonor
    from semblend_trt.semantic.neighbours import Neighbour


class Journal:
    """Writes what was decided for each request to the audit log at `path`; without one, nothing is kept.

    `dropped` counts the lines that are lost, by reason.
    """

    def __init__(self, path: Path | None) -> None:
        self._audit = AuditLog(path)
        self.dropped = self._audit.dropped

    def started(self, settings: Settings, refusal: str | None) -> None:
        self._audit.event("scheduler_initialized", refusal=refusal, settings=settings.model_dump(mode="json"))

    def profile(self, match: ProfileMatch, namespace: CacheNamespace, geometry: KvGeometry) -> None:
        """With what was compared: from another process, a calibration learns the engine's identity by it."""
        self._audit.event(
            "profile_compared",
            namespace=namespace.to_dict(),
            geometry=asdict(geometry),
            policy=None if match.profile is None else match.profile.policy,
            refusal=None if match.profile is not None else match.refusal,
            differences=match.differences,
        )

    def lookup(self, tracked: TrackedRequest) -> None:
        plan = tracked.plan
        self._audit.event(
            "lookup",
            request_id=tracked.request_id,
            found=tracked.runs_found > 0,
            num_computed_tokens=tracked.num_computed_tokens,
            num_new_matched_tokens=tracked.matched_tokens,
            kind=None if plan is None else plan.kind.value,
            reuse_ratio=0.0 if plan is None else round(plan.reused_tokens / plan.prompt_length, 4),
            rejection_reason=tracked.reason,
            diagnostics=None if plan is None else plan.diagnostics,
        )

    def allocated(self, request_id: int, block_count: int) -> None:
        self._audit.event("target_allocated", request_id=request_id, block_count=block_count)

    def dispatched(self, plan: SemanticKvPlan, data: Any) -> None:
        self._audit.event(
            "plan_dispatched",
            request_id=plan.request_id,
            computed_position=data.computed_position,
            num_scheduled_tokens=data.num_scheduled_tokens,
            spans=[[span.donor_id, span.donor_start, span.target_start, span.length] for span in plan.spans],
        )

    def materialized(self, plan: SemanticKvPlan) -> None:
        self._audit.event(
            "materialized",
            request_id=plan.request_id,
            kind=plan.kind.value,
            segment_count=len(plan.spans),
            materialized=plan.reused_tokens * plan.execution.num_layers,
            prefix_token_count=plan.prefix_end,
            computed_token_count=plan.num_computed_tokens,
            requires_rope_correction=any(span.shift for span in plan.spans),
        )

    def settled(self, request_id: int, report: ReuseReport, exact_prefix_tokens: int) -> None:
        self._audit.event(
            "request_settled",
            request_id=request_id,
            outcome=report.outcome,
            reason=report.reason,
            exact_prefix_tokens=exact_prefix_tokens,
            **report.figures,
        )

    def saved(self, donor: SavedDonor) -> None:
        self._audit.event("donor_registered", donor_id=donor.donor_id, token_count=donor.tokens, error=donor.error)

    def neighbours(self, request_id: int, nearest: tuple[Neighbour, ...]) -> None:
        """Told by the neighbours' thread, when it has got to the request."""
        self._audit.event(
            "neighbours",
            request_id=request_id,
            nearest=[[neighbour.donor_id, round(neighbour.similarity, 4)] for neighbour in nearest],
        )

    def close(self) -> None:
        self._audit.close()
