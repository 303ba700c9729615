"""The scheduler half inside vLLM, over the scheduler half for every engine, and what both halves share of a step.

vLLM's own recovery from failed loads is not enough. With async scheduling vLLM takes a token that was not sampled
(vllm#45138), and the V2 runner computes on from a stale position (#49250). Preemption is right everywhere: vLLM drops
what is in flight and begins again, as at a reset of its prefix cache.

Facts: vLLM (0.28 to 0.32), `v1/core/sched/output.py`, and `Scheduler.reset_prefix_cache` of
`v1/core/sched/scheduler.py`."""

from __future__ import annotations

import itertools
import json
import logging
import struct
import threading
import weakref
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from engine_wrapper.vllm.engine_spec import learn_caches
from engine_wrapper.vllm.hooks import around_update, find_scheduler, guard_publication, watch_resets, watch_worker_calls
from engine_wrapper.vllm.refusals import request_refusal
from engine_wrapper.vllm.report import RemoteWeights
from engine_wrapper.vllm.stats import ReuseStats, tell_prefill, tell_used
from semblend_trt.connector import SemBlendKvConnectorScheduler
from semblend_trt.connector.contract import RequestData, SchedulerOutput, never_raises
from semblend_trt.connector.engine_spec import EngineRequest
from semblend_trt.connector.requests import SemBlendConnectorMetadata
from semblend_trt.namespace import content_value, unknown_value
from semblend_trt.outcome import VLLM_RECEIPT
from semblend_trt.plan import EngineMode
from semblend_trt.runtime import runtime_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy.typing as npt

    from engine_wrapper.vllm.report import StartReport
    from semblend_trt.connector.engine_spec import EngineSpec
    from semblend_trt.outcome import ReuseReport
    from semblend_trt.runtime import AdapterWeights

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_recoveries: weakref.WeakKeyDictionary[EngineSpec, Recovery] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class DraftedRequest(RequestData):
    """A scheduled request of vLLM. `grows_by`: tokens that a step may add after the prompt, drafts included."""

    grows_by: int = 1


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request of a step: `tokens` are scheduled; `adapter` is an id, or 0. `block_ids` are all of its blocks if the
    step begins a request, else the first."""

    number: int
    begin: int
    tokens: int
    block_ids: tuple[int, ...]
    adapter: int = 0


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """`told` is for the worker half for every engine; `step` holds requests by vLLM's id. `saving`: vLLM's id by
    number, of requests that ended since the last step and hold their blocks. `is_unread`: the step was not readable.
    `adapters`: the weights that plans of requests with adapters were made for, by number. `suspicions`: how often the
    workers' weights may have been written."""

    told: SemBlendConnectorMetadata = field(default_factory=SemBlendConnectorMetadata)
    step: dict[str, Scheduled] = field(default_factory=dict)
    saving: dict[int, str] = field(default_factory=dict)
    is_unread: bool = False
    adapters: dict[int, AdapterWeights] = field(default_factory=dict)
    suspicions: int = 0


