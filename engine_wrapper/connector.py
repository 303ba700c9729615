"""The connector whose worker also attaches to the engine: `connector_module="engine_wrapper.connector"`.

With it attached the engine computes only holes and suffix, and blocks that hold approximate KV are never published.
Where the engine offers no place to attach, the connector stays as it is on a stock engine.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_wrapper.publication import PublicationGuard
from semblend_trt.connector import SemBlendKvConnectorScheduler
from semblend_trt.connector import SemBlendKvConnectorWorker as StockKvConnectorWorker
from semblend_trt.runtime import EngineMode, Runtime

if TYPE_CHECKING:
    import torch

    from semblend_trt.evidence import CheckEvidence

logger = logging.getLogger(__name__)

__all__ = ["SemBlendKvConnectorScheduler", "SemBlendKvConnectorWorker"]


class SemBlendKvConnectorWorker(StockKvConnectorWorker):
    """The stock worker, which attaches to its engine once the caches are registered."""

    # They do nothing, so an engine may replay CUDA graphs, which cannot call them.
    uses_layer_hooks = False

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        super().register_kv_caches(kv_cache_tensor)
        attach(self._runtime)


def attach(runtime: Runtime) -> bool:
    """Attaches plan execution and the publication guard to the runtime's engine; False leaves it untouched.

    Nothing is attached where the worker refused the caches. An engine can be attached to when it has a model runner
    with a `plan_source` and a block manager with a `publication`, as the embedded engine has. A runner with a
    `readiness` waits for loads layer by layer; for any other one `start_load_kv` orders them before the forward. One
    with an `evidence_sink` says what its checks found.
    """
    runner: Any = getattr(runtime.engine, "model_runner", None)
    blocks: Any = getattr(runtime.engine, "block_manager", None)
    if runtime.pool is None or not hasattr(runner, "plan_source") or not hasattr(blocks, "publication"):
        logger.warning("the engine offers no place to attach; only identical text from position 0 is reused")
        return False
    runner.plan_source = runtime.active_plans.take
    if hasattr(runner, "readiness"):
        runner.readiness = runtime.readiness
        runtime.readiness.is_awaited = True
    if hasattr(runner, "evidence_sink"):
        runner.evidence_sink = partial(_note, runtime)
    blocks.publication = PublicationGuard(runtime.active_plans, runtime.pool.geometry.block_size)
    runtime.publication_guard = True
    runtime.mode = EngineMode.WRAPPER
    return True


def _note(runtime: Runtime, evidence: CheckEvidence) -> None:
    """Keeps evidence for the scheduler. What a dropped plan had placed is written over: nothing approximate is left."""
    runtime.evidence.append(evidence)
    if evidence.is_dropped:
        runtime.active_plans.computed_whole(evidence.request_id)
