"""Which positions each layer computes, for every request of one iteration, and the loop that runs them.

A row's input is its output of the layer below, so a dropped row cannot come back. A schedule ends at a deviation check,
which decides which rows are dropped and gives the next schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kernels.attention_mass import attention_mass
from kernels.deviation import FreshRows, Move, deviation, relative, row_squares, squares
from kernels.layout import KvGeometry, LayeredPool, PagedKv, PoolLayer, all_to_device, layer_view, to_device
from kernels.rope import saturated, still
from kernels.sparse_prefill import SequenceRows, sparse_prefill

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from engine_wrapper.token_schedule import SequenceWork
    from kernels.layout import Pool
    from semblend_trt.plan import CheckEvidence
    from semblend_trt.ranks import Ranks

# Rows before the answer whose attention says what the answer reads.
MASS_ROWS = 64
EvidenceSink = Callable[["CheckEvidence"], None]


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers in which the same rows are active, from `first_layer` to the next stage's.

    `keep`: int64 [rows], sorted, the previous stage's rows that stay active; None keeps all. `sequences` cover the
    active rows in order."""

    first_layer: int
    keep: torch.Tensor | None
    sequences: tuple[SequenceRows, ...]

    @property
    def num_rows(self) -> int:
        return sum(sequence.count for sequence in self.sequences)

    @property
    def vectors(self) -> list[torch.Tensor]:
        """The stage's tensors, in the order in which `moved` takes them."""
        own = [] if self.keep is None else [self.keep]
        return own + [each for sequence in self.sequences for each in (sequence.positions, sequence.block_ids)]

    def moved(self, vectors: Iterator[torch.Tensor]) -> Stage:
        """Return the same stage with these copies of its tensors."""
        keep = None if self.keep is None else next(vectors)
        return Stage(self.first_layer, keep, tuple(each.moved(next(vectors), next(vectors)) for each in self.sequences))


@dataclass(frozen=True, slots=True)
class LayerSchedule:
    """The stages up to the next deviation check, or to the last layer.

    `output_rows`: int64, indices of the last stage's rows, in the executor's order. `token_ids`: int64 [rows of
    stages[0]]; empty in a schedule that continues within a layer, after a check. `mass`, if it is set, attends in
    every layer."""

    stages: tuple[Stage, ...]
    output_rows: torch.Tensor
    check: DeviationCheck | None
    token_ids: torch.Tensor
    mass: AttentionMass | None = None

    @property
    def positions(self) -> torch.Tensor:
        """The positions of the first stage's rows, int64 [rows]."""
        own = [sequence.positions for sequence in self.stages[0].sequences]
        return torch.cat(own) if len(own) > 1 else own[0]

    def layers_of_stages(self, num_layers: int) -> Iterator[tuple[Stage, range]]:
        """Yield each stage with its layers below the check; the last stage may have none."""
        bounds = [*(stage.first_layer for stage in self.stages), self.check.layer if self.check else num_layers]
        for stage, (first, last) in zip(self.stages, pairwise(bounds), strict=True):
            yield stage, range(first, last)

    def to(self, device: torch.device | str) -> LayerSchedule:
        """Return the schedule with its tensors on `device`, in one copy that the host does not wait for."""
        vectors = [self.output_rows, self.token_ids, *(each for stage in self.stages for each in stage.vectors)]
        moved = iter(all_to_device(vectors, device))
        outputs, tokens = next(moved), next(moved)
        stages = tuple(stage.moved(moved) for stage in self.stages)
        return LayerSchedule(stages, outputs, self.check, tokens, self.mass)


