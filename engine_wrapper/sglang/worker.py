"""The worker half inside SGLang: the worker half for every engine, over SGLang's pool and its model runner.

SGLang calls `ModelRunner.forward` once a step, and the hook here is around it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from engine_wrapper.patches import replace_method
from engine_wrapper.sglang.planned_forward import PlannedForward
from engine_wrapper.sglang.rows import Decoder
from kernels.layout import LayeredPool
from semblend_trt.connector import SemBlendKvConnectorWorker
from semblend_trt.connector.contract import never_raises
from semblend_trt.errors import LayoutError
from semblend_trt.plan import EngineMode
from semblend_trt.runtime import Weights, runtime_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engine_wrapper.sglang.requests import Requests, Scheduled, SglangScheduler
    from semblend_trt.config import Settings
    from semblend_trt.connector.contract import SchedulerOutput
    from semblend_trt.connector.engine_spec import EngineSpec

logger = logging.getLogger(__name__)

# In the names of SGLang's requests that write weights, or run a method of the scheduler that may.
_WRITING = ("Weight", "MemoryOccupation", "Rpc")


def pool_of(runner: Any) -> LayeredPool:
    """Return SGLang's pool, whose blocks are single slots: [slots, kv_heads, 1, head_dim] in each layer."""
    pool, layers = runner.token_to_kv_pool, range(len(runner.model.model.layers))
    kinds = (pool.get_key_buffer, pool.get_value_buffer)
    return LayeredPool(*(tuple(kind(layer).unsqueeze(2) for layer in layers) for kind in kinds))


class _Worker(SemBlendKvConnectorWorker):
    def _attach(self, _: Any) -> None:
        if self._runtime.pool is not None:
            # The prefix cache may give a request an equal slot for its own one.
            self._runtime.pool = replace(self._runtime.pool, exchanges_blocks=True)


class SglangWorker:
    """Serves SGLang's forwards; no method raises into the engine. `retract` gets the ids of requests whose promised
    tokens could not be had in any way."""

    def __init__(
        self, engine: EngineSpec, runner: Any, settings: Settings, scheduler: SglangScheduler, requests: Requests
    ) -> None:
        """Take SGLang's pool and hook its runner. Raises ConfigurationError or LayoutError."""
        self._runtime = runtime_for(engine)
        self._scheduler, self._requests = scheduler, requests
        self.retract: Callable[[list[str]], None] = lambda _: None
        self._worker, pool = _Worker(engine), pool_of(runner)
        self._worker.register_kv_caches(pool)  # type: ignore[arg-type]
        if (refusal := self._runtime.refusal) is not None or self._runtime.pool is None or self._worker.facts is None:
            refusal = refusal or "pool_layout"
            raise LayoutError(refusal, f"the model or its caches are refused ({refusal})")
        rotation, longest = self._worker.facts.rotation, int(runner.model_config.context_len)
        parts = Decoder(runner, runner.model.model, pool, self._runtime.pool.geometry, rotation, longest)
        assert engine.max_num_tokens is not None
        self._forward = PlannedForward(parts, self._runtime, engine.max_num_tokens, is_timed=settings.min_saving > 0)
        self._runtime.weights, self._runtime.publication_guard = Weights(runner.model), True
        self._stock = runner.forward
        self._undo = replace_method(runner, "forward", self._around)

    def _around(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        step = self._begin(batch)
        output = self._stock(batch, *arguments, **options)
        self._end(step, batch)
        return output

    def _begin(self, batch: Any) -> Sequence[Scheduled]:
        """Place donors' KV and compute what plans promised, before SGLang's forward. Requests whose promised tokens
        nothing has computed begin again."""
        step: list[Scheduled] = []
        try:
            output, step = self._requests.step(batch)
            if step:
                self._place(output, step, batch)
        except Exception:
            logger.exception("KV reuse is off from now on: a step could not be begun")
            self._runtime.faults["step_unreadable"] += 1
            self._runtime.refusal = self._runtime.refusal or "step_unreadable"
        due = [rid for rid in batch.rids or () if rid in self._requests and self._requests[rid].is_due]
        if due:
            self._runtime.faults["plan_not_executed"] += 1
            self._runtime.refusal = self._runtime.refusal or "plan_not_executed"
            self.retract(due)
            for rid in due:
                self._requests[rid].is_due = False
        return step

    def _place(self, output: SchedulerOutput, step: Sequence[Scheduled], batch: Any) -> None:
        metadata = self._scheduler.build_connector_meta(output)
        self._worker.bind_connector_meta(metadata)
        try:
            self._worker.start_load_kv(torch.cuda.current_stream() if torch.cuda.is_available() else None)
        except Exception:
            logger.exception("donors cannot be placed; what was promised is computed")
            self._runtime.faults["start_load_kv"] += 1
            for plan in metadata.plans:
                self._runtime.failed_loads.append(plan.request_id)
                self._runtime.active_plans.put(plan.without_spans("load_failed"))
        plans = self._runtime.active_plans.take_all(each.number for each in step)
        for rid in self._forward.run(plans, step, batch) if plans else ():
            self._requests[rid].is_due = False

    @never_raises(lambda: None)
    def _end(self, step: Sequence[Scheduled], batch: Any) -> None:
        """End the step: prove our rows by its prompt, and go on with saves."""
        if not step:
            return
        if self._runtime.mode is EngineMode.STOCK and self._runtime.refusal is None:
            self._forward.prove(step, batch)
        self._worker.wait_for_save(None)
        self.take_saves()

    def note_requests(self, requests: Iterable[Any]) -> None:
        """Suspect the weights after requests of SGLang's kinds that may write them."""
        weights = self._runtime.weights
        if weights is not None and any(part in type(each).__name__ for each in requests for part in _WRITING):
            weights.suspect()

    @never_raises(lambda: None)
    def take_saves(self, *ended: int) -> None:
        """Hear of saves that have ended, and begin those of `ended` requests: SGLang frees their slots after this."""
        self._worker.get_finished(list(ended), [])

    def drain(self) -> None:
        """Wait until what has ended is saved."""
        if self._worker.saver is not None:
            self._worker.saver.drain()
        self.take_saves()

    def close(self) -> None:
        """Leave the runner as it was found, and free the donors."""
        self._undo()
        self._worker.close()
