"""Requests from look-up to end: their adapters, blocks and plans, each rank's metadata, and what reuse came to."""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from semblend_trt import __version__
from semblend_trt.donors.offload import OffloadCommands
from semblend_trt.errors import ConfigurationError, DonorUnavailableError, SemBlendError
from semblend_trt.model_files import DigestCache, FileState, adapter_files, digest_of_files
from semblend_trt.namespace import content_value, unknown_value
from semblend_trt.outcome import Outcome, ReuseReport
from semblend_trt.plan import EngineMode, PlanKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from semblend_trt.connector.engine_spec import EngineRequest
    from semblend_trt.donors.catalog import Lease
    from semblend_trt.donors.offload import SaveIntent
    from semblend_trt.plan import CheckEvidence, SemanticKvPlan
    from semblend_trt.pool_facts import PoolFacts
    from semblend_trt.reuse_profile import ProfileBound
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)

# An engine runs at most a few thousand sequences; older ones ended on an error path that does not report.
MAX_TRACKED_REQUESTS = 4096
# Requests run in most iterations; a cancelled one may vanish (1.2 and later). Giving up too early only costs a donor.
MAX_SILENT_ITERATIONS = 32
# Reasons under which runs that were found could not have helped.
_NOTHING_TO_REUSE = frozenset({"no_donor_match", "short_prompt"})
# What a report says of a check that is still to run.
_CHECKED = ("checked_tokens", "sampled_tokens", "recomputed_tokens", "largest_kept", "sampled_deviation")
_UNCHECKED: dict[str, Any] = dict.fromkeys(_CHECKED)
_OF_CHECKS = ("reused_tokens", *_CHECKED)
# An engine holds far fewer; requests may name any number.
_MAX_ADAPTERS = 4096


class Adapters:
    """The adapters of an engine. Those in `folders` are read at once; later ones get an unknown identity."""

    def __init__(self, folders: Sequence[str], cache_path: Path | None = None) -> None:
        cache = DigestCache.from_setting(cache_path)
        self._read = {_place(folder): _identity_of(folder, cache) for folder in folders}
        self._of_task: dict[int, tuple[str | None, str, tuple[FileState, ...]]] = {}

    @property
    def identities(self) -> list[str]:
        """Those of the adapters at the start: their embeddings may replace the base model's."""
        return [identity for identity, _ in self._read.values()]

    def of(self, request: EngineRequest) -> str | None:
        """Return the identity of the request's adapter; None for the base model.

        The engine keeps the first adapter of a task id, but may read it again. If its place or its files have changed
        since, it matches nothing."""
        if request.adapter_identity is not None:
            return request.adapter_identity
        task, path = request.lora_task, request.lora_path
        if task is None:
            return None
        states: tuple[FileState, ...] = ()
        if path is not None:
            with suppress(OSError, ConfigurationError):  # what cannot be read has none
                states = _states(path)
        if task not in self._of_task:
            if len(self._of_task) >= _MAX_ADAPTERS:
                return unknown_value()
            # The engine reads the files about now: they must be those that were read at the start.
            identity, read = self._read.get("" if path is None else _place(path), ("", None))
            self._of_task[task] = (path, identity if states and states == read else unknown_value(), states)
        seen, identity, known = self._of_task[task]
        return identity if path == seen and states == known else unknown_value()


def _place(path: str | Path) -> str:
    return str(Path(path).absolute())


def _states(path: str) -> tuple[FileState, ...]:
    return tuple(map(FileState.of, adapter_files(Path(path)).values()))


def _identity_of(path: str, cache: DigestCache | None) -> tuple[str, tuple[FileState, ...]]:
    """Return an adapter's identity, and the states of its files when it was read."""
    try:
        states = _states(path)
        return content_value(digest_of_files(adapter_files(Path(path)), cache)), states
    except (OSError, ConfigurationError) as error:
        logger.warning("adapter %s cannot be read, and its KV is shared with no other engine: %s", path, error)
        return unknown_value(), ()


class RequestProgress(NamedTuple):
    """A request's new blocks, and its tokens with KV after this iteration's forward.

    A tuple, because an iteration may have many, and Python pickles a dataclass many times slower."""

    request_id: int
    new_block_ids: tuple[int, ...]
    written_tokens: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class SemBlendConnectorMetadata:
    """What rank 0 sends to every rank in each iteration. Picklable; an empty one does nothing.

    `followed` requests may become donors. `grown` ones gained one token and no block, as most do in most iterations.
    Plans belong to the weights after `weights_changes` changes."""

    plans: tuple[SemanticKvPlan, ...] = ()
    followed: tuple[int, ...] = ()
    progress: tuple[RequestProgress, ...] = ()
    forgotten: tuple[int, ...] = ()
    commands: OffloadCommands = field(default_factory=OffloadCommands)
    grown: tuple[int, ...] = ()
    weights_changes: int = 0
    version: str = __version__


