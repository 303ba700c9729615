"""What one forward of TensorRT-LLM's engine runs, read from what it hands to the model.

Facts: NVIDIA/TensorRT-LLM, `_torch/attention_backend/interface.py`, `AttentionMetadata` (1.1 to 1.3), and
`_torch/attention/backends/interface.py` (main): sequences stand in one row of tokens, those in context first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine_wrapper.layer_schedule import LayerSchedule, SequenceSlice, schedule_of, works_of
from engine_wrapper.portions import Portion, portions
from engine_wrapper.trtllm.layout_error import LayoutError
from kernels.sparse_prefill.rows import to_device

if TYPE_CHECKING:
    from collections.abc import Mapping

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

    @classmethod
    def of_call(cls, options: Mapping[str, Any]) -> Batch:
        """The batch of a call of the decoder's forward. Raises LayoutError when it cannot be read, or asks for more."""
        for name in ("inputs_embeds", "lora_params", "spec_metadata", "mrope_config"):
            value = options.get(name)
            if value is not None and value != {}:
                raise LayoutError("model_call", f"the model was called with {name}, which plans cannot follow")
        metadata, input_ids = options.get("attn_metadata"), options.get("input_ids")
        try:
            lengths = tuple(map(int, metadata.seq_lens.tolist()))  # type: ignore[union-attr]
            begins = tuple(map(int, metadata.kv_cache_params.num_cached_tokens_per_seq))  # type: ignore[union-attr]
            ids = tuple(map(int, metadata.request_ids))  # type: ignore[union-attr]
            contexts = int(metadata.num_contexts)  # type: ignore[union-attr]
        except (AttributeError, TypeError, ValueError) as error:
            raise LayoutError("model_call", f"the attention metadata cannot be read: {error}") from error
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 1 or len(input_ids) != sum(lengths):
            raise LayoutError("model_call", f"input_ids are not the {sum(lengths)} tokens that the metadata speaks of")
        if not len(ids) == len(begins) == len(lengths) or contexts > len(ids):
            raise LayoutError("model_call", "the metadata speaks of another number of sequences in each field")
        return cls(ids, begins, lengths, contexts, input_ids)

    def works(
        self, plans: Mapping[int, SemanticKvPlan], blocks: list[list[int]], geometry: KvGeometry
    ) -> list[SequenceWork]:
        """What each sequence computes; its newest tokens, where no plan knows them, are 0.

        `plans` by request id; `blocks`: every request's block ids. Raises PlanError when a plan does not fit its
        request.
        """
        slices = [
            self._slice(index, plans.get(request_id), blocks[index], geometry.block_size)
            for index, request_id in enumerate(self.request_ids)
        ]
        return works_of(slices, geometry.num_layers)

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