class Steps:
    """Reads vLLM's schedule, step by step: vLLM gives new blocks only, and no tokens of requests that go on."""

    def __init__(self, number_of: Callable[[str], int]) -> None:
        """`number_of` gives a request's number by vLLM's id."""
        self._number_of = number_of
        self._blocks: dict[str, list[int]] = {}
        self._adapters: dict[str, int] = {}
        # Of requests that have had drafts, how many first tokens have KV for certain.
        self._certain: dict[str, int] = {}

    def read(self, output: Any) -> tuple[SchedulerOutput, dict[str, Scheduled]]:
        """Return the step in TensorRT-LLM's form, and its requests by vLLM's id."""
        for gone in output.finished_req_ids:
            self._blocks.pop(gone, None)
            self._adapters.pop(gone, None)
            self._certain.pop(gone, None)
        new, known, step = list[RequestData](), list[RequestData](), dict[str, Scheduled]()
        drafts, cached = output.scheduled_spec_decode_tokens, output.scheduled_cached_reqs
        # Plans run in steps that begin a request. Long lists in each step would take time, above all between processes.
        most = None if output.scheduled_new_reqs or cached.resumed_req_ids else 1

        def add(found: list[RequestData], request_id: str, begin: int, new_blocks: list[int]) -> None:
            held = self._blocks.setdefault(request_id, [])
            held.extend(new_blocks)
            number, count = self._number_of(request_id), output.num_scheduled_tokens[request_id]
            step[request_id] = Scheduled(number, begin, count, tuple(held[:most]), self._adapters.get(request_id, 0))
            if request_id in drafts or request_id in self._certain:
                # What of the drafts is taken is known at the next step, by where that begins.
                end = begin + count - len(drafts.get(request_id, ()))
                begin = min(begin, self._certain.get(request_id, begin)) if found is known else begin
                self._certain[request_id], count = end, end - begin
            grows_by = count if request_id in self._certain else 1
            found.append(DraftedRequest(number, [], list(new_blocks), begin, count, grows_by=grows_by))

        for request in output.scheduled_new_reqs:
            self._blocks.pop(request.req_id, None)  # the V2 runner gets preempted ones so when they come back
            if (adapter := request.lora_request) is not None:
                self._adapters[request.req_id] = int(adapter.lora_int_id)
            add(new, request.req_id, request.num_computed_tokens, request.block_ids[0])
        gained = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for request_id, begin, block_ids in gained:
            is_back = request_id in cached.resumed_req_ids
            if is_back:
                self._blocks.pop(request_id, None)
            add(new if is_back else known, request_id, begin, [] if block_ids is None else block_ids[0])
        return SchedulerOutput(new_requests=new, cached_requests=known), step


class Recovery:
    """Has vLLM compute requests again. Both halves of a connector share it, in one process and one thread. A worker in
    another process has one without scheduler: what it asks for goes into its report.

    Without async scheduling vLLM gets the failed blocks and takes no token of theirs. Running requests begin again once
    vLLM has heard. With it vLLM schedules the next step before it hears, so they begin again at once."""

    def __init__(self) -> None:
        self.scheduler: Any = None
        self._is_async = False
        self._failed_blocks: set[int] = set()
        self.all_blocks, self._begins_again = range(0), False

    def bind(self) -> None:
        """Take the vLLM scheduler that calls its connector. Raises LookupError if it is of another kind."""
        scheduler = find_scheduler()
        self._is_async = bool(scheduler.scheduler_config.async_scheduling)
        self.all_blocks = range(scheduler.kv_cache_manager.block_pool.num_gpu_blocks)
        self.scheduler = scheduler

    def bind_apart(self, config: Any, blocks: int) -> None:
        """Serve a worker whose scheduler is in another process; `blocks` are all of its pool."""
        self._is_async, self.all_blocks = bool(config.scheduler_config.async_scheduling), range(blocks)

    def takes_begin_again(self) -> bool:
        """Return whether the scheduler of another process is to begin all running requests again, once."""
        asked, self._begins_again = self._begins_again, False
        return asked

    def compute_again(self, block_ids: Iterable[int]) -> None:
        """Have vLLM take no token of the step's requests with these blocks before they are computed."""
        self._failed_blocks.update(block_ids)
        if self._is_async:
            self.begin_again()

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks whose loads have failed since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def begin_again(self) -> None:
        """Have vLLM drop its prefix cache and compute all running requests again. Never raises."""
        if self.scheduler is None:
            if self.all_blocks:
                self._begins_again = True
                self._failed_blocks.clear()
            return
        try:
            try:
                self.scheduler.reset_prefix_cache(reset_running_requests=True)
            except RuntimeError:
                # vLLM has preempted them, but blocks that are being saved or written are held until later.
                self.scheduler.kv_cache_manager.evict_blocks(set(self.all_blocks))
        except Exception:
            logger.exception("vLLM's running requests cannot begin again; it recovers from failed loads in its own way")
            return
        self._failed_blocks.clear()
        logger.warning("what runs is computed again: promised KV could be neither placed nor computed")