def readable_metadata(bound: object, runtime: Runtime) -> SemBlendConnectorMetadata | None:
    """Return `bound` as metadata; None if nothing of this version is bound.

    Another version's counts as the fault `metadata`, and ends reuse: two versions would decide differently. Raises
    DonorUnavailableError if it holds plans, because no rank would place their tokens."""
    version = getattr(bound, "version", "unknown")
    if bound is None or (isinstance(bound, SemBlendConnectorMetadata) and version == __version__):
        return bound
    text = "KV reuse is off from now on: the bound metadata is not of a scheduler of version %s (a %s of version %s)"
    logger.error(text + "; use one on every rank", __version__, type(bound).__name__, version)
    runtime.faults["metadata"] += 1
    runtime.refusal = runtime.refusal or "metadata_version"
    if getattr(bound, "plans", ()):
        raise DonorUnavailableError("this iteration's plans are of another version; use one version of the connector")
    return None


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request between its look-up and its end.

    `reason`: why no KV was placed, or not all. `profile`: SHA-256 of its reuse profile; `bound`: the profile's, if any.
    `is_followed`: the workers can save it from `block_ids`. `is_scheduled`: before that its matched tokens are still to
    be loaded. `evidence`: None until the engine reports the check of the plan."""

    request_id: int
    namespace_key: str
    prompt: npt.NDArray[np.int32]
    num_computed_tokens: int
    plan: SemanticKvPlan | None = None
    reason: str | None = None
    profile: str | None = None
    bound: ProfileBound | None = None
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
        """Return a request that takes no part."""
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

    def not_honoured(self) -> None:
        """Drop the plan, which the engine did not take."""
        self.plan, self.reason = None, "not_honoured"
        self.release_leases()


class RequestTable(OrderedDict[int, TrackedRequest]):
    """Requests by id, the one scheduled longest ago first. At the limit `add` gives up the first that await no load."""

    def __init__(self, limit: int = MAX_TRACKED_REQUESTS) -> None:
        super().__init__()
        self._limit = limit
        self._iteration = 0
        self._loading: list[TrackedRequest] = []
        self._holder_of_block: dict[int, TrackedRequest] = {}

    def add(self, request: TrackedRequest) -> list[TrackedRequest]:
        """Add a request; return, and forget, those that had to make room."""
        request.last_heard = self._iteration
        self[request.request_id] = request
        self.move_to_end(request.request_id)
        surplus = max(0, len(self) - self._limit)
        return self._give_up(islice((each for each in self.values() if not each.awaits_load), surplus))

    def begin_iteration(self, *, last_failed: bool = False, drops: bool = False) -> list[TrackedRequest]:
        """Release the leases of the last iteration's loads. Return, and forget, requests that were silent for too long.

        The engine issued a forward after those loads. If it `last_failed`, its requests have ended, reported or not. An
        engine that `drops` batches before their forwards may also schedule them again: they are not given up yet."""
        failed = list(filter(self.is_running, self.values())) if last_failed else []
        for request in failed:
            request.forward_failed = True
        ended = [] if drops else self._give_up(failed)
        self._iteration += 1
        for request in self._loading:
            request.release_leases()
        self._loading.clear()
        limit = self._iteration - MAX_SILENT_ITERATIONS
        silent = takewhile(lambda each: each.last_heard < limit, self.values())
        return ended + self._give_up(each for each in silent if not each.awaits_load)

    def scheduled(self, request_id: int, *, loads: bool = False) -> TrackedRequest | None:
        """Return the request, which runs in this iteration; with `loads` its donors are read in it."""
        if (request := self.get(request_id)) is not None:
            request.last_heard = self._iteration
            request.is_scheduled, request.forward_failed = True, False
            self.move_to_end(request.request_id)
            if loads:
                self._loading.append(request)
        return request

    def holds(self, request: TrackedRequest, block_ids: Iterable[int]) -> None:
        """Note that the request has these blocks, its own or shared ones."""
        self._holder_of_block.update(dict.fromkeys(block_ids, request))

    def displaced(self, block_ids: Iterable[int], by: TrackedRequest) -> list[TrackedRequest]:
        """Return, and forget, requests that had one of these blocks, which are now `by`'s own: they have ended."""
        holders = dict.fromkeys(map(self._holder_of_block.get, block_ids))
        return self._give_up(each for each in holders if each not in (None, by) and self.get(each.request_id) is each)

    def is_running(self, request: TrackedRequest) -> bool:
        """Return True if the request is part of the iteration that began last."""
        return request.is_scheduled and request.last_heard == self._iteration

    def _give_up(self, requests: Iterable[TrackedRequest]) -> list[TrackedRequest]:
        given_up = list(requests)
        for request in given_up:
            del self[request.request_id]
        return given_up


