"""One call of TensorRT-LLM's decoder with plans: as many forwards as its rows need, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_wrapper.trtllm.planned_rows import PlannedRows, run_lowest, run_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from engine_wrapper.batch import Batch
    from engine_wrapper.layer_schedule import EvidenceSink, LayerSchedule
    from kernels.layout import KvGeometry
    from kernels.rope import RopeRotation
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.ranks import Ranks


@dataclass(frozen=True, slots=True)
class PlannedDecoder:
    """`forward` is the decoder's own, hooked, and `pool` where its KV goes. `ranks` run it together."""

    forward: Callable[..., torch.Tensor]
    pool: torch.Tensor
    geometry: KvGeometry
    rotation: RopeRotation
    ranks: Ranks

    def run(
        self,
        batch: Batch,
        plans: Mapping[int, SemanticKvPlan],
        blocks: list[list[int]],
        options: dict[str, Any],
        max_rows: int | None = None,
        evidence_sink: EvidenceSink | None = None,
    ) -> torch.Tensor:
        """The hidden rows that the engine scheduled, [tokens, hidden], in its order.

        `options` are those of its call, `blocks` every request's; no forward has more than `max_rows` rows. Raises
        PlanError when a plan does not fit its request, ValueError when a block is missing, LayoutError when the decoder
        calls its parts in another way.
        """

        def run(schedule: LayerSchedule) -> torch.Tensor:
            rows = PlannedRows(schedule, self.pool, self.geometry, self.rotation, self.ranks, evidence_sink)
            return run_rows(self.forward, options, schedule, rows)

        def lowest(schedule: LayerSchedule) -> torch.Tensor:
            rows = PlannedRows(schedule, self.pool, self.geometry, self.rotation, self.ranks, lowest=True)
            return run_lowest(self.forward, options, schedule, rows)

        return batch.run(plans, blocks, self.geometry, run, lowest, max_rows, evidence_sink)
