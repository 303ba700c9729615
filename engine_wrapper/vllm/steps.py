"""One step of vLLM as both halves see it: what is scheduled in it, and having vLLM compute it again.

vLLM's own recovery from failed loads is not enough: with async scheduling it takes a token that was not sampled
(vllm#45138), and in the V2 runner it computes on from a stale position (#49250). Running requests that are preempted
are right everywhere: vLLM drops what is in flight of them and begins again, as at a reset of its prefix cache.

Facts: vLLM, `v1/core/sched/output.py`, and `v1/core/sched/scheduler.py`, `Scheduler.reset_prefix_cache` (0.25.1 to
0.32).
"""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from engine_wrapper.vllm.hooks import find_scheduler
from semblend_trt.connector.contract import RequestData, SchedulerOutput
from semblend_trt.connector.requests import SemBlendConnectorMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from semblend_trt.connector.engine_spec import EngineSpec

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_recoveries: weakref.WeakKeyDictionary[EngineSpec, Recovery] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request of a step: our number for it, its first position, how many tokens, and all of its blocks."""

    number: int
    begin: int
    tokens: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """`told` is for our worker. `step` holds the requests by vLLM's id; `saving` those, vLLM's id by our number, that
    ended since the last step and whose blocks are held until they are saved. `is_unread`: it was not readable."""

    told: SemBlendConnectorMetadata = field(default_factory=SemBlendConnectorMetadata)
    step: dict[str, Scheduled] = field(default_factory=dict)
    saving: dict[int, str] = field(default_factory=dict)
    is_unread: bool = False


class Steps:
    """Reads what vLLM schedules, step by step: it tells new blocks only, and no tokens of requests that go on."""

    def __init__(self, number_of: Callable[[str], int]) -> None:
        """`number_of` gives our number by vLLM's id."""
        self._number_of = number_of
        self._blocks: dict[str, list[int]] = {}

    def read(self, output: Any) -> tuple[SchedulerOutput, dict[str, Scheduled]]:
        """The step as TensorRT-LLM would tell it, and its requests by vLLM's id."""
        for gone in output.finished_req_ids:
            self._blocks.pop(gone, None)
        new, known, step = list[Any](), list[Any](), dict[str, Scheduled]()
        counts = output.num_scheduled_tokens
        for request in output.scheduled_new_reqs:
            self._blocks.pop(request.req_id, None)  # the V2 runner is told so of those that come back from preemption
            self._add(new, step, request.req_id, request.num_computed_tokens, counts, request.block_ids[0])
        cached = output.scheduled_cached_reqs
        gained = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for request_id, begin, block_ids in gained:
            own = [] if block_ids is None else block_ids[0]
            if request_id in cached.resumed_req_ids:
                self._blocks.pop(request_id, None)
                self._add(new, step, request_id, begin, counts, own)
            else:
                self._add(known, step, request_id, begin, counts, own)
        return SchedulerOutput(new_requests=new, cached_requests=known), step

    def _add(
        self,
        found: list[Any],
        step: dict[str, Scheduled],
        request_id: str,
        begin: int,
        counts: dict[str, int],
        new_block_ids: list[int],
    ) -> None:
        held = self._blocks.setdefault(request_id, [])
        held.extend(new_block_ids)
        number, count = self._number_of(request_id), counts[request_id]
        step[request_id] = Scheduled(number, begin, count, tuple(held))
        found.append(
            RequestData(
                request_id=number,
                new_tokens=[],
                new_block_ids=list(new_block_ids),
                computed_position=begin,
                num_scheduled_tokens=count,
            )
        )


class Recovery:
    """Both halves of the connector meet in it: one process holds them, and one thread calls them.

    Without async scheduling failed blocks are told to vLLM, which takes no token of theirs, and running requests begin
    again once it has heard. With it the next step is scheduled before vLLM hears, so that they begin again at once.
    `scheduler` is vLLM's own, None before it is bound.
    """

    def __init__(self) -> None:
        self.scheduler: Any = None
        self._is_async = False
        self._failed_blocks: set[int] = set()

    def bind(self) -> None:
        """Takes the vLLM scheduler that calls its connector. Raises LookupError where it is of another kind."""
        scheduler = find_scheduler()
        self._is_async = bool(scheduler.scheduler_config.async_scheduling)
        self.scheduler = scheduler

    def compute_again(self, block_ids: Iterable[int]) -> None:
        """Of the requests with these blocks, which run in this step, no token is taken before they are computed."""
        self._failed_blocks.update(block_ids)
        if self._is_async:
            self.begin_again()

    def compute_all_again(self) -> None:
        """The same of all requests that run in this step and of which not every token is computed in it."""
        if self.scheduler is not None:
            self.compute_again(self._all_blocks())

    def take_failed_blocks(self) -> set[int]:
        """The blocks whose loads have failed, each told once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def begin_again(self) -> None:
        """All running requests are computed anew, and nothing that may be wrong is in the prefix cache any more. Never
        raises: where that cannot be, failed blocks are told."""
        if self.scheduler is None:
            return
        try:
            self._preempt()
        except Exception:
            logger.exception("vLLM's running requests cannot begin again; it recovers from failed loads in its own way")
            return
        self._failed_blocks.clear()
        logger.warning("what runs is computed again: promised KV could be neither placed nor computed")

    def _preempt(self) -> None:
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError:
            # It has preempted them. Blocks that are saved, or that a step in flight writes, are held until later.
            self.scheduler.kv_cache_manager.evict_blocks(set(self._all_blocks()))

    def _all_blocks(self) -> range:
        return range(self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks)


def recovery_for(arguments: EngineSpec) -> Recovery:
    """The recovery of the engine that `arguments` describe, the same one for the same object."""
    with _lock:
        return _recoveries.setdefault(arguments, Recovery())
