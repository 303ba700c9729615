"""Has vLLM compute again what was promised, and could be neither placed nor computed by our rows.

vLLM's own recovery from failed loads is not enough: with async scheduling it takes a token that was not sampled
(vllm#45138), and in the V2 runner it computes on from a stale position (#49250). Running requests that are preempted
are right everywhere: vLLM drops what is in flight of them and begins again, as at a reset of its prefix cache.

Facts: vLLM, `v1/core/sched/scheduler.py`, `Scheduler.reset_prefix_cache` (0.25.1 to 0.32).
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

from engine_wrapper.vllm.refusals import callers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from semblend_trt.connector.engine_spec import EngineSpec

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_recoveries: weakref.WeakKeyDictionary[EngineSpec, Recovery] = weakref.WeakKeyDictionary()


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
        needed = ("update_from_output", "reset_prefix_cache")
        owner = next((each for each in callers() if all(hasattr(each, name) for name in needed)), None)
        if owner is None:
            raise LookupError("the scheduler is not among the callers")
        if "reset_running_requests" not in inspect.signature(owner.reset_prefix_cache).parameters:
            raise LookupError("the scheduler cannot preempt what is running")
        self._is_async = bool(owner.scheduler_config.async_scheduling)
        self.scheduler = owner

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
