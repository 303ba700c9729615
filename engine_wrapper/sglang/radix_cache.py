"""SGLang's prefix cache with SemBlend beside it, which SGLang asks its backend `semblend` for.

SGLang's own exact prefix always wins. What SemBlend promises after it goes into slots of the request alone, and never
into the tree: `checkpoint` is the one way there, and ends where the request's KV stops to be exact.

Facts: SGLang 0.5.23, `srt/mem_cache/unified_radix_cache.py`, `base_prefix_cache.py` and `common.py` beside it, and
`srt/managers/schedule_policy.py` (`host_hit_length` is what a prefix cache may still bring; a prefix that it does not
own is freed with its request)."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.registry import create_unified_radix_cache, default_radix_cache_factory
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from engine_wrapper.sglang.engine_spec import from_server_args
from engine_wrapper.sglang.hooks import SchedulerHooks, find_scheduler
from engine_wrapper.sglang.refusals import engine_refusal_of, model_refusal_of
from engine_wrapper.sglang.requests import Followed, Requests, RequestView, SglangScheduler
from engine_wrapper.sglang.worker import SglangWorker
from semblend_trt.config import load_settings
from semblend_trt.connector.contract import never_raises
from semblend_trt.errors import ConfigurationError, LayoutError
from semblend_trt.plan import EngineMode
from semblend_trt.reasons import Scope, advice
from semblend_trt.runtime import runtime_for

if TYPE_CHECKING:
    from semblend_trt.runtime import Runtime

logger = logging.getLogger("sglang.semblend")


class SemBlendRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """Until it has both halves of the connector it is SGLang's own. No method of SemBlend's raises into the engine."""

    _scheduler: Any = None  # an SglangScheduler, once there is one
    _worker: SglangWorker
    _runtime: Runtime

    def __init__(self, params: Any) -> None:
        self.requests = Requests()
        super().__init__(params)

    def close(self) -> None:
        """Leave SGLang's runner as it was found, end what is being saved, and write the audit log out."""
        if self._scheduler is not None:
            self._worker.close()
            self._scheduler.close()
            self._scheduler = None

    def match_prefix(self, params: Any) -> Any:
        result = super().match_prefix(params)
        if (request := params.req) is None or self._scheduler is None or request.kv.holds_kv:
            return result
        if not (offered := self._look_up(request, int(result.device_prefix_len), len(params.key))):
            return result
        node, reach = result.last_device_node, result.device_prefix_len + offered
        offer = {"host_hit_length": offered, "full_kv_hit_length": reach}
        return result._replace(last_host_node=node, best_match_node=node, **offer)

    @never_raises(lambda: 0)
    def _look_up(self, request: Any, exact: int, limit: int) -> int:
        """Return how many tokens beyond SGLang's own `exact` ones are promised, in whole pages of the first `limit`."""
        self._worker.take_saves()
        followed = self.requests.begun(request.rid)
        tokens, _ = self._scheduler.get_num_new_matched_tokens(RequestView(followed.number, request), exact)
        # Before the self-check no rows could compute what fails to load.
        is_proven = self._runtime.mode is EngineMode.WRAPPER
        end = min(exact + tokens, limit) // self.page_size * self.page_size if is_proven else exact
        followed.exact, followed.offered = exact, max(0, end - exact)
        if tokens and not followed.offered:
            self._decline(request, followed)
        return followed.offered

    def init_load_back(self, params: Any) -> Any:
        if (followed := self.requests.get(params.req.rid)) is None or not followed.offered:
            return super().init_load_back(params)
        return self._allocated(params.req, followed), params.req.last_node

    @never_raises(lambda: 0)
    def _allocated(self, request: Any, followed: Followed) -> int:
        """Take slots for what was promised; return their number, or 0 if SGLang has none left."""
        allocator, tokens = self.token_to_kv_pool_allocator, followed.offered
        if (short := tokens - allocator.available_size()) > 0:
            self.evict(EvictParams(num_tokens=short))
        if (slots := allocator.alloc(tokens)) is None:
            self._decline(request, followed)
            return 0
        try:
            prefix = self.path_device_indices(request.last_node)[: followed.exact]
            held = torch.cat([prefix.to(torch.int64), slots.to(torch.int64)]).tolist()
            self._scheduler.update_state_after_alloc(RequestView(followed.number, request, tokens), held)
        except Exception:
            allocator.free(slots)
            followed.offered = 0
            raise
        followed.slots, followed.is_due = slots.to(torch.int64), True
        return tokens

    def _decline(self, request: Any, followed: Followed) -> None:
        followed.offered = 0
        self._scheduler.update_state_after_alloc(RequestView(followed.number, request, 0), [])

    def load_back_is_cache_owned(self) -> bool:
        """False: the slots are the request's, and are freed with it."""
        return self._scheduler is None

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        if (followed := self.requests.get(req.rid)) is None or followed.slots is None:
            stock: torch.Tensor = super().prefix_device_indices(req)
            return stock
        path = self.path_device_indices(req.last_node)[: followed.exact]
        return torch.cat([path, followed.slots.to(path.dtype)])[: req.prefix_len]

    def checkpoint(self, req: Any, *, up_to: int, **options: Any) -> None:
        exact = up_to
        if (followed := self.requests.get(req.rid)) is not None:
            # What the request shares with the tree already stays shared.
            exact = max(self._runtime.active_plans.publishable(followed.number, up_to), req.kv.cache_protected_len)
            if req.finished():
                self._ended(req, up_to)
        super().checkpoint(req, up_to=min(up_to, exact), **options)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        if req.rid in self.requests:
            # Without a checkpoint a finished request leaves nothing. A retracted one is looked up again.
            if req.finished():
                self._ended(req, 0)
            else:
                self.requests[req.rid].slots = None
        super().on_release(req, checkpointed=checkpointed)

    def release_aborted_request(self, handle: Any) -> None:
        """Forget a request that ended while it waited: it has a plan alone."""
        if (followed := self.requests.pop(handle.rid, None)) is not None and self._scheduler is not None:
            self._scheduler.request_finished(SimpleNamespace(request_id=followed.number), [])
        super().release_aborted_request(handle)

    @never_raises(lambda: None)
    def _ended(self, request: Any, tokens: int) -> None:
        """Record the end, and have what lies in the request's row saved: SGLang frees it after this call."""
        number = self.requests.pop(request.rid).number
        slots: list[int] = self.req_to_token_pool.req_to_token[request.kv.req_pool_idx, :tokens].tolist()
        if self._scheduler.ended(RequestView(number, request), slots):
            self._worker.take_saves(number)
        self._runtime.active_plans.released(number)
        self._scheduler.give_receipt(number, request)

    def reset(self) -> None:
        """As SGLang's. Donors are forgotten too: who flushes the cache wants to find nothing."""
        super().reset()
        self._forget()

    @never_raises(lambda: None)
    def _forget(self) -> None:
        if self._scheduler is None:
            return
        self._scheduler.forget_donors()
        if self._runtime.weights is not None:
            self._runtime.weights.prefix_cache_reset()


