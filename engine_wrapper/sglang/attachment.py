"""Makes the prefix cache that SGLang asks its backend `semblend` for: SemBlend's where it can serve, else its own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.registry import default_radix_cache_factory

from engine_wrapper.sglang.engine_spec import from_server_args
from engine_wrapper.sglang.refusals import engine_refusal_of, model_refusal_of
from semblend_trt.config import load_settings
from semblend_trt.errors import ConfigurationError, LayoutError
from semblend_trt.outcome import Scope, advice
from semblend_trt.runtime import runtime_for

if TYPE_CHECKING:
    from semblend_trt.connector.engine_spec import EngineSpec

logger = logging.getLogger("sglang.semblend")


def cache_of(context: Any) -> Any:
    """Return a prefix cache for SGLang's TreeCacheBuildContext. What is refused is logged by name and served as stock;
    raises nothing of its own."""
    runner = context.tp_worker.model_runner
    try:
        refusal = engine_refusal_of(context.server_args) or model_refusal_of(runner)
        if refusal is None:
            return _attached(context, runner)
    except ConfigurationError as error:
        logger.error("KV reuse is off: %s", error)
        refusal = "settings_invalid"
    except LayoutError as error:
        logger.warning("KV reuse is off: %s", error)
        refusal = error.reason
    except Exception:
        logger.exception("KV reuse is off: SGLang is laid out in an unknown way")
        refusal = "engine_layout"
    logger.warning("KV is not reused (%s). %s", refusal, advice(refusal, Scope.SGLANG))
    return default_radix_cache_factory(context)


def _attached(context: Any, runner: Any) -> Any:
    """The cache with both halves of the connector; a refused model has SGLang's own."""
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    from engine_wrapper.sglang.hooks import Retraction, find_scheduler, watch_requests
    from engine_wrapper.sglang.radix_cache import SemBlendRadixCache
    from engine_wrapper.sglang.requests import SglangScheduler
    from engine_wrapper.sglang.worker import SglangWorker

    load_settings()

    def backend() -> str | None:
        found = getattr(runner, "attn_backend", None)
        return None if found is None else type(found).__name__

    arguments = context.server_args
    engine: EngineSpec = from_server_args(arguments, context.model_config, backend)
    runtime = runtime_for(engine)
    scheduler = SglangScheduler(engine)
    cache = create_unified_radix_cache(context, cache_class=SemBlendRadixCache)
    owner = find_scheduler()
    retraction = Retraction(owner)
    worker = SglangWorker(engine, runner, arguments, scheduler, cache.requests, retraction.retract)
    if runtime.refusal is None and runtime.pool is not None:
        cache.attach(scheduler, worker, runtime)
        watch_requests(owner, worker.note_requests)
        settings = load_settings()
        logger.info("KV reuse: policy %s, host_bytes %d", settings.policy.value, settings.host_bytes)
        return cache
    worker.undo()
    retraction.undo()
    refusal = runtime.refusal or "pool_layout"
    raise LayoutError(refusal, f"the model or its caches are refused ({refusal})")
