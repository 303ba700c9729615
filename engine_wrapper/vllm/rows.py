"""The active rows of a forward through vLLM's own layers and its own attention.

Every run of neighbouring positions is a sequence of its own to the attention backend: the blocks of its request, its
rows as queries, and as many keys as its last position. So no kernel of ours is needed, and every model whose layers
vLLM runs can be planned.

Facts: vLLM, `v1/attention/backend.py` (CommonAttentionMetadata), `forward_context.py`, and the decoders under
`model_executor/models/` (0.25.1 to 0.32): a layer is called with positions, hidden rows and residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from engine_wrapper.layout_error import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_wrapper.course import Checkpoint, Stage
    from engine_wrapper.layer_schedule import LayerSchedule
    from kernels.layout import KvGeometry, LayeredPool
    from kernels.sparse_prefill import SequenceRows
    from semblend_trt.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Decoder:
    """vLLM's decoder with what its attention needs: the caches' names by layer, their attention modules, and the
    builder of the backend's metadata. `max_runs`: sequences that the backend has made room for, None for any number."""

    decoder: Any
    names: tuple[str, ...]
    attention: tuple[Any, ...]
    builder: Any
    pool: LayeredPool
    geometry: KvGeometry
    max_runs: int | None


class VllmRows:
    """Rows between two layers (`engine_wrapper.layer_loop.LayerRows`). Use it within vLLM's forward context, whose
    metadata it replaces; `restore` gives them back."""

    def __init__(self, parts: Decoder, schedule: LayerSchedule) -> None:
        self._parts = parts
        self._hidden = parts.decoder.embed_input_ids(schedule.token_ids)
        self._residual: torch.Tensor | None = None
        self._positions = schedule.positions
        self._compared: int | None = None
        context = get_forward_context()
        self._context, self._kept = context, (context.attn_metadata, context.slot_mapping)

    def restore(self) -> None:
        """The forward context is vLLM's own again."""
        self._context.attn_metadata, self._context.slot_mapping = self._kept

    def enter(self, stage: Stage) -> None:
        """Drops the rows that the stage does not keep."""
        if stage.keep is not None:
            self._hidden, self._positions = (
                each.index_select(0, stage.keep) for each in (self._hidden, self._positions)
            )
            if self._residual is not None:
                self._residual = self._residual.index_select(0, stage.keep)
        metadata, slots = self._metadata(stage.sequences)
        self._context.attn_metadata = dict.fromkeys(self._parts.names, metadata)
        self._context.slot_mapping = dict.fromkeys(self._parts.names, slots)

    def run(self, layer: int) -> None:
        """Runs a layer, or what is left of it behind a checkpoint."""
        if layer != self._compared:
            self._run(layer)

    def compare(self, checkpoint: Checkpoint, ranks: Ranks) -> torch.Tensor:
        """Runs the checkpoint's layer for all rows; the deviations are taken before their K and V are written."""
        geometry, found = self._parts.geometry, list[torch.Tensor]()

        def watch(_: Any, arguments: tuple[Any, ...]) -> None:
            keys, values = (each.view(-1, geometry.kv_heads, geometry.head_dim) for each in arguments[1:3])
            found.append(checkpoint.deviations(keys, values, self._parts.pool, geometry, ranks))  # type: ignore[arg-type]

        hook = self._parts.attention[checkpoint.layer].register_forward_pre_hook(watch)
        try:
            self._run(checkpoint.layer)
        finally:
            hook.remove()
        self._compared = checkpoint.layer
        return found[0]

    def output(self, rows: torch.Tensor) -> torch.Tensor:
        """The final norm of some rows, int64; returns [len(rows), hidden]."""
        assert self._residual is not None
        normed: torch.Tensor
        normed, _ = self._parts.decoder.norm(self._hidden.index_select(0, rows), self._residual.index_select(0, rows))
        return normed

    def _run(self, layer: int) -> None:
        self._hidden, self._residual = self._parts.decoder.layers[layer](self._positions, self._hidden, self._residual)

    def _metadata(self, sequences: Sequence[SequenceRows]) -> tuple[Any, torch.Tensor]:
        """The backend's metadata for these rows, and the slots of their K and V, int64 [rows]."""
        size, device = self._parts.geometry.block_size, self._positions.device
        places = [each.host_positions.numpy() for each in sequences]
        tables = [each.block_ids.cpu().numpy() for each in sequences]
        slots = np.concatenate(
            [table[own // size] * size + own % size for own, table in zip(places, tables, strict=True)]
        )
        runs = [np.split(own, np.flatnonzero(np.diff(own) != 1) + 1) for own in places]
        lengths = np.array([len(run) for own in runs for run in own])
        ends = np.array([run[-1] + 1 for own in runs for run in own])
        if self._parts.max_runs is not None and len(ends) > self._parts.max_runs:
            raise LayoutError(
                "too_many_runs", f"{len(ends)} runs of rows; the backend has room for {self._parts.max_runs}"
            )
        table = np.zeros((len(ends), max(map(len, tables))), dtype=np.int32)
        row = 0
        for own, blocks in zip(runs, tables, strict=True):
            table[row : row + len(own), : len(blocks)] = blocks
            row += len(own)
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        seq_lens, slot_mapping = torch.from_numpy(ends.astype(np.int32)), torch.from_numpy(slots).to(device)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(device),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(ends),
            num_actual_tokens=len(slots),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=torch.from_numpy(table).to(device),
            slot_mapping=slot_mapping,
            causal=True,
            positions=self._positions,
        )
        return self._parts.builder.build(0, common), slot_mapping