def cache_of(context: Any) -> Any:
    """Return a prefix cache for SGLang's TreeCacheBuildContext. What is refused is logged by name and served as stock;
    raises nothing of its own."""
    runner = context.tp_worker.model_runner
    refusal = engine_refusal_of(context.server_args) or model_refusal_of(runner)
    try:
        if refusal is None:
            return _attached(context, runner)
    except ConfigurationError as error:
        logger.error("KV reuse is off: %s", error)
        refusal = "settings_invalid"
    except Exception as error:
        logger.warning("KV reuse is off: %s", error, exc_info=not isinstance(error, LayoutError))
        refusal = error.reason if isinstance(error, LayoutError) else "engine_layout"
    logger.warning("KV is not reused (%s). %s", refusal, advice(refusal, Scope.SGLANG))
    return default_radix_cache_factory(context)


def _attached(context: Any, runner: Any) -> Any:
    """The cache with both halves of the connector. Raises LayoutError for a model or caches that are refused."""
    settings = load_settings()
    engine = from_server_args(context.server_args, context.model_config, lambda: type(runner.attn_backend).__name__)
    runtime, scheduler, owner = runtime_for(engine), SglangScheduler(engine), find_scheduler()
    cache = create_unified_radix_cache(context, cache_class=SemBlendRadixCache)
    worker = SglangWorker(engine, runner, settings, scheduler, cache.requests)
    worker.retract = SchedulerHooks(owner, worker.note_requests).retract
    cache._worker, cache._runtime, cache._scheduler = worker, runtime, scheduler  # it serves by these from now on
    logger.info("KV reuse: policy %s, host_bytes %d", settings.policy.value, settings.host_bytes)
    return cache
