"""The sequences of one forward as an engine scheduled them, and its forwards once plans add rows to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_wrapper.layer_schedule import LayerSchedule, SequenceSlice, lowest_schedule, schedule_of, works_of
from engine_wrapper.lowest_layers import settled
from engine_wrapper.portions import Portion, portions
from kernels.sparse_prefill.rows import to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine_wrapper.layer_loop import EvidenceSink
    from engine_wrapper.sequence_work import SequenceWork
    from kernels.layout import KvGeometry
    from semblend_trt.plan import SemanticKvPlan


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one forward, by index: request id, first position and tokens of each; `contexts` come first.

    `input_ids`: [tokens], on the engine's device; only there are the newest tokens known.
    """

    request_ids: tuple[int, ...]
    begins: tuple[int, ...]
    lengths: tuple[int, ...]
    contexts: int
    input_ids: torch.Tensor

    def run(
        self,
        plans: Mapping[int, SemanticKvPlan],
        blocks: list[list[int]],
        geometry: KvGeometry,
        run: Callable[[LayerSchedule], torch.Tensor],
        lowest: Callable[[LayerSchedule], torch.Tensor],
        max_rows: int | None = None,
        evidence_sink: EvidenceSink | None = None,
        keys_per_row: int = 0,
    ) -> torch.Tensor:
        """The hidden rows that the engine scheduled, [tokens, hidden], in its order, in as many forwards as they need.

        `plans` by request id; `blocks`: every request's block ids. `run` gives the output rows of one schedule, and
        `lowest` runs one up to its checkpoint and gives the deviations found there; both get schedules on the engine's
        device. No forward has more than `max_rows` rows; `keys_per_row` as for
        `engine_wrapper.layer_schedule.works_of`. Raises PlanError when a plan does not fit its request, ValueError when
        a block is missing.
        """
        num_layers, device = geometry.num_layers, self.input_ids.device

        def below(work: SequenceWork, layer: int) -> torch.Tensor:
            return lowest(lowest_schedule(work, layer, num_layers).to(device))

        works = self.works(plans, blocks, geometry, keys_per_row)
        works = [settled(work, num_layers, max_rows, below, evidence_sink) for work in works]
        hidden = []
        for schedule, wanted in self.schedules(works, num_layers, max_rows):
            own = run(schedule)
            hidden.append(own if wanted is None else own.index_select(0, wanted))
        return torch.cat(hidden) if len(hidden) > 1 else hidden[0]

    def works(
        self, plans: Mapping[int, SemanticKvPlan], blocks: list[list[int]], geometry: KvGeometry, keys_per_row: int = 0
    ) -> list[SequenceWork]:
        """What each sequence computes; its newest tokens, where no plan knows them, are 0.

        `plans` by request id; `blocks`: every request's block ids. `keys_per_row` as for `works_of`. Raises PlanError
        when a plan does not fit its request.
        """
        slices = [
            self._slice(index, plans.get(request_id), blocks[index], geometry.block_size)
            for index, request_id in enumerate(self.request_ids)
        ]
        return works_of(slices, geometry.num_layers, keys_per_row)

    def schedules(
        self, works: list[SequenceWork], num_layers: int, max_rows: int | None = None
    ) -> list[tuple[LayerSchedule, torch.Tensor | None]]:
        """The layer schedules of forwards of at most `max_rows` rows (see `engine_wrapper.portions`), to be run in
        order, and which of each one's outputs the engine has asked for, int64, None for all. Both on the engine's
        device.

        `works` are the batch's, or what is left of them. Raises ValueError when a block is missing.
        """
        found, done = [], 0
        for part in portions(works, num_layers, max_rows):
            scheduled = sum(part.scheduled)
            found.append(self._schedule(part, self.input_ids[done : done + scheduled], num_layers))
            done += scheduled
        return found

    def _schedule(
        self, part: Portion, input_ids: torch.Tensor, num_layers: int
    ) -> tuple[LayerSchedule, torch.Tensor | None]:
        """`input_ids`: the engine's tokens of the part, which stand behind the plans' rows of each sequence."""
        device = input_ids.device
        ends = np.cumsum([len(work.positions) for work in part.works])
        own = [np.arange(end - count, end) for end, count in zip(ends, part.scheduled, strict=True)]
        schedule = schedule_of(part.works, num_layers).to(device)
        tokens = schedule.token_ids.to(input_ids.dtype)
        tokens[to_device(torch.from_numpy(np.concatenate(own)), device)] = input_ids
        asked = np.repeat([count > 0 for count in part.scheduled], [work.outputs for work in part.works])
        wanted = None if asked.all() else to_device(torch.from_numpy(np.flatnonzero(asked)), device)
        return replace(schedule, token_ids=tokens), wanted

    def _slice(self, index: int, plan: SemanticKvPlan | None, blocks: list[int], block_size: int) -> SequenceSlice:
        begin, length = self.begins[index], self.lengths[index]
        needed = -(-(begin + length) // block_size)
        tokens = (0,) * length if plan is None else tuple(plan.prompt_token_ids[begin : begin + length])
        return SequenceSlice(self.request_ids[index], begin, tokens, tuple(blocks[:needed]), plan)