def fit_to_blocks(tracked: TrackedRequest, request: EngineRequest, block_ids: Sequence[int]) -> None:
    """Cut the request's plan to what the engine took, and give it its blocks.

    If the blocks do not fit the plan, the wrapper computes the matched tokens. A stock engine cannot: its plan stays
    without blocks, and its load fails alike on every rank."""
    if (plan := tracked.plan) is None:
        return
    taken = plan.matched_tokens
    if len(block_ids) * plan.block_size < plan.prompt_length:
        said = request.taken_tokens
        taken = taken if said is None else max(0, min(said, taken))
    if plan.matched_tokens and not taken:
        tracked.not_honoured()
        return
    if taken < plan.matched_tokens:
        end = plan.num_computed_tokens + taken
        kept = [span for span in plan.spans if span.target_start < end]
        cut = (replace(each, length=min(each.length, end - each.target_start)) for each in kept)
        plan = tracked.plan = replace(plan, spans=tuple(cut), matched_tokens=taken)
    needed = -(-plan.prefix_end // plan.block_size)
    try:
        # The loader writes no block after the prefix; under a sliding window there may be none (-1).
        tracked.plan = plan.with_target_blocks(tuple(map(index, block_ids[:needed])))
    except (SemBlendError, TypeError):
        logger.exception("request %d: blocks do not fit its plan", tracked.request_id)
        tracked.load_failed = True
        if plan.execution.mode is EngineMode.WRAPPER:
            tracked.plan = plan.without_spans("target_blocks")


@dataclass(slots=True)
class Iteration:
    """What the metadata says of the requests that one iteration schedules."""

    plans: list[SemanticKvPlan] = field(default_factory=list)
    followed: list[TrackedRequest] = field(default_factory=list)
    progress: list[RequestProgress] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)

    def add(self, tracked: TrackedRequest, data: Any, *, is_first: bool) -> None:
        """Add what the engine says of one request. Raises AttributeError, TypeError or ValueError for unreadable
        `data`, after adding the plan, on which the engine counts."""
        offered, unapplied = tracked.matched_tokens, 0
        if is_first and getattr(data, "computed_position", None) == tracked.num_computed_tokens - offered:
            # Under V1 without block reuse main does not apply the offer, and its position is before the offered tokens.
            unapplied = offered
        if unapplied:
            tracked.not_honoured()
        elif is_first and not offered:
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


def _progress_of(tracked: TrackedRequest, data: Any, unapplied: int, *, is_first: bool) -> RequestProgress | None:
    """Return the request's progress; None if a known request gains one token and no block, as in most iterations."""
    position, scheduled = index(data.computed_position) + unapplied, index(data.num_scheduled_tokens)
    if not is_first and position == tracked.written_tokens and scheduled == 1 and len(data.new_block_ids) == 0:
        tracked.written_tokens += 1
        return None
    begin = position
    if is_first and tracked.plan is not None and tracked.matched_tokens:
        # For a synchronous load the position is that of the first token to load, not the one after the last.
        begin = max(position, tracked.plan.prefix_end)
    before = begin if is_first else tracked.written_tokens
    if begin == before + 1 and scheduled == 1 and before >= len(tracked.prompt):
        # The overlap scheduler's position is one token late, and catches up if it leaves the request out once.
        before = begin
    # A request continues where it was: with its prompt, and after that with one token at a time, or accepted drafts.
    most = len(tracked.prompt) if is_first else max(len(tracked.prompt), before + getattr(data, "grows_by", 1))
    written = begin + scheduled
    if min(position, scheduled) < 0 or begin > before or written > most:
        raise ValueError(f"tokens {position}..{written} are scheduled; {before} are written, {most} can be")
    block_ids = tuple(map(index, data.new_block_ids))
    if is_first:
        tracked.block_ids.clear()
    tracked.block_ids.extend(block_ids)
    tracked.written_tokens = written
    return RequestProgress(tracked.request_id, block_ids, written, is_first)


