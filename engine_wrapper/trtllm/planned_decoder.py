"""One call of TensorRT-LLM's decoder with plans: as many forwards as its rows need, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine_wrapper.layer_schedule import lowest_schedule
from engine_wrapper.lowest_layers import settled
from engine_wrapper.trtllm.planned_rows import PlannedRows, run_lowest, run_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine_wrapper.sequence_work import SequenceWork
    from engine_wrapper.sparse_forward import EvidenceSink
    from engine_wrapper.trtllm.batch import Batch
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

        def lowest(work: SequenceWork, layer: int) -> torch.Tensor:
            schedule = lowest_schedule(work, layer, num_layers).to(self.pool.device)
            rows = PlannedRows(schedule, self.pool, self.geometry, self.rotation, self.ranks, lowest=True)
            return run_lowest(self.forward, options, schedule, rows)

        num_layers = self.geometry.num_layers
        works = batch.works(plans, blocks, self.geometry)
        works = [settled(work, num_layers, max_rows, lowest, evidence_sink) for work in works]
        hidden = []
        for schedule, wanted in batch.schedules(works, num_layers, max_rows):
            rows = PlannedRows(schedule, self.pool, self.geometry, self.rotation, self.ranks, evidence_sink)
            own = run_rows(self.forward, options, schedule, rows)
            hidden.append(own if wanted is None else own.index_select(0, wanted))
        return torch.cat(hidden) if len(hidden) > 1 else hidden[0]