def recovery_for(arguments: EngineSpec) -> Recovery:
    """Return the engine's recovery, the same one for the same object."""
    with _lock:
        return _recoveries.setdefault(arguments, Recovery())


class RequestView(EngineRequest):
    """A vLLM request for the scheduler half."""

    def __init__(
        self, number: int, request: Any, taken_tokens: int | None = None, adapter_identity: str | None = None
    ) -> None:
        self.request_id, self.adapter_identity = number, adapter_identity
        self.prompt_len = int(request.num_prompt_tokens)
        self.max_new_tokens = int(request.max_tokens)
        self.cache_salt, self.taken_tokens = request.cache_salt, taken_tokens
        self.ask(request.kv_transfer_params)
        self._request = request

    @property
    def refusal(self) -> str | None:
        """Evaluated at the look-up alone."""
        return request_refusal(self._request)

    def token_array(self, count: int) -> npt.NDArray[np.int32]:
        """Return the first tokens, int32 [count]."""
        prompt = self._request.prompt_token_ids
        tokens = prompt if count == self.prompt_len else self._request.all_token_ids[: max(0, count)]
        # NumPy reads a list of integers twice as slowly, and a copy of a long one takes a quarter of that.
        return np.frombuffer(struct.pack(f"{len(tokens)}i", *tokens), dtype=np.int32)