def savable_tokens(tracked: TrackedRequest, block_ids: Sequence[int], pool: PoolFacts) -> int:
    """Return how many tokens of an ended request the workers can save; `block_ids` are the engine's at its end.

    If the engine exchanges blocks, the request then has these. A request that ended while paused gives 0: its blocks
    are another request's. Raises ValueError for other blocks than the workers know."""
    if tracked.intent is None or not tracked.is_followed or len(block_ids) == 0:
        return 0
    tokens = min(tracked.written_tokens, tracked.intent.max_tokens)
    needed = pool.geometry.blocks_for(tokens)
    final = list(block_ids[:needed])
    if len(final) < needed or (final != tracked.block_ids[:needed] and not pool.exchanges_blocks):
        raise ValueError(f"request {tracked.request_id} ends with other blocks than it was scheduled with")
    if final != tracked.block_ids[:needed]:
        tracked.block_ids = list(map(index, final))
        tracked.intent = replace(tracked.intent, block_ids=tuple(tracked.block_ids))
    return tokens


def donor_generation(tracked: TrackedRequest) -> int | None:
    """Return the generation of the donor that an ended request leaves; None if it must leave none.

    KV after moved KV is kept only with evidence of the plan's check. A dropped plan's KV was computed again."""
    if tracked.intent is None or not tracked.intent.generation:
        return 0
    if tracked.load_failed or tracked.evidence is None:
        return None
    return 0 if tracked.evidence.is_dropped else tracked.intent.generation


def outcome_of(tracked: TrackedRequest) -> tuple[Outcome, str | None]:
    """Return a request's outcome, with the reason if reuse was declined in full or in part."""
    plan, evidence = tracked.plan, tracked.evidence
    if tracked.forward_failed:
        return Outcome.COLD_FALLBACK if plan is None else Outcome.BACKEND_DECLINED_REUSE, "forward_failed"
    if plan is not None:
        if plan.kind is PlanKind.DISCOVERY_ONLY:
            return Outcome.SEMANTIC_DISCOVERY_ONLY, tracked.reason
        if tracked.load_failed:
            return Outcome.BACKEND_DECLINED_REUSE, "load_failed"
        if evidence is None or not evidence.is_dropped:
            return Outcome.BACKEND_MATERIALIZED_REUSE, tracked.reason
        # Exact spans before dropped ones stay in use.
        used = evidence.reused_tokens > 0
        reason = "risk_above_bound" if evidence.exceeds_levels else "deviation"
        return Outcome.BACKEND_MATERIALIZED_REUSE if used else Outcome.BACKEND_DECLINED_REUSE, reason
    found = tracked.runs_found > 0 and tracked.reason not in _NOTHING_TO_REUSE
    if found or tracked.reason in ("internal_error", "lookup_timeout", "lookup_bound"):
        return Outcome.BACKEND_DECLINED_REUSE, tracked.reason
    return Outcome.EXACT_PREFIX_ROUTE if tracked.num_computed_tokens else Outcome.COLD_FALLBACK, tracked.reason


def report_of(tracked: TrackedRequest, policy: str | None = None) -> ReuseReport:
    """Return the report of a request under the engine's `policy`, as far as its reuse is known by now."""
    outcome, reason = outcome_of(tracked)
    plan, bound = tracked.plan, tracked.bound
    report = ReuseReport(
        outcome=outcome.value,
        reason=reason,
        exact_prefix_tokens=tracked.num_computed_tokens,
        policy=policy,
        profile=tracked.profile,
        namespace=tracked.namespace_key,
        max_kl=None if bound is None else bound.max_kl,
        risk=None if bound is None else bound.risk,
    )
    if plan is None or outcome is Outcome.SEMANTIC_DISCOVERY_ONLY or tracked.forward_failed:
        return report
    generation = max((span.generation for span in plan.spans), default=0)
    if tracked.load_failed:
        return replace(report, computed_holes=plan.matched_tokens, generation=generation)
    evidence = tracked.evidence
    offered, exact, head = plan.reused_tokens, plan.exact_tokens, plan.execution.head_tokens
    found: dict[str, Any] = {"offered_tokens": offered, "reused_tokens": exact}
    if plan.is_checked:
        found |= _UNCHECKED if evidence is None else {each: getattr(evidence, each) for each in _OF_CHECKS}
    else:
        # Every layer computes the head tokens.
        reused = sum(span.length if span.exact else max(0, span.length - head) for span in plan.spans)
        found |= {"reused_tokens": reused, "recomputed_tokens": offered - reused}
    if offered and plan.execution.recompute_boundary_layer == plan.execution.num_layers:
        # Every layer computes what is not exact.
        found |= {"reused_tokens": exact, "recomputed_tokens": offered - exact}
    return replace(report, computed_holes=plan.matched_tokens - found["reused_tokens"], generation=generation, **found)
