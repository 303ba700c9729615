"""The connector's scheduler half: rank 0 decides, every rank obeys.

No method raises into the engine, because the other ranks would wait in the broadcast. If a method fails, the connector
counts it and the request is served cold."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from semblend_trt.config import EmbedderKind, load_settings
from semblend_trt.connector.contract import KvCacheConnectorScheduler, never_raises, request_of
from semblend_trt.connector.eligibility import facts_or_refusal, spec_of
from semblend_trt.connector.lookup import Lookup, ProfileMatcher, namespace_for, tokenizer_folder
from semblend_trt.connector.requests import (
    Adapters,
    Iteration,
    RequestTable,
    SemBlendConnectorMetadata,
    TrackedRequest,
    donor_generation,
    fit_to_blocks,
    report_of,
    savable_tokens,
)
from semblend_trt.donors.donor_index import DonorIndex
from semblend_trt.donors.offload import OffloadCommands
from semblend_trt.outcome import Outcome, OutcomeLedger, ReuseReport
from semblend_trt.runtime import runtime_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from semblend_trt.audit import AuditLog
    from semblend_trt.connector.engine_spec import EngineRequest, EngineSpec
    from semblend_trt.metrics import Metrics
    from semblend_trt.namespace import CacheNamespace
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.semantic.neighbours import Neighbours

logger = logging.getLogger(__name__)


class _Silent:
    """Take every call, and answer None: the audit log and the metrics of an engine that has none."""

    def __getattr__(self, name: str) -> _Silent:
        return self

    def __call__(self, *arguments: Any, **fields: Any) -> None:
        """Do nothing."""


class SemBlendKvConnectorScheduler(KvCacheConnectorScheduler):  # type: ignore[misc]
    """Look donors up, plan their reuse, and pick new donors; `outcomes` counts how requests ended."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._runtime = runtime_for(llm_args)
        self._settings = load_settings(**self._engine.settings)
        self._facts, self._refusal = facts_or_refusal(self._engine, self._settings)
        lowest = 1 if self._facts is None else self._facts.lowest_check_layer
        self._profiles = ProfileMatcher(self._settings, lowest)
        self._runtime.scheduler = self
        self._observe()
        self._requests = RequestTable()
        self._forgotten: list[int] = []
        self._tells_parts = self._engine.tells_whole_prefix
        self._lookup: Lookup | None = None
        self._weights_changes = 0
        self.outcomes = OutcomeLedger()
        settings = self._settings.model_dump(mode="json")
        self._audit.event("scheduler_initialized", refusal=self._refusal, settings=settings)

    def _observe(self) -> None:
        """Open what hears of requests and donors. An engine runs no code of what its settings leave off."""
        settings, announcer = self._settings, None
        self._audit, self._metrics = cast("AuditLog", _Silent()), cast("Metrics", _Silent())
        self._neighbours: Neighbours | None = None
        if settings.metrics:
            from semblend_trt.metrics import metrics_for

            self._metrics = metrics_for()
            self._metrics.watch_faults(self._runtime.faults)
        if settings.audit_path is not None:
            from semblend_trt.audit import AuditLog

            self._audit = AuditLog(settings.audit_path)
            self._metrics.watch_audit(self._audit.dropped)
        if settings.nats_url is not None:
            from semblend_trt.fleet.announcer import announcer_for

            announcer = announcer_for(settings)
        if settings.embedder is not EmbedderKind.OFF and settings.enabled and self._refusal is None:
            from semblend_trt.semantic.neighbours import neighbours_for

            folder = partial(tokenizer_folder, self._engine)
            self._neighbours = neighbours_for(settings, folder, self._audit, self._metrics, announcer)
        self.worker: str | None = None if announcer is None else announcer.worker
        self._observers = [each for each in (announcer, self._neighbours) if each is not None]

    @property
    def _engine(self) -> EngineSpec:  # at every use: the arguments may change until the caches are registered
        return spec_of(self._llm_args)

    @never_raises(lambda: None)
    def wait_for_initialization(self) -> None:
        """Build what look-ups need: no request may wait for files. The worker calls it too, for older TensorRT-LLM."""
        if self._standing_refusal() is None:
            self._serve()
        if facts := self._runtime.engine_facts:
            self._audit.event("engine_attached", **facts)

    @never_raises(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the prompt tokens beyond `num_computed_tokens` whose KV this connector will place, and False."""
        request_id, start = int(request.request_id), perf_counter()
        self.outcomes.forget(request_id)  # of an earlier request with this id
        if (replayed := self._requests.pop(request_id, None)) is not None:
            # A paused request comes again; what was decided before its blocks were lost no longer holds.
            self._let_go(replayed)
        try:
            tracked = self._look_up(request_of(request), request_id, num_computed_tokens)
        except Exception:
            logger.exception("lookup of request %d failed; it is served cold", request_id)
            tracked = TrackedRequest.refused(request_id, num_computed_tokens, "internal_error")
        self._metrics.looked_up(perf_counter() - start)
        for expired in self._requests.add(tracked):
            self._end(expired)
        self._audit.lookup(tracked)
        return tracked.matched_tokens, False

    @never_raises(lambda: None)
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Learn the request's blocks, and how much of its plan the engine took."""
        if (tracked := self._requests.get(int(request.request_id))) is None:
            return
        if (lookup := self._lookup) is not None:
            shared, copied = divmod(tracked.num_computed_tokens, lookup.pool.geometry.block_size)
            self._tells_parts |= copied > 0
            if not lookup.pool.exchanges_blocks:  # requests that had these blocks have ended
                for ended in self._requests.displaced(block_ids[shared:], tracked):
                    self._end(ended)
            # The engine copies a part of its prefix beside its forwards, where a save may still read. One that has
            # named no such part yet may copy one without naming it.
            may_copy = copied or not self._tells_parts
            if may_copy and not lookup.pool.holds_saved_blocks and shared < len(block_ids):
                lookup.donors.copied_into(block_ids[shared])
        if tracked.plan is not None:
            fit_to_blocks(tracked, request_of(request), block_ids)
            self._audit.event("target_allocated", request_id=tracked.request_id, block_count=len(block_ids))

    def build_connector_meta(self, scheduler_output: Any) -> SemBlendConnectorMetadata:
        """Return this iteration's plans, save intents and block progress, the same for every rank."""
        iteration = Iteration()
        try:
            return self._metadata_of(scheduler_output, iteration)
        except Exception:
            logger.exception("an iteration cannot be told in full; what was promised is loaded")
            self._runtime.faults["build_connector_meta"] += 1
            # Commands are sent once: they must not be lost with the rest.
            plans, commands = tuple(iteration.plans), self.take_commands() or OffloadCommands()
            return SemBlendConnectorMetadata(plans, commands=commands, weights_changes=self._weights_changes)

    @never_raises(lambda: False)
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Record the request's outcome; True if its KV is being saved and its blocks must be held."""
        if (tracked := self._requests.get(int(request.request_id))) is None:
            return False
        try:
            self.take_events()  # while it is tracked: what its check found may be among the events
            lookup, is_open = self._lookup, self._runtime.is_forward_open and self._requests.is_running(tracked)
            # V2 tells no end after a failed forward; the last batch was dropped then.
            tracked.forward_failed = is_open and not self._pool_exchanges_blocks
            self._record_outcome(tracked)
            tracked.release_leases()
            if tracked.intent is not None and lookup is not None and not tracked.forward_failed:
                count, prompt = savable_tokens(tracked, cache_block_ids, lookup.pool), tracked.prompt
                tokens = prompt[:count] if count <= len(prompt) else request_of(request).token_array(count)
                intent, generation = tracked.intent, donor_generation(tracked)
                if intent.block_ids:
                    self._audit.event("blocks_exchanged", request_id=tracked.request_id)
                if lookup.donors.begin_save(intent, tracked.namespace_key, tokens, tracked.block_ids, generation):
                    return True
            self._let_go(tracked)
            return False
        except Exception:
            self._let_go(tracked)
            raise
        finally:
            self._requests.pop(tracked.request_id, None)

    @never_raises(lambda: None)
    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Return the flat form for the V2 cache manager. The worker has refused a cache of several groups."""
        self.update_state_after_alloc(request, _flat(block_ids))

    @never_raises(lambda: False)
    def request_finished_by_layer_group(self, request: Any, block_ids: Sequence[Sequence[int]]) -> bool:
        return bool(self.request_finished(request, _flat(block_ids)))

    @never_raises(lambda: None)
    def take_commands(self) -> OffloadCommands | None:
        """Return the tiers' commands that no metadata has carried yet; None before the first look-up."""
        return None if self.donor_index is None else self.donor_index.offload.take_commands()

    @property
    def donor_index(self) -> DonorIndex | None:
        """The donors, once the worker has registered the caches: block size and KV dtype are part of a namespace."""
        return None if self._lookup is None else self._lookup.donors

    @property
    def namespace(self) -> CacheNamespace | None:
        """The namespace of the engine's own KV, bound to no request; None while nothing can be reused."""
        return None if self._standing_refusal() is not None else self._serve().namespace

    def plan_of(self, request_id: int) -> SemanticKvPlan | None:
        """Return the plan of a running request; None without one."""
        tracked = self._requests.get(request_id)
        return None if tracked is None else tracked.plan

    def leave_no_donor(self, request_id: int) -> None:
        """Keep nothing of a running request: its KV is not that of its namespace."""
        if (tracked := self._requests.get(request_id)) is not None:
            self._cancel_intent(tracked)

    def forget_donors(self) -> None:
        """Reuse nothing that was computed until now. Running requests keep what they have."""
        self.take_events()
        if self._lookup is not None:
            self._lookup.forget_donors()

    def reuse_of(self, request_id: int) -> ReuseReport | None:
        """Return what reuse did for a request that runs or ended recently; None for an unknown one."""
        # The table comes first: a request that ends meanwhile has its outcome before it leaves the table.
        if (tracked := self._requests.get(request_id)) is not None:
            self.take_events()
            report: ReuseReport | None = report_of(tracked, self._settings.policy.value)
        else:
            report = self.outcomes.of(request_id)
        if report is None or self._neighbours is None:
            return report
        return replace(report, nearest=self._neighbours.nearest(request_id))

    def close(self) -> None:
        """End the requests still tracked and write the audit log out."""
        self.take_events()
        while self._requests:
            self._end(self._requests.popitem(last=False)[1])
        for observer in reversed(self._observers):  # neighbours tell the announcer
            observer.close()
        self._audit.close()
        self._metrics.close()  # last: it keeps what the others count up to their end

    def _look_up(self, request: EngineRequest, request_id: int, num_computed_tokens: int) -> TrackedRequest:
        self.take_events()
        refusal, donors = self._standing_refusal(), self.donor_index
        if request_id in self._runtime.ended_saves or (donors is not None and donors.is_saving(request_id)):
            refusal = "id_in_use"
        elif refusal is None and request.cold:
            refusal = "cold_run"
        if refusal is not None:
            return TrackedRequest.refused(request_id, num_computed_tokens, refusal)
        tracked = self._serve().look_up(request, request_id, num_computed_tokens)
        if tracked.plan is not None:
            self._runtime.check_weights()
            self._runtime.are_weights_checked = True
            if self._runtime.weights_changes != self._weights_changes:
                self._let_go(tracked)
                return self._look_up(request, request_id, num_computed_tokens)
        return tracked

    @property
    def _pool_exchanges_blocks(self) -> bool:
        return self._runtime.pool is not None and self._runtime.pool.exchanges_blocks

    def _standing_refusal(self) -> str | None:
        """Return why this engine's requests are all served cold; None if reuse is possible."""
        if not self._settings.enabled:
            return "disabled"
        registered = None if self._runtime.pool is not None else "caches_not_registered"
        return self._refusal or self._runtime.refusal or registered

    def _serve(self) -> Lookup:
        runtime, pool = self._runtime, self._runtime.pool
        assert self._facts is not None
        assert pool is not None
        if self._lookup is None:
            settings, engine, block_size = self._settings, self._engine, pool.geometry.block_size
            adapters = Adapters(engine.lora_dirs, settings.digest_cache_path)
            namespace = namespace_for(engine, self._facts, settings, block_size, pool.dtype, adapters, pool.scales)
            donors = DonorIndex(settings, pool, self._observers, runtime.disk, self._metrics.tier_event)
            hear = self._profiles, self._observers, self._neighbours
            self._lookup = Lookup(settings, runtime, pool, donors, namespace, adapters, *hear)
            self._metrics.watch(donors)
            match = self._profiles.match(namespace, pool.geometry, self._runtime.mode)
            self._audit.profile(match, namespace, pool.geometry)
        return self._lookup

    def take_events(self) -> None:
        """Take the runtime's waiting events: changed weights, saved donors, evidence of checks, and failed loads.

        If the weights have changed, all donors and saves are dropped, and another namespace holds."""
        if (changes := self._runtime.weights_changes) != self._weights_changes:
            self._weights_changes = changes
            for tracked in self._requests.values():  # they hold KV of both
                self._cancel_intent(tracked)
            if self._lookup is not None:
                weights = self._runtime.weights
                is_first = weights is not None and weights.are_first and self._runtime.ranks.size == 1
                self._lookup.change_weights(are_first=is_first)
                self._audit.event("weights_changed", changes=changes, are_first=is_first)
            self._metrics.weights_changed()
        if self.donor_index is not None:
            self.donor_index.take_events(self._runtime.offload_events)
        while self._runtime.saved:
            saved = self._runtime.saved.popleft()
            generation = 0
            if self.donor_index is not None:
                self.donor_index.saved(saved)
                generation = self.donor_index.texts.generations.get(saved.donor_id, 0)
            self._audit.saved(saved, generation)
        while self._runtime.evidence:
            evidence = self._runtime.evidence.popleft()
            if (checked := self._requests.get(evidence.request_id)) is not None:
                checked.evidence = evidence
        while self._runtime.failed_loads:
            if (failed := self._requests.get(self._runtime.failed_loads.popleft())) is not None:
                failed.load_failed = True
                failed.release_leases()
                if self.donor_index is not None and failed.plan is not None:
                    self.donor_index.lost({span.donor_id for span in failed.plan.spans})

    def _metadata_of(self, scheduler_output: Any, iteration: Iteration) -> SemBlendConnectorMetadata:
        drops = self._pool_exchanges_blocks
        ended = self._requests.begin_iteration(last_failed=self._runtime.is_forward_open, drops=drops)
        if scheduler_output is not None:  # None is an iteration without requests
            for data in scheduler_output.new_requests:
                self._add(iteration, data, is_first=True)
            for data in scheduler_output.cached_requests:
                self._add(iteration, data, is_first=False)
        for request in ended:
            self._end(request)
        if self.donor_index is not None and self._neighbours is not None:
            self.donor_index.offload.prefetch(self._neighbours.near_donors())
        metadata = SemBlendConnectorMetadata(
            plans=tuple(iteration.plans),
            followed=tuple(tracked.request_id for tracked in iteration.followed),
            progress=tuple(iteration.progress),
            forgotten=tuple(self._forgotten),
            commands=self.take_commands() or OffloadCommands(),
            grown=tuple(iteration.grown),
            weights_changes=self._weights_changes,
        )
        self._forgotten = []
        for tracked in iteration.followed:
            tracked.is_followed = True
        return metadata

    def _add(self, iteration: Iteration, data: Any, *, is_first: bool) -> None:
        """Add what the engine says of one request. An entry that cannot be read harms no other."""
        tracked = None
        try:
            tracked = self._requests.scheduled(data.request_id, loads=is_first)
            if tracked is not None:
                iteration.add(tracked, data, is_first=is_first)
                if len(data.new_block_ids):
                    self._requests.holds(tracked, data.new_block_ids)
                if is_first and tracked.plan is not None and tracked.matched_tokens:
                    self._audit.dispatched(tracked.plan, data)
        except Exception:
            logger.exception("the engine's word on a request cannot be read; it does not become a donor")
            self._runtime.faults["request_data"] += 1
            if tracked is not None:
                tracked.is_followed = False

    def _end(self, tracked: TrackedRequest) -> None:
        self._let_go(tracked)
        self._record_outcome(tracked)

    def _record_outcome(self, tracked: TrackedRequest) -> None:
        if tracked.awaits_load:  # it ended before any forward
            tracked.not_honoured()
        report = report_of(tracked, self._settings.policy.value)
        self.outcomes.record(tracked.request_id, report)
        self._metrics.request_ended(report)
        self._audit.request_ended(tracked.request_id, report)
        if report.outcome == Outcome.BACKEND_MATERIALIZED_REUSE and tracked.plan is not None:
            self._audit.materialized(tracked.plan, report.reused_tokens)

    def _let_go(self, tracked: TrackedRequest) -> None:
        """Release the request's leases, and have the workers forget it: it does not become a donor."""
        tracked.release_leases()
        self._cancel_intent(tracked)
        if tracked.reason != "id_in_use":  # the workers know an earlier request by the id
            self._forgotten.append(tracked.request_id)

    def _cancel_intent(self, tracked: TrackedRequest) -> None:
        if tracked.intent is not None and self.donor_index is not None:
            self.donor_index.cancel(tracked.intent)
        tracked.intent = None


def _flat(by_group: Sequence[Sequence[int]]) -> Any:
    """Return the ids of a single group, none of several; None for what cannot be read, which the flat form refuses."""
    try:
        return list(by_group[0]) if len(by_group) == 1 else []
    except TypeError:
        return None
