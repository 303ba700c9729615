"""The active rows of a forward through fused layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_wrapper.begun_layer import BegunLayer
from engine_wrapper.fused_layers import FusedDecoder, PagedAttend, RowTables
from kernels.sparse_prefill import write_rows

if TYPE_CHECKING:
    import torch

    from engine_wrapper.layer_schedule import DeviationCheck, LayerSchedule, Stage
    from semblend_trt.ranks import Ranks


class FusedRows:
    """As `engine_wrapper.plain_rows.PlainRows`; a check's layer goes no further than the projections before it has
    decided, so that dropped rows never attend there."""

    def __init__(self, decoder: FusedDecoder, schedule: LayerSchedule) -> None:
        self._decoder = decoder
        self._positions = schedule.positions
        # The hidden rows are residual + delta; while heads are set, a layer's projected rows, residual alone.
        self._residual = decoder.embed(schedule.token_ids)
        self._delta: torch.Tensor | None = None
        self._heads: torch.Tensor | None = None
        self._tables: RowTables | None = None

    def enter(self, stage: Stage) -> None:
        self._stage = stage
        self._attend = PagedAttend(self._decoder, stage.sequences)
        if self._tables is None:
            self._tables = self._decoder.tables(self._positions, self._attend.slots())
        if stage.keep is None:
            return
        self._tables = self._tables.keep(stage.keep)
        self._residual = self._residual.index_select(0, stage.keep)
        self._delta = None if self._delta is None else self._delta.index_select(0, stage.keep)
        self._heads = None if self._heads is None else self._heads.index_select(0, stage.keep)

    def run(self, layer: int) -> None:
        assert self._tables is not None
        heads, self._heads = self._heads, None
        if heads is None:
            heads = self._decoder.project(layer, self._delta, self._residual, self._tables)
        self._delta = self._decoder.mix(layer, self._attend(layer, heads), self._residual)

    def compare(self, check: DeviationCheck, ranks: Ranks) -> torch.Tensor:
        assert self._tables is not None
        decoder, layer = self._decoder, check.layer
        self._heads = decoder.project(layer, self._delta, self._residual, self._tables.without_slots())
        self._delta = None
        keys, values = decoder.keys_and_values(self._heads)
        deviations = check.deviations(keys, values, decoder.pool, decoder.geometry, ranks)
        write_rows(keys, values, decoder.pool, layer, self._stage.sequences, decoder.geometry)
        return deviations

    def begun(self, layer: int, keep: torch.Tensor | None) -> BegunLayer:
        """Some of the rows, or all, behind `compare` at `layer`."""
        assert self._heads is not None
        return BegunLayer(layer, self._residual, self._heads).keep(keep)

    def output(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._delta is not None
        return self._decoder.finish(self._delta, self._residual, rows)