class AttentionMass:
    """The attention that the last rows of each work, `counts` of them, give to its tokens, over `layers`, the upper
    half. `works` are those of the forward; some row must be counted."""

    def __init__(self, works: Sequence[SequenceWork], counts: Sequence[int], num_layers: int) -> None:
        ends = np.cumsum([len(work.positions) for work in works]).tolist()
        reading = [each for each in zip(works, ends, counts, strict=True) if each[2]]
        self._sequences = _sequence_rows(
            [work.positions[-count:] for work, _, count in reading], [work for work, *_ in reading]
        )
        self._rows = torch.from_numpy(np.concatenate([np.arange(end - count, end) for _, end, count in reading]))
        self.layers = range(num_layers // 2, num_layers)
        self._found: torch.Tensor | None = None

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        kv: PoolLayer,
        sequences: Sequence[SequenceRows],
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Do as `kernels.sparse_prefill` for the forward's rows, and add what they give if `layer` is of `layers`."""
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if layer in self.layers else None
        attended = sparse_prefill(q, kv, sequences, scale, window, sinks, lse)
        if lse is not None:
            own, sums = self._counted(q, lse)
            self._found = attention_mass(own, kv, self._sequences, scale, sums, window, into=self._found)
        return attended

    def read(
        self, q: torch.Tensor, kv: PoolLayer, scale: float, window: int | None, sinks: torch.Tensor | None
    ) -> None:
        """Add what the forward's rows, [rows, heads, head_dim], give in one of `layers`, where others attended."""
        (own,) = self._counted(q)
        lse = own.new_empty(own.shape[:2], dtype=torch.float32)
        sparse_prefill(own, kv, self._sequences, scale, window, sinks, lse)
        self._found = attention_mass(own, kv, self._sequences, scale, lse, window, into=self._found)

    def _counted(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        """Return what belongs to the counted rows, of tensors that begin with the forward's."""
        if self._found is None:
            self._sequences = tuple(each.to(rows[0].device) for each in self._sequences)
            self._rows = to_device(self._rows, rows[0].device)
        return [each.index_select(0, self._rows) for each in rows]

    def totals(self, ranks: Ranks) -> tuple[torch.Tensor, ...]:
        """Return float32 [tokens up to the last row] of each work with a counted row, over all heads of all ranks.
        Some layer must have added to it."""
        assert self._found is not None
        total: torch.Tensor = ranks.total(self._found.sum(0))
        return torch.split(total, [each.last_position + 1 for each in self._sequences])


@dataclass(frozen=True, slots=True, eq=False)
class DeviationCheck:
    """The layer in which fresh K and V of some rows are compared with the pool's at their positions.

    That layer's K and V are computed and written for all active rows. One small read then decides, for all requests
    that this layer checks, which rows go on to its attention. `works` are the batch's."""

    layer: int
    num_layers: int
    works: tuple[SequenceWork, ...]

    @property
    def is_sample(self) -> bool:
        """True if single rows are compared, in a forward of their own."""
        return any(work.pending is not None and work.pending.sampled is not None for work in self.works)

    def deviations(
        self,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        pool: Pool,
        geometry: KvGeometry,
        ranks: Ranks,
        head_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return each checked token's deviation, float32 [tokens], on the pool's device, without waiting for it.

        `keys`, `values`: [active rows, kv_heads, head_dim], rotated, not in the pool yet; any strides. Without values
        `keys` are latent rows (MLA). If `ranks` share the KV heads, all get the deviation over all heads, to the bit,
        so that all decide alike. `head_scales`, float32 [kv_factor, kv_heads]: factors of the stored numbers if heads
        differ in them; there are no samples then. Raises ValueError if a position is beyond its request's blocks."""
        # What is compared is what would be stored.
        fresh = FreshRows(saturated(keys, pool.dtype), None if values is None else saturated(values, pool.dtype))
        # The donor's keys were rotated as they were placed into the pool, so the comparison turns them no more.
        no_turn = still(geometry.head_dim)
        if self.is_sample:
            sums = row_squares(fresh, *self._sampled(pool, geometry), self.layer)
        elif head_scales is not None:
            sums = _scaled_squares(self._moves(pool, geometry), fresh, self.layer, head_scales)
        elif ranks.size == 1:
            return deviation(self._moves(pool, geometry), fresh, self.layer, no_turn).amax(0)
        else:
            sums = squares(self._moves(pool, geometry), fresh, self.layer, no_turn)
        return relative(ranks.total(sums)).amax(0)

    def _sampled(self, pool: Pool, geometry: KvGeometry) -> tuple[torch.Tensor, PagedKv, torch.Tensor]:
        """Return the sampled rows' places, the blocks of all works in a row, and the rows' positions in these."""
        places, positions, first_row, first_block = [], [], 0, 0
        for work in self.works:
            active = work.active(self.layer)
            if work.pending is not None:
                sampled = work.pending.checked
                places.append((first_row + np.cumsum(active) - active)[sampled])
                positions.append(first_block * geometry.block_size + work.positions[sampled])
            first_row += int(np.count_nonzero(active))
            first_block += len(work.block_ids)
        rows, held = (torch.from_numpy(np.concatenate(each)) for each in (places, positions))
        return rows, PagedKv(pool, torch.cat([work.block_ids for work in self.works]), geometry), held

    def _moves(self, pool: Pool, geometry: KvGeometry) -> list[Move]:
        """Return the checked spans of all works, from their positions in the pool to the rows' places."""
        found, first_row = [], 0
        for work in self.works:
            active = work.active(self.layer)
            places = first_row + np.cumsum(active) - active
            first_row += int(np.count_nonzero(active))
            if work.pending is not None and work.pending.check.layer == self.layer:
                donor = PagedKv(pool, work.block_ids, geometry)
                found += [
                    Move(donor, int(work.positions[rows.start]), int(places[rows.start]), len(rows), turn=0)
                    for rows in work.pending.rows
                ]
        return found

    def decide(self, deviations: torch.Tensor) -> tuple[LayerSchedule, tuple[CheckEvidence, ...]]:
        """Return the schedule from this layer on, on the host, and the checks' evidence; wait for `deviations`. The
        first stage's `keep` are the active rows that go on."""
        read = deviations.cpu().numpy()
        works, evidence = [], []
        for work in self.works:
            if work.pending is not None and work.pending.check.layer == self.layer:
                own, read = np.split(read, [len(work.pending.checked)])
                work, found = work.decide(own)
                evidence.append(found)
            works.append(work)
        before = [work.active(self.layer) for work in self.works]
        return _schedule(works, self.layer, self.num_layers, before, torch.empty(0, dtype=torch.int64)), tuple(evidence)


def _scaled_squares(moves: Sequence[Move], fresh: FreshRows, layer: int, head_scales: torch.Tensor) -> torch.Tensor:
    """Do as `squares`, of what is stored times `head_scales`, float32 [kv_factor, kv_heads], head by head."""
    found, no_turn = [], still(fresh.k.shape[-1])  # as in `deviations`
    for head, scales in enumerate(head_scales.unbind(1)):
        part, own = slice(head, head + 1), []
        for move in moves:
            kv = move.source
            assert isinstance(kv, PagedKv)
            kinds = (layer_view(kv.pool, kv.geometry, layer, kind)[:, part] for kind in range(kv.geometry.kv_factor))
            geometry, pool = replace(kv.geometry, num_layers=1, kv_heads=1), LayeredPool(*((each,) for each in kinds))
            own.append(replace(move, source=replace(kv, pool=pool, geometry=geometry)))
        rows = FreshRows(fresh.k[:, part], None if fresh.v is None else fresh.v[:, part])
        found.append(squares(own, rows, 0, no_turn) * scales.square()[:, None])
    return torch.stack(found).sum(0)


def schedule_of(works: Sequence[SequenceWork], num_layers: int) -> LayerSchedule:
    """Return the schedule of one forward over `works`, its tensors on the host.

    Without a plan every layer computes the work's own positions. With one, the layers below the recompute boundary and
    below the check's layer run on all positions from `num_computed_tokens` on. The others run on holes, heads of spans,
    the slice, and the tokens that the check finds to deviate. No layer computes exact spans."""
    return _schedule(works, 0, num_layers, [np.ones(len(work.positions), dtype=bool) for work in works], _tokens(works))


def lowest_schedule(works: Sequence[SequenceWork], layer: int, num_layers: int) -> LayerSchedule:
    """Return the schedule, on the host, of all rows up to checked K and V of `layer`; it has no output rows."""
    stage = Stage(0, None, _sequence_rows([work.positions for work in works], works))
    check = DeviationCheck(layer, num_layers, tuple(works))
    return LayerSchedule((stage,), torch.empty(0, dtype=torch.int64), check, _tokens(works))


def _tokens(works: Sequence[SequenceWork]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([work.token_ids for work in works]))


def _schedule(
    works: Sequence[SequenceWork],
    first_layer: int,
    num_layers: int,
    before: list[npt.NDArray[np.bool_]],
    token_ids: torch.Tensor,
) -> LayerSchedule:
    """Return the schedule from `first_layer` on. `before`: the rows of each work that were active up to there."""
    checks = [work.pending.check.layer for work in works if work.pending is not None]
    end = min(checks, default=num_layers - 1)
    drops = {layer for work in works for layer in np.bincount(work.drops_at).nonzero()[0].tolist()}
    stages = []
    for layer in (first_layer, *sorted(layer for layer in drops if first_layer < layer <= end)):
        active = [work.active(layer) for work in works]
        stays = np.concatenate([now[was] for now, was in zip(active, before, strict=True)])
        keep = None if stays.all() else torch.from_numpy(np.flatnonzero(stays))
        positions = [work.positions[rows] for work, rows in zip(works, active, strict=True)]
        stages.append(Stage(layer, keep, _sequence_rows(positions, works)))
        before = active
    ends = np.cumsum([np.count_nonzero(rows) for rows in before])
    outputs = [np.arange(end - work.outputs, end) for end, work in zip(ends, works, strict=True)]
    check = DeviationCheck(min(checks), num_layers, tuple(works)) if checks else None
    return LayerSchedule(tuple(stages), torch.from_numpy(np.concatenate(outputs)), check, token_ids)


def _sequence_rows(
    positions: Sequence[npt.NDArray[np.int64]], works: Sequence[SequenceWork]
) -> tuple[SequenceRows, ...]:
    first_rows = np.cumsum([0, *map(len, positions)])
    return tuple(
        SequenceRows(int(first_row), torch.from_numpy(own), work.block_ids)
        for first_row, own, work in zip(first_rows, positions, works, strict=False)
    )


class LayerRows(Protocol):
    """Rows between two layers of a decoder, over one pool."""

    def enter(self, stage: Stage) -> None:
        """Drop the rows that the stage does not keep."""

    def run(self, layer: int) -> None:
        """Run a layer, or its rest after a check."""

    def compare(self, check: DeviationCheck, ranks: Ranks) -> torch.Tensor:
        """Compute and write K and V of the check's layer; return `DeviationCheck.deviations`."""

    def output(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to some rows, int64; return [len(rows), hidden]."""


def follow(rows: LayerRows, schedule: LayerSchedule, num_layers: int, ranks: Ranks) -> torch.Tensor | None:
    """Run one schedule; return the deviations of its check."""
    for stage, layers in schedule.layers_of_stages(num_layers):
        rows.enter(stage)
        for layer in layers:
            rows.run(layer)
    return None if schedule.check is None else rows.compare(schedule.check, ranks)


def follow_all(
    rows: LayerRows, schedule: LayerSchedule, num_layers: int, ranks: Ranks, sink: EvidenceSink | None = None
) -> torch.Tensor:
    """Run all layers, from check to check; return the output rows. `sink` gets each check's evidence."""
    while True:
        found = follow(rows, schedule, num_layers, ranks)
        if schedule.check is None or found is None:
            return rows.output(schedule.output_rows)
        schedule, evidence = schedule.check.decide(found)
        if sink is not None:
            for each in evidence:
                sink(each)
        schedule = schedule.to(found.device)
