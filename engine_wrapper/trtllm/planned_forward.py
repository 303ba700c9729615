"""Executes plans in TensorRT-LLM's own decoder, once its first prompt has come out the same."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from engine_wrapper.self_check import LayoutError
from engine_wrapper.trtllm.batch import batch_of_call
from engine_wrapper.trtllm.decoder_hooks import DecoderHooks
from engine_wrapper.trtllm.planned_decoder import PlannedDecoder
from engine_wrapper.trtllm.self_check import SelfCheck
from semblend_trt.plan import EngineMode

if TYPE_CHECKING:
    import torch

    from engine_wrapper.batch import Batch
    from engine_wrapper.layer_schedule import EvidenceSink
    from engine_wrapper.trtllm.executor_parts import ExecutorParts
    from kernels.rope import RopeRotation
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)


class PlannedForward:
    """In the place of the decoder's forward. Batches without a plan go on to it untouched.

    Until the self-check has passed, the runtime stays in stock mode, so that no plan needs this; when it fails, the
    decoder is given back as it was found. A plan that cannot be executed fails its batch, because the engine skips what
    the plan promised; nothing is reused from then on.
    """

    def __init__(
        self, parts: ExecutorParts, runtime: Runtime, pool: torch.Tensor, rotation: RopeRotation, sink: EvidenceSink,
        max_rows: int | None = None,
    ) -> None:  # fmt: skip
        """`max_rows`: how many tokens the engine has made room for in one forward."""
        assert runtime.pool is not None
        self._manager = parts.manager
        self._runtime = runtime
        self._sink, self._max_rows = sink, max_rows
        self._hooks = DecoderHooks(parts.decoder, self._forward)
        self._decoder = PlannedDecoder(self._hooks.stock, pool, runtime.pool.geometry, rotation, runtime.ranks)
        self._check: SelfCheck | None = SelfCheck(self._decoder)

    def install(self) -> None:
        """Hooks the decoder. Raises, with the decoder untouched, when that is not possible."""
        self._hooks.install()

    def remove(self) -> None:
        """Leaves the decoder as it was found."""
        self._hooks.remove()
        self._check = None

    def _forward(self, *arguments: Any, **options: Any) -> Any:
        plans = self._take(options.get("attn_metadata"))
        if plans:
            return self._planned(plans, options)
        hidden = self._hooks.stock(*arguments, **options)
        if self._check is not None:
            self._prove(self._check, options, hidden)
        return hidden

    def _take(self, metadata: Any) -> dict[int, SemanticKvPlan]:
        """The plans pending for the batch's context requests."""
        if not len(self._runtime.active_plans):
            return {}
        contexts = list(metadata.request_ids)[: metadata.num_contexts]
        return self._runtime.active_plans.take_all(contexts)

    def _planned(self, plans: dict[int, SemanticKvPlan], options: dict[str, Any]) -> torch.Tensor:
        try:
            batch = batch_of_call(options)
            return self._decoder.run(batch, plans, self._blocks(batch), options, self._max_rows, self._sink)
        except Exception:
            logger.exception("KV reuse is off from now on: a plan could not be executed")
            self._runtime.faults["planned_forward"] += 1
            self._runtime.refusal = self._runtime.refusal or "planned_forward"
            raise

    def _prove(self, check: SelfCheck, options: dict[str, Any], hidden: torch.Tensor) -> None:
        """Runs the self-check on the first batch that allows it; never raises."""
        try:
            batch = batch_of_call(options)
            if not check.fits(batch):
                return
            check.run(batch, options, hidden, self._blocks(batch)[0])
        except Exception as error:
            reason = error.reason if isinstance(error, LayoutError) else "self_check"
            logger.warning("plans are not executed on this engine (%s): %s", reason, error)
            self._runtime.faults["self_check"] += 1
            self.remove()
            return
        self._check = None
        self._runtime.mode = EngineMode.WRAPPER
        logger.info("plans are executed on this engine: its first prompt came out the same")

    def _blocks(self, batch: Batch) -> list[list[int]]:
        found = self._manager.get_batch_cache_indices(list(batch.request_ids))
        return [list(map(int, ids)) for ids in found]
