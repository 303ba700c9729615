"""Requests between look-up and end: their blocks, their plans, and what became of their reuse."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from semblend_trt.connector.metadata import RequestProgress, SemBlendConnectorMetadata
from semblend_trt.errors import SemBlendError
from semblend_trt.outcome import Outcome, ReuseReport
from semblend_trt.plan import EngineMode, PlanKind, SemanticKvPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from semblend_trt.donors.catalog import Lease
    from semblend_trt.donors.offload import OffloadCommands, SaveIntent
    from semblend_trt.plan import CheckEvidence, SemanticKvPlan

logger = logging.getLogger(__name__)

# An engine runs at most a few thousand sequences; older ones ended on an error path that does not report.
MAX_TRACKED_REQUESTS = 4096
# Running requests are scheduled almost every iteration; a cancelled one may just disappear (1.2 and later). A request
# that is given up too early does not become a donor; nothing else is lost.
MAX_SILENT_ITERATIONS = 32


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request between its look-up and its end.

    `reason` says why no KV was placed, or not all that could be. `profile` is the SHA-256 of the reuse profile that
    holds for it. `is_followed`: the workers know of it, and can save it from `block_ids`. `evidence` is what the check
    of its plan found, None until the engine says. `is_scheduled`: it has been in an iteration; until then what it was
    promised is still to be loaded. `forward_failed`: the forward of its last iteration failed.
    """

    request_id: int
    namespace_key: str
    prompt: npt.NDArray[np.int32]
    num_computed_tokens: int
    plan: SemanticKvPlan | None = None
    reason: str | None = None
    profile: str | None = None
    runs_found: int = 0
    leases: list[Lease] = field(default_factory=list)
    intent: SaveIntent | None = None
    is_followed: bool = False
    is_scheduled: bool = False
    load_failed: bool = False
    forward_failed: bool = False
    block_ids: list[int] = field(default_factory=list)
    evidence: CheckEvidence | None = None
    written_tokens: int = 0
    last_heard: int = 0

    @classmethod
    def refused(cls, request_id: int, num_computed_tokens: int, reason: str) -> TrackedRequest:
        """One that takes no part."""
        return cls(request_id, "", np.empty(0, dtype=np.int32), num_computed_tokens, reason=reason)

    @property
    def matched_tokens(self) -> int:
        return self.plan.matched_tokens if self.plan is not None else 0

    @property
    def awaits_load(self) -> bool:
        """True while the engine counts on tokens that are not loaded yet; the request must not be given up."""
        return self.matched_tokens > 0 and not self.is_scheduled

    def release_leases(self) -> None:
        for lease in self.leases:
            lease.release()
        self.leases.clear()


