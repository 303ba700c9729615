"""The worker half inside vLLM: our own one for every engine, over vLLM's caches and its model runner."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine_wrapper.attach import note_evidence
from engine_wrapper.vllm.layers import in_order, layered_pool
from engine_wrapper.vllm.planned_forward import PlannedForward
from engine_wrapper.vllm.rows import Decoder
from semblend_trt.connector import SemBlendKvConnectorWorker
from semblend_trt.connector.guarded_calls import never_raises
from semblend_trt.runtime import EngineMode, runtime_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_wrapper.vllm.arguments import EngineArguments
    from engine_wrapper.vllm.metadata import StepMetadata
    from kernels.layout import LayeredPool
    from semblend_trt.plan import SemanticKvPlan

logger = logging.getLogger(__name__)


class VllmWorker:
    """Its methods are called as vLLM calls a connector's; none raises into the engine.

    What was promised and cannot be had is reported as blocks that failed to load, which vLLM computes again.
    """

    def __init__(self, arguments: EngineArguments, vllm_config: Any) -> None:
        self._runtime = runtime_for(arguments)
        self._worker = SemBlendKvConnectorWorker(arguments)
        self._config = vllm_config
        self._forward: PlannedForward | None = None
        self._failed_blocks: set[int] = set()
        self._saving: dict[int, str] = {}

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Takes vLLM's caches as a pool and hooks its model; what is not known is refused, and vLLM serves as stock.

        Raises ConfigurationError when the memory asked for by our settings cannot be had.
        """
        pool = None if self._runtime.refusal is not None else self._pool_of(caches)
        if pool is None:
            self._runtime.refusal = self._runtime.refusal or "pool_layout"
            logger.warning("KV is not reused (%s); vLLM serves as without us", self._runtime.refusal)
            return
        self._worker.register_kv_caches(pool)  # type: ignore[arg-type]
        if self._runtime.pool is not None:
            self._hook(pool, caches)

    @never_raises(lambda: None)
    def start_load_kv(self, metadata: StepMetadata) -> None:
        """Applies the step's metadata: places plans' spans, on the current stream of the model runner."""
        if self._forward is not None:
            self._forward.step = metadata.step
        self._saving.update(metadata.saving)
        self._worker.bind_connector_meta(metadata.told)
        try:
            self._worker.start_load_kv(torch.cuda.current_stream() if torch.cuda.is_available() else None)
        except Exception:
            logger.exception("donors cannot be placed; what was promised is computed")
            self._runtime.faults["start_load_kv"] += 1
            for plan in metadata.told.plans:
                self._compute(plan)

    @never_raises(lambda: None)
    def wait_for_save(self, metadata: StepMetadata) -> None:
        """Ends the step. A plan that its forward has not executed would leave holes: vLLM computes it again."""
        for plan in self._runtime.active_plans.take_all(each.number for each in metadata.step.values()).values():
            self._runtime.faults["plan_not_executed"] += 1
            self._runtime.refusal = self._runtime.refusal or "plan_not_executed"
            self._fail(plan)
        self._worker.wait_for_save(None)

    @never_raises(lambda: None)
    def get_finished(self, metadata: StepMetadata) -> set[str] | None:
        """Begins to save requests that have ended; returns those, by vLLM's id, whose blocks may go now."""
        ended, _ = self._worker.get_finished(list(metadata.saving), [])
        return {self._saving.pop(number) for number in ended if number in self._saving} or None

    def take_failed_blocks(self) -> set[int]:
        """The blocks that were promised and not loaded, each told once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """Ends what is being saved, and leaves the model as it was found."""
        if self._forward is not None:
            self._forward.remove()
        self._worker.close()

    def _compute(self, plan: SemanticKvPlan) -> None:
        """Has our rows compute all that was promised, where they can: vLLM's own recovery is wrong under async
        scheduling (vllm#45138) and in the V2 runner (#49250)."""
        if self._forward is None or plan.execution.mode is not EngineMode.WRAPPER:
            self._fail(plan)
            return
        self._runtime.failed_loads.append(plan.request_id)
        self._runtime.active_plans.put(plan.without_spans("load_failed"))

    def _fail(self, plan: SemanticKvPlan) -> None:
        blocks = plan.target_block_ids or ()
        first, last = plan.num_computed_tokens // plan.block_size, -(-plan.prefix_end // plan.block_size)
        self._failed_blocks.update(blocks[first:last])
        self._runtime.active_plans.discard(plan.request_id)
        self._runtime.failed_loads.append(plan.request_id)

    def _pool_of(self, caches: Mapping[str, torch.Tensor]) -> LayeredPool | None:
        try:
            modules = self._config.compilation_config.static_forward_context
            names = in_order(caches)
            if names is None:
                return None
            first = modules[names[0]]
            block_size = int(self._config.cache_config.block_size)
            return layered_pool(caches, modules, first.num_kv_heads, first.head_size, block_size)
        except Exception:
            logger.exception("vLLM's caches cannot be examined")
            return None

    def _hook(self, pool: LayeredPool, caches: Mapping[str, torch.Tensor]) -> None:
        """Has plans executed in the model, once its first prompt has come out the same. Never raises: where that cannot
        be, nothing is reused."""
        try:
            runner = _model_runner()
            model, names = runner.get_model(), in_order(caches)
            assert names is not None
            modules = self._config.compilation_config.static_forward_context
            assert self._runtime.pool is not None
            decoder = model.model
            if len(decoder.layers) != len(names) or not callable(getattr(decoder, "embed_input_ids", None)):
                raise TypeError(f"the decoder {type(decoder).__name__} is laid out in another way")
            scheduling = self._config.scheduler_config
            parts = Decoder(
                decoder=decoder,
                names=tuple(names),
                attention=tuple(modules[name] for name in names),
                builder=runner.attn_groups[0][0].get_metadata_builder(0),
                pool=pool,
                geometry=self._runtime.pool.geometry,
                max_runs=int(scheduling.max_num_seqs) if pool.is_cuda else None,
            )
            sink = partial(note_evidence, self._runtime)
            self._forward = PlannedForward(
                model,
                lambda: list(runner.input_batch.req_ids),
                parts,
                self._runtime,
                self._fail,
                int(scheduling.max_num_batched_tokens),
                sink,
            )
        except Exception as error:
            logger.warning("KV is not reused: plans cannot be executed in this model: %s", error)
            self._runtime.faults["hook"] += 1
            self._runtime.refusal = self._runtime.refusal or "model_runner"


def _model_runner() -> Any:
    """The model runner that is registering its caches: the connector is handed nothing but them. Raises LookupError."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        owner = frame.f_locals.get("self")
        if hasattr(owner, "input_batch") and hasattr(owner, "attn_groups") and hasattr(owner, "get_model"):
            return owner
    raise LookupError("the model runner is of a kind that is not known")
