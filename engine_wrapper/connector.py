"""The connector whose worker also attaches to the engine: `connector_module="engine_wrapper.connector"`.

Attached, it keeps blocks with approximate KV unpublished, and has a decoder that can be hooked compute only holes and
suffix. If nothing can be attached, it does what the stock connector does."""

from __future__ import annotations

import logging
from typing import Any

import torch

from engine_wrapper.kv_scales import digest_of
from engine_wrapper.trtllm.attachment import Attachment, attach_to_executor, scales_of
from engine_wrapper.trtllm.hooks import fail_requests, find_executor
from kernels.layout import PagedKv
from semblend_trt.connector import SemBlendKvConnectorScheduler as StockKvConnectorScheduler
from semblend_trt.connector import SemBlendKvConnectorWorker as StockKvConnectorWorker
from semblend_trt.connector.contract import never_raises
from semblend_trt.errors import LayoutError, SemBlendError
from semblend_trt.plan import EngineMode
from semblend_trt.runtime import Weights

logger = logging.getLogger(__name__)

# Blocks of an embedded engine's pool over which costs are measured, before it has requests.
_TIMED_BLOCKS = 16

__all__ = ["SemBlendKvConnectorScheduler", "SemBlendKvConnectorWorker"]


class SemBlendKvConnectorScheduler(StockKvConnectorScheduler):
    """The stock scheduler. Outside the embedded engine a request with approximate KV becomes a donor of a generation
    above 0, or none: its exact part alone is not saved."""

    @never_raises(lambda: False)
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Do as the stock scheduler's."""
        tracked = self._requests.get(int(request.request_id))
        if tracked is not None and tracked.plan is not None and tracked.intent is not None:
            is_part = not tracked.plan.is_exact and not tracked.intent.generation
            if is_part and self._runtime.engine is None:
                self._cancel_intent(tracked)
        return super().request_finished(request, cache_block_ids)


class SemBlendKvConnectorWorker(StockKvConnectorWorker):
    """The stock worker, which attaches to its engine once the caches are registered. `attachment`: what was attached to
    TensorRT-LLM's executor; None with the embedded engine."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.attachment: Attachment | None = None
        self._expected: list[int] = []  # requests of the plans that the next forward takes

    def _kv_scales(self) -> str | None:
        """Do as the stock worker's, from the attention of the executor that registers its caches; 1 if embedded."""
        if self._runtime.engine is not None and self.facts is not None:
            return digest_of((1.0,) * self.facts.num_layers)
        parts = find_executor(self)
        try:
            return digest_of(scales_of(None if parts is None else parts.decoder))
        except LayoutError as error:
            logger.warning("KV reuse is off: %s", error)
            return None

    def _attach(self, pool: torch.Tensor) -> None:
        runtime = self._runtime
        if runtime.engine is None:
            self.attachment = attach_to_executor(self, self._engine, self.facts, runtime, pool)
        elif runtime.pool is not None:  # else the worker has refused the caches
            # The runner waits for loads layer by layer, and reports what its checks find.
            runner, blocks = runtime.engine.model_runner, runtime.engine.block_manager
            if self.facts is not None and self._settings.min_saving > 0:
                kv = PagedKv(pool, torch.arange(min(len(pool), _TIMED_BLOCKS)), runtime.pool.geometry)
                runtime.costs = runner.measured_costs(kv, self.facts.rotation, runtime.engine.max_seq_len)
            runner.plan_source, runner.readiness = runtime.active_plans.take, runtime.readiness
            runner.evidence_sink = runtime.note_evidence
            runtime.readiness.is_awaited = runtime.publication_guard = True
            runtime.mode = EngineMode.WRAPPER
            runtime.engine_facts = {"manager": type(blocks).__name__, "decode_graphs": [runtime.engine.replays_decode]}
            runtime.tokens_left = 2 if runtime.engine.replays_decode else 1
            runtime.weights = weights = Weights(runner.model)
            blocks.publication, blocks.on_reset = runtime.active_plans, weights.prefix_cache_reset

    def start_load_kv(self, stream: torch.cuda.Stream | None) -> None:
        """Load as the stock worker, but raise nothing into TensorRT-LLM, which catches nothing here.

        If plans cannot be loaded, the wrapper computes all that they promise. Requests of others fail after the
        forward."""
        bound = self.get_connector_meta()
        plans = getattr(bound, "plans", ())
        try:
            super().start_load_kv(stream)
        except Exception:
            if self.attachment is None or self._runtime.ranks.size > 1:
                raise
            logger.exception("donors cannot be placed; what was promised is computed")
            self._runtime.faults["start_load_kv"] += 1
            for plan in plans:
                self._runtime.failed_loads.append(plan.request_id)
                if plan.execution.mode is EngineMode.WRAPPER:
                    self._runtime.active_plans.put(plan.without_spans("load_failed"))
                else:
                    self._runtime.active_plans.withhold(plan)
                    self._runtime.failed.add(plan.request_id)
        self._expected = [plan.request_id for plan in plans]

    def wait_for_save(self, stream: torch.cuda.Stream | None) -> None:
        """End this iteration's loads, and fail the requests of plans that were not executed: their KV has holes.

        Raises SemBlendError, which fails every running request, if TensorRT-LLM cannot fail one by itself."""
        plans, failed = self._runtime.active_plans, self._runtime.failed
        expected = self._expected if self.attachment is not None and self._runtime.mode is EngineMode.WRAPPER else ()
        if left := [plan for each in expected if (plan := plans.take(each)) is not None]:
            self._runtime.faults["plan_not_executed"] += 1
            self._runtime.refusal = self._runtime.refusal or "plan_not_executed"
            for plan in left:
                plans.withhold(plan)
                failed.add(plan.request_id)
        if failed:
            executor, ids = None if self.attachment is None else self.attachment.executor, sorted(failed)
            failed.clear()
            message = f"the plans of requests {ids} were not executed, and their KV has holes"
            if not fail_requests(executor, ids, message):
                raise SemBlendError(message)
        super().wait_for_save(stream)

    def close(self) -> None:
        """Close as the stock worker. Leaves the engine as it was found."""
        if self.attachment is not None:
            self.attachment.remove()
            self.attachment = None
            self._runtime.publication_guard, self._runtime.mode = False, EngineMode.STOCK
        super().close()