class RequestTable:
    """Requests, the one that was scheduled longest ago first. `add` gives up the first ones to keep within the limit,
    but never one that awaits a load."""

    def __init__(self, limit: int = MAX_TRACKED_REQUESTS) -> None:
        self._limit = limit
        self._requests: OrderedDict[int, TrackedRequest] = OrderedDict()
        self._iteration = 0
        self._loading: list[TrackedRequest] = []
        self._holder_of_block: dict[int, TrackedRequest] = {}

    def add(self, request: TrackedRequest) -> list[TrackedRequest]:
        """Returns, and forgets, the requests that had to make room."""
        request.last_heard = self._iteration
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id)
        surplus = max(0, len(self._requests) - self._limit)
        return self._give_up(islice((each for each in self._requests.values() if not each.awaits_load), surplus))

    def begin_iteration(self, *, last_failed: bool = False) -> list[TrackedRequest]:
        """Releases the leases of the last iteration's loads; returns, and forgets, requests that were silent for too
        long.

        Those loads were queued before the forward that has been issued since. With `last_failed` that forward failed,
        and the requests in it have ended, even if the engine does not say so.
        """
        ended = self._give_up(filter(self.is_running, self._requests.values())) if last_failed else []
        for request in ended:
            request.forward_failed = True
        self._iteration += 1
        for request in self._loading:
            request.release_leases()
        self._loading.clear()
        limit = self._iteration - MAX_SILENT_ITERATIONS
        silent = takewhile(lambda each: each.last_heard < limit, self._requests.values())
        return ended + self._give_up(each for each in silent if not each.awaits_load)

    def scheduled(self, request_id: int, *, loads: bool = False) -> TrackedRequest | None:
        """The request with this id, which runs in this iteration; with `loads` its donors are read in it."""
        request = self._requests.get(request_id)
        if request is not None:
            request.last_heard = self._iteration
            request.is_scheduled = True
            self._requests.move_to_end(request.request_id)
            if loads:
                self._loading.append(request)
        return request

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(self._requests.values())

    def holds(self, request: TrackedRequest, block_ids: Iterable[int]) -> None:
        """Notes that the request has these blocks, its own or shared ones."""
        self._holder_of_block.update(dict.fromkeys(block_ids, request))

    def displaced(self, block_ids: Iterable[int], by: TrackedRequest) -> list[TrackedRequest]:
        """Returns, and forgets, requests that had one of these blocks, which are `by`'s own now: those requests have
        ended."""
        holders = dict.fromkeys(map(self._holder_of_block.get, block_ids))
        return self._give_up(
            each for each in holders if each not in (None, by) and self._requests.get(each.request_id) is each
        )

    def is_running(self, request: TrackedRequest) -> bool:
        """Whether the request is part of the iteration that was begun last."""
        return request.is_scheduled and request.last_heard == self._iteration

    def get(self, request_id: int) -> TrackedRequest | None:
        return self._requests.get(request_id)

    def pop(self, request_id: int) -> TrackedRequest | None:
        return self._requests.pop(request_id, None)

    def pop_oldest(self) -> TrackedRequest:
        """Removes and returns the request not heard of for longest; KeyError when there is none."""
        return self._requests.popitem(last=False)[1]

    def _give_up(self, requests: Iterable[TrackedRequest]) -> list[TrackedRequest]:
        given_up = list(requests)
        for request in given_up:
            del self._requests[request.request_id]
        return given_up

    def __len__(self) -> int:
        return len(self._requests)


def tokens_of(request: Any, count: int) -> npt.NDArray[np.int32]:
    """The first tokens, int32 [count]. The embedded engine has them as an array, which is faster to read than a
    list."""
    held = getattr(request, "token_array", None)
    if callable(held):
        return np.asarray(held(count), dtype=np.int32)
    return np.asarray(request.get_tokens(0), dtype=np.int32)[: max(0, count)]


def fit_to_blocks(tracked: TrackedRequest, request: Any, block_ids: Sequence[int]) -> None:
    """Fits the request's plan to its blocks.

    Where the engine took less than it was offered, the plan is cut to that. Where the plan does not fit its blocks for
    another reason, the wrapper computes what was promised. A stock engine cannot: the plan then stays without blocks,
    and its load fails alike on every rank.
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
        """Adds what the engine says of one request. The plan of a request whose `data` cannot be read is added as well,
        since its tokens were promised; AttributeError, TypeError or ValueError is raised then."""
        unapplied = _unapplied_tokens(tracked, data) if is_first else 0
        if unapplied:
            tracked.plan, tracked.reason = None, "not_honoured"
            tracked.release_leases()
        elif is_first and not tracked.matched_tokens:
            # The engine asks with whole blocks, and may have a part of one more.
            tracked.num_computed_tokens = max(tracked.num_computed_tokens, index(data.computed_position))
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

    def metadata(
        self, forgotten: Sequence[int], commands: OffloadCommands, weights_changes: int
    ) -> SemBlendConnectorMetadata:
        """The iteration's metadata, with the requests to forget and the commands for the tiers."""
        return SemBlendConnectorMetadata(
            plans=tuple(self.plans),
            followed=tuple(tracked.request_id for tracked in self.followed),
            progress=tuple(self.progress),
            forgotten=tuple(forgotten),
            commands=commands,
            grown=tuple(self.grown),
            weights_changes=weights_changes,
        )


