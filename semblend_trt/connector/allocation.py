"""What becomes of a plan once the engine has allocated blocks, and what the workers are told of an iteration."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Any

from semblend_trt.connector.metadata import RequestProgress, SemBlendConnectorMetadata
from semblend_trt.errors import SemBlendError
from semblend_trt.plan import EngineMode, SemanticKvPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from semblend_trt.connector.request_table import TrackedRequest
    from semblend_trt.donors.offload import OffloadCommands

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
        tracked.plan = plan.with_target_blocks(tuple(map(index, block_ids[:needed])))
    except (SemBlendError, TypeError):
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
    return replace(plan, spans=tuple(kept), matched_tokens=matched_tokens)


@dataclass(slots=True)
class Iteration:
    """What the workers are told of the requests that one iteration schedules."""

    plans: list[SemanticKvPlan] = field(default_factory=list)
    followed: list[TrackedRequest] = field(default_factory=list)
    progress: list[RequestProgress] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)

    def add(self, tracked: TrackedRequest, data: Any, *, is_first: bool) -> None:
        """Takes in what the engine says of one request. The plan of one whose `data` cannot be read is taken in as
        well, since its tokens were promised; then raises AttributeError, TypeError or ValueError."""
        unapplied = _unapplied_tokens(tracked, data) if is_first else 0
        if unapplied:
            tracked.plan, tracked.reason = None, "not_honoured"
            tracked.release_leases()
        if is_first and tracked.plan is not None and tracked.matched_tokens:
            self.plans.append(tracked.plan)
        if tracked.intent is not None:
            progress = _progress_of(tracked, data, unapplied, is_first=is_first)
            if progress is None:
                self.grown.append(tracked.request_id)
            else:
                self.progress.append(progress)
            if is_first:
                self.followed.append(tracked)

    def metadata(self, forgotten: Sequence[int], commands: OffloadCommands) -> SemBlendConnectorMetadata:
        """All of it, with what else there is to tell."""
        return SemBlendConnectorMetadata(
            plans=tuple(self.plans),
            intents=tuple(tracked.intent for tracked in self.followed if tracked.intent is not None),
            progress=tuple(self.progress),
            forgotten=tuple(forgotten),
            commands=commands,
            grown=tuple(self.grown),
        )


def savable_tokens(tracked: TrackedRequest, block_ids: Sequence[int], block_size: int) -> int:
    """How much of an ended request its workers can save; `block_ids` are those that the engine names at the end.

    0 for one that ended while it was paused: the blocks that it had are somebody else's. Raises ValueError where the
    engine names others than those that the workers were told of.
    """
    if tracked.intent is None or not tracked.is_followed or len(block_ids) == 0:
        return 0
    tokens = min(tracked.written_tokens, tracked.intent.max_tokens)
    needed = -(-tokens // block_size)
    if len(block_ids) < needed or list(block_ids[:needed]) != tracked.block_ids[:needed]:
        raise ValueError(f"request {tracked.request_id} ends with other blocks than it was scheduled with")
    return tokens


def _unapplied_tokens(tracked: TrackedRequest, data: Any) -> int:
    """The tokens of an offer that the engine asked for and applied nothing of, as main does under V1 with block reuse
    off. It takes them for a load all the same, and so tells a position that lies in front of the computed tokens."""
    offered = tracked.matched_tokens
    is_behind = getattr(data, "computed_position", None) == tracked.num_computed_tokens - offered
    return offered if is_behind else 0


def _progress_of(tracked: TrackedRequest, data: Any, unapplied: int, *, is_first: bool) -> RequestProgress | None:
    """What the request gained, None for the token that a known one gains in most iterations, without a block."""
    position, scheduled = index(data.computed_position) + unapplied, index(data.num_scheduled_tokens)
    if not is_first and position == tracked.written_tokens and scheduled == 1 and len(data.new_block_ids) == 0:
        tracked.written_tokens += 1
        return None
    begin = position
    if is_first and tracked.plan is not None and tracked.matched_tokens:
        # For a synchronous load the position is that of the first token to load, not the one behind the last.
        begin = max(position, tracked.plan.prefix_end)
    before = begin if is_first else tracked.written_tokens
    if begin == before + 1 and scheduled == 1 and before >= len(tracked.prompt):
        # The overlap scheduler tells a position one token late, and catches up where it leaves the request out once.
        before = begin
    # A request goes on where it stood: with its prompt, and behind that with one token at a time.
    most = len(tracked.prompt) if is_first else max(len(tracked.prompt), before + 1)
    written = begin + scheduled
    if min(position, scheduled) < 0 or begin > before or written > most:
        raise ValueError(f"tokens {position}..{written} are scheduled; {before} are written, {most} can be")
    block_ids = tuple(map(index, data.new_block_ids))
    if is_first:
        tracked.block_ids.clear()
    tracked.block_ids.extend(block_ids)
    tracked.written_tokens = written
    return RequestProgress(tracked.request_id, block_ids, written, is_first)


def _taken_tokens(plan: SemanticKvPlan, request: Any, block_ids: Sequence[int]) -> int:
    """How much of the offer the engine took: all of it where it allocated for the whole prompt, as V1 always does.

    V2 allocates chunk by chunk and says what it took. V1's attribute of that name is set on another object.
    """
    if len(block_ids) * plan.block_size >= plan.prompt_length:
        return plan.matched_tokens
    taken = getattr(request, "py_num_connector_matched_tokens", None)
    return plan.matched_tokens if not isinstance(taken, int) else max(0, min(taken, plan.matched_tokens))
