"""Makes the prefix cache that SGLang asks its backend `semblend` for: SemBlend's where it can serve, else its own."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.mem_cache.registry import create_unified_radix_cache, default_radix_cache_factory

from engine_wrapper.sglang.engine_spec import from_server_args
from engine_wrapper.sglang.hooks import SchedulerHooks, find_scheduler
from engine_wrapper.sglang.radix_cache import SemBlendRadixCache
from engine_wrapper.sglang.refusals import engine_refusal_of, model_refusal_of
from engine_wrapper.sglang.requests import SglangScheduler
from engine_wrapper.sglang.worker import SglangWorker
from semblend_trt.config import load_settings
from semblend_trt.errors import ConfigurationError, LayoutError
from semblend_trt.reasons import Scope, advice
from semblend_trt.runtime import runtime_for

logger = logging.getLogger("sglang.semblend")


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
    arguments, settings = context.server_args, load_settings()
    engine = from_server_args(arguments, context.model_config, lambda: type(runner.attn_backend).__name__)
    runtime, scheduler, owner = runtime_for(engine), SglangScheduler(engine), find_scheduler()
    cache = create_unified_radix_cache(context, cache_class=SemBlendRadixCache)
    worker = SglangWorker(engine, runner, arguments, settings, scheduler, cache.requests)
    refusal = runtime.refusal or (None if runtime.pool is not None else "pool_layout")
    if refusal is not None:
        worker.undo()
        raise LayoutError(refusal, f"the model or its caches are refused ({refusal})")
    worker.retract = SchedulerHooks(owner, worker.note_requests).retract
    cache.attach(scheduler, worker, runtime)
    logger.info("KV reuse: policy %s, host_bytes %d", settings.policy.value, settings.host_bytes)
    return cache