def savable_tokens(tracked: TrackedRequest, block_ids: Sequence[int], block_size: int) -> int:
    """The tokens of an ended request that its workers can save; `block_ids` are those that the engine names at the end.

    0 for a request that ended while it was paused: its blocks are another request's. Raises ValueError where the engine
    names other blocks than the workers were told of.
    """
    if tracked.intent is None or not tracked.is_followed or len(block_ids) == 0:
        return 0
    tokens = min(tracked.written_tokens, tracked.intent.max_tokens)
    needed = -(-tokens // block_size)
    if len(block_ids) < needed or list(block_ids[:needed]) != tracked.block_ids[:needed]:
        raise ValueError(f"request {tracked.request_id} ends with other blocks than it was scheduled with")
    return tokens


def donor_generation(tracked: TrackedRequest) -> int | None:
    """The generation of the donor that an ended request leaves; None where it must leave none.

    KV behind moved KV is kept only if the check of its plan has left evidence. A dropped plan's KV was computed anew.
    """
    if tracked.intent is None or not tracked.intent.generation:
        return 0
    if tracked.load_failed or tracked.evidence is None:
        return None
    return 0 if tracked.evidence.is_dropped else tracked.intent.generation


def _unapplied_tokens(tracked: TrackedRequest, data: Any) -> int:
    """The tokens of an offer that the engine asked for and did not apply, as main does under V1 with block reuse off.
    It takes them for a load all the same: its position lies in front of the computed tokens."""
    offered = tracked.matched_tokens
    is_behind = getattr(data, "computed_position", None) == tracked.num_computed_tokens - offered
    return offered if is_behind else 0


def _progress_of(tracked: TrackedRequest, data: Any, unapplied: int, *, is_first: bool) -> RequestProgress | None:
    """The request's progress; None where a known request gains one token and no block, as in most iterations."""
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


# Reasons under which runs that were found could not have helped.
_NOTHING_TO_REUSE = frozenset({"no_donor_match", "short_prompt"})


def outcome_of(tracked: TrackedRequest) -> tuple[Outcome, str | None]:
    """The outcome of a request, with the reason where reuse was declined in full or in part."""
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
        return Outcome.BACKEND_MATERIALIZED_REUSE, tracked.reason
    found = tracked.runs_found > 0 and tracked.reason not in _NOTHING_TO_REUSE
    if found or tracked.reason in ("internal_error", "lookup_timeout", "lookup_bound"):
        return Outcome.BACKEND_DECLINED_REUSE, tracked.reason
    if tracked.num_computed_tokens:
        return Outcome.EXACT_PREFIX_ROUTE, tracked.reason
    return Outcome.COLD_FALLBACK, tracked.reason


def report_of(tracked: TrackedRequest, policy: str | None = None) -> ReuseReport:
    """The report of a request under the engine's `policy`, as far as its reuse is known by now."""
    outcome, reason = outcome_of(tracked)
    report = ReuseReport(
        outcome=outcome.value,
        reason=reason,
        exact_prefix_tokens=tracked.num_computed_tokens,
        policy=policy,
        profile=tracked.profile,
    )
    plan = tracked.plan
    if plan is None or outcome is Outcome.SEMANTIC_DISCOVERY_ONLY or tracked.forward_failed:
        return report
    if not tracked.load_failed:
        report = _with_reuse(report, plan, tracked.evidence)
    return replace(
        report,
        computed_holes=plan.matched_tokens - report.reused_tokens,
        generation=max((span.generation for span in plan.spans), default=0),
    )


def _with_reuse(report: ReuseReport, plan: SemanticKvPlan, evidence: CheckEvidence | None) -> ReuseReport:
    """The report with what became of the plan's spans; None stands for what a check is still to find."""
    offered, exact = plan.reused_tokens, plan.exact_tokens
    report = replace(report, offered_tokens=offered)
    if not plan.is_checked:
        reused = _without_heads(plan)
        report = replace(report, reused_tokens=reused, recomputed_tokens=offered - reused)
    elif evidence is None:
        unknown: dict[str, Any] = dict.fromkeys(
            ("checked_tokens", "sampled_tokens", "recomputed_tokens", "largest_kept")
        )
        report = replace(report, reused_tokens=exact, **unknown)
    else:
        report = replace(
            report,
            reused_tokens=evidence.reused_tokens,
            recomputed_tokens=evidence.recomputed_tokens,
            checked_tokens=evidence.checked_tokens,
            sampled_tokens=evidence.sampled_tokens,
            largest_kept=evidence.largest_kept,
        )
    if offered and plan.execution.recompute_boundary_layer == plan.execution.num_layers:
        # Every layer computes what is not exact.
        report = replace(report, reused_tokens=exact, recomputed_tokens=offered - exact)
    return report


def _without_heads(plan: SemanticKvPlan) -> int:
    """Tokens of the plan's spans without the head tokens, which are computed in every layer."""
    head = plan.execution.head_tokens
    return sum(span.length if span.exact else max(0, span.length - head) for span in plan.spans)
