"""What becomes of a plan once the engine has allocated blocks, and what the workers are told of an iteration."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from semblend_trt.connector.metadata import RequestProgress
from semblend_trt.errors import SemBlendError
from semblend_trt.plan import EngineMode, SemanticKvPlan

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from semblend_trt.connector.request_table import TrackedRequest

logger = logging.getLogger(__name__)


def settle_allocation(tracked: TrackedRequest, request: Any, block_ids: Sequence[int]) -> None:
    """Fits the request's plan to its blocks.

    Where the engine took less than it was offered, the plan is cut to that. If it does not fit its blocks for another
    reason, the wrapper computes what was promised. A stock engine cannot; the plan then stays without blocks, and the
    load fails alike on every rank.
    """
    plan = tracked.plan
    if plan is None:
        return
    taken = _taken_tokens(plan, request, block_ids)
    if plan.matched_tokens and not taken:
        tracked.plan, tracked.reason = None, "not_honoured"
        tracked.release_leases()
        return
    if taken < plan.matched_tokens:
        plan = tracked.plan = shortened(plan, taken)
    needed = -(-plan.prefix_end // plan.block_size)
    try:
        # Blocks behind the prefix are not written by us; under a sliding window there may be none (-1).
        tracked.plan = plan.with_target_blocks(tuple(block_ids[:needed]))
    except SemBlendError:
        logger.exception("request %d: blocks do not fit its plan", tracked.request_id)
        tracked.load_failed = True
        if plan.execution.mode is EngineMode.WRAPPER:
            tracked.plan = plan.without_spans("target_blocks")


def shortened(plan: SemanticKvPlan, matched_tokens: int) -> SemanticKvPlan:
    """The plan with a promise of `matched_tokens` only, 1 or more: spans behind it are left out or end with it."""
    end = plan.num_computed_tokens + matched_tokens
    kept = [
        span if span.target_end <= end else replace(span, length=end - span.target_start)
        for span in plan.spans
        if span.target_start < end
    ]
    return replace(
        plan,
        spans=tuple(kept),
        matched_tokens=matched_tokens,
        execution=replace(plan.execution, suffix_start=end),
    )


def progress_of(
    tracked: TrackedRequest, data: Any, loading: int, faults: Counter[str], *, is_first: bool
) -> RequestProgress | None:
    """What the workers are told of a scheduled request; None, counted, when `data` cannot be read."""
    try:
        # For a synchronous load `computed_position` points at the first token to load, not behind the last.
        written = int(data.computed_position) + loading + int(data.num_scheduled_tokens)
        progress = RequestProgress(tracked.request_id, tuple(map(int, data.new_block_ids)), written, is_first)
    except (AttributeError, TypeError, ValueError):
        logger.exception("request %d: its schedule cannot be read; it does not become a donor", tracked.request_id)
        faults["request_data"] += 1
        tracked.is_followed = False
        return None
    tracked.written_tokens = written
    return progress


def _taken_tokens(plan: SemanticKvPlan, request: Any, block_ids: Sequence[int]) -> int:
    """How much of the offer the engine took: all of it where it allocated for the whole prompt, as V1 always does.

    V2 allocates chunk by chunk and says what it took. V1's attribute of that name is set on another object.
    """
    if len(block_ids) * plan.block_size >= plan.prompt_length:
        return plan.matched_tokens
    taken = getattr(request, "py_num_connector_matched_tokens", None)
    return plan.matched_tokens if not isinstance(taken, int) else max(0, min(taken, plan.matched_tokens))