class PublicationGuard:
    """Keeps blocks that hold approximate KV out of vLLM's exact prefix cache, and out of its KV events.

    vLLM publishes a request's blocks while it schedules it, before any KV is loaded. So the look-up sets the limit. It
    holds until the request has ended, since what follows approximate KV is approximate too. `exact_tokens`: by vLLM's
    request id, how many first tokens of a limited request may be published."""

    def __init__(self) -> None:
        self.exact_tokens: dict[str, int] = {}

    def full(
        self,
        stock: Callable[..., Any],
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Publish full blocks, those of a limited request up to its limit."""
        exact = self.exact_tokens.get(request.request_id)
        if exact is not None:
            num_full_blocks = min(num_full_blocks, exact // block_size)
            if num_full_blocks <= num_cached_blocks:
                return None
            if (mask := options.get("block_mask")) is not None:
                options["block_mask"] = mask[: num_full_blocks - num_cached_blocks]
        return stock(request, blocks, num_cached_blocks, num_full_blocks, block_size, *arguments, **options)

    def partly(self, stock: Callable[..., Any], request: Any, *arguments: Any, **options: Any) -> Any:
        """Publish a block that is not full, unless its request is limited."""
        return None if request.request_id in self.exact_tokens else stock(request, *arguments, **options)


class VllmScheduler:
    """Its methods are called as vLLM calls a connector's; none raises into the engine."""

    def __init__(self, arguments: EngineSpec, *, is_apart: bool) -> None:
        """`is_apart`: the workers run in processes of their own."""
        self._runtime, self._arguments = runtime_for(arguments), arguments
        self._weights = RemoteWeights() if is_apart else None
        self._scheduler = SemBlendKvConnectorScheduler(arguments)
        self._next_number = itertools.count(1)
        self._numbers = defaultdict[str, int](self._next_number.__next__)
        self._steps = Steps(self._numbers.__getitem__)
        self._saving: dict[int, str] = {}
        self._guard = PublicationGuard()
        # Of running requests with an adapter: its id and what was known of its weights at the look-up.
        self._adapters: dict[int, tuple[int, AdapterWeights | None]] = {}
        # Digests of an adapter's weights since the last reset by its name, by which vLLM's prefix cache goes.
        self._digests = defaultdict[str, set[str]](set)
        self._undo = ExitStack()
        self._recovery = recovery_for(arguments)
        # Of running requests that a stop string may end, the receipt once it is known.
        self._stoppable: dict[str, dict[str, Any] | None] = {}
        self.stats = ReuseStats()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Guard the pool; without that only exact prefixes are reused. The caches are registered by now."""

        def note_reset(was_reset: bool) -> None:
            if was_reset:
                self._digests.clear()
            if was_reset and self._runtime.weights is not None:
                self._runtime.weights.prefix_cache_reset()

        try:
            self._undo.callback(guard_publication(gpu_block_pool, self._guard.full, self._guard.partly))
            self._undo.callback(watch_resets(gpu_block_pool, note_reset))
            self._runtime.publication_guard = True
        except AttributeError:
            logger.warning("vLLM's block pool publishes in a way that is not known; only exact prefixes are reused")
        try:
            self._recovery.bind()
            self._undo.callback(around_update(self._recovery.scheduler, self._take_report, self._give_receipts))
            if self._weights is not None:
                self._runtime.weights = self._weights  # type: ignore[assignment]  # it does as Weights do
                self._undo.callback(watch_worker_calls(self._weights))
        except Exception as error:
            logger.warning("KV is not reused, since vLLM could not recover where that fails: %s", error)
            self._runtime.refusal = self._runtime.refusal or "recovery"
        self._scheduler.wait_for_initialization()

    @never_raises(lambda: None)
    def learn_start(self, metadata: Mapping[int, StartReport]) -> None:
        """Take what the ranks of other processes have found at their start; there are none of this process."""
        if self._weights is None:
            return
        runtime, first = self._runtime, metadata[0]
        runtime.refusal = runtime.refusal or next((e.refusal for e in metadata.values() if e.refusal is not None), None)
        learn_caches(self._arguments, first.caches)
        runtime.pool = first.pool
        self._scheduler.wait_for_initialization()

    @never_raises(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many prompt tokens beyond `num_computed_tokens` get placed KV, none before the self-check, and
        False: the step itself places it. The guard learns how many are exact before vLLM publishes any."""
        number = self._numbers[request.request_id]
        self._guard.exact_tokens.pop(request.request_id, None)
        if request.sampling_params is not None and request.sampling_params.stop:
            self._stoppable[request.request_id] = None
        view = RequestView(number, request, adapter_identity=self._adapter_of(number, request))
        tokens, _ = self._scheduler.get_num_new_matched_tokens(view, num_computed_tokens)
        if view.adapter_identity is not None:
            self._keep_apart(number, request.lora_request.lora_name, num_computed_tokens)
        plan = self._scheduler.plan_of(number)
        if self._runtime.mode is not EngineMode.WRAPPER:
            return 0, False  # planned rows could not yet compute what fails to load
        if tokens and plan is not None and not plan.is_exact:
            self._guard.exact_tokens[request.request_id] = plan.exact_token_count
        return tokens, False

    @never_raises(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Learn the request's blocks; without external tokens vLLM has declined the offer."""
        number = self._numbers[request.request_id]
        plan = self._scheduler.plan_of(number)
        is_declined = plan is not None and plan.matched_tokens > 0 and not num_external_tokens
        block_ids = [] if is_declined else list(blocks.get_block_ids()[0])
        self._scheduler.update_state_after_alloc(RequestView(number, request, num_external_tokens), block_ids)
        if request.num_preemptions and (report := self._scheduler.reuse_of(number)) is not None:
            # vLLM keeps the counts of the preempted run.
            tell_prefill(request, report.exact_prefix_tokens, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """Hear of failed loads; vLLM has taken no token of their requests."""
        if connector_output.invalid_block_ids:
            self._recovery.begin_again()

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return the worker half's step. If it cannot be read, vLLM computes all that was promised."""
        saving, self._saving = self._saving, {}
        try:
            told_output, step = self._steps.read(scheduler_output)
        except Exception:
            logger.exception("a step of vLLM cannot be read; nothing is reused from now on")
            self._runtime.faults["step_unreadable"] += 1
            self._runtime.refusal = self._runtime.refusal or "step_unreadable"
            return StepMetadata(self._scheduler.build_connector_meta(None), saving=saving, is_unread=True)
        told = self._scheduler.build_connector_meta(told_output)
        known = ((plan.request_id, self._adapters.get(plan.request_id, (0, None))[1]) for plan in told.plans)
        weights = {number: each for number, each in known if each is not None}
        suspicions = 0 if self._weights is None else self._weights.suspicions
        return StepMetadata(told, step, saving, adapters=weights, suspicions=suspicions)

    @never_raises(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether its blocks are held while its KV is saved, and the receipt, which vLLM gives to the answer."""
        number = self._numbers.pop(request.request_id, None)
        if number is None:
            return False, None
        adapter, known = self._adapters.pop(number, (0, None))
        if adapter and self._runtime.adapters.get(adapter) != known:
            self._scheduler.leave_no_donor(number)  # it ran with other weights than it was looked up for
        is_saving = self._scheduler.request_finished(RequestView(number, request), list(block_ids))
        if is_saving:
            self._saving[number] = request.request_id
        self._guard.exact_tokens.pop(request.request_id, None)
        self._stoppable.pop(request.request_id, None)
        if (report := self._scheduler.outcomes.of(number)) is None:
            return is_saving, None
        self.stats.request_ended(report)
        return is_saving, self._receipt(report)

    @never_raises(lambda: False)
    def reset_cache(self) -> bool:
        """Forget all donors; vLLM asks if its weights may change (`/pause`)."""
        self._scheduler.forget_donors()
        return True

    def close(self) -> None:
        """Write out what is held, and leave vLLM's block pool as it was found."""
        self._scheduler.close()
        self._undo.close()

    @never_raises(lambda: None)
    def _take_report(self, step: Any, output: Any) -> None:
        """Take what the ranks report with a step's output, and have vLLM count what was used of the step's plans."""
        reported = output.kv_connector_output
        report = None if reported is None else reported.kv_connector_worker_meta
        if self._weights is None or not isinstance(metadata := step.kv_connector_metadata, StepMetadata):
            return
        if report is not None:
            report.apply(self._runtime, self._weights)
            if report.begins_again:
                self._recovery.begin_again()
        names = {each.number: name for name, each in metadata.step.items()}
        for plan in metadata.told.plans:
            tell_used(self._recovery.scheduler, names.get(plan.request_id), plan, self._scheduler)

    def _adapter_of(self, number: int, request: Any) -> str | None:
        """What KV of a request's adapter belongs to; None without one. It equals no other value while vLLM has not
        loaded the adapter."""
        if (adapter := request.lora_request) is None:
            return None
        known = self._runtime.adapters.get(adapter.lora_int_id)
        self._adapters[number] = adapter.lora_int_id, known
        return unknown_value() if known is None else json.dumps([adapter.lora_name, content_value(known.digest)])

    def _keep_apart(self, number: int, name: str, num_computed_tokens: int) -> None:
        """Keep no donor of a request whose adapter is not loaded yet, or that goes on from vLLM's own prefix under a
        name that has had other weights since the prefix cache was reset: it may hold KV of those."""
        _, known = self._adapters[number]
        if known is not None:
            self._digests[name].add(known.digest)
        if known is None or (num_computed_tokens and len(self._digests[name]) > 1):
            self._scheduler.leave_no_donor(number)

    @never_raises(lambda: None)
    def _give_receipts(self, sent: Mapping[int, Any]) -> None:
        """Give each token of a request that a stop string may end the receipt. vLLM's front end finds the string, and
        answers before the scheduler hears of the end."""
        if not self._stoppable:
            return
        for output in chain.from_iterable(each.outputs for each in sent.values()):
            name = output.request_id
            if name not in self._stoppable or output.kv_transfer_params is not None:
                continue
            if self._stoppable[name] is None and (report := self._scheduler.reuse_of(self._numbers[name])):
                self._stoppable[name] = self._receipt(report)
            output.kv_transfer_params = self._stoppable[name]

    def _receipt(self, report: ReuseReport) -> dict[str, Any]:
        worker = self._scheduler.worker
        return {VLLM_RECEIPT: report.receipt if worker is None else report.receipt | {"worker": worker}}
