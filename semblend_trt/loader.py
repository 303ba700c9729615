"""Loads an iteration's plans: device donors in one launch a plan, host donors layer by layer beside it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.kv_move import Move, kv_move
from kernels.kv_move.move import check_moves
from kernels.layout import PagedKv
from semblend_trt.materialize import moves_of, target_of
from semblend_trt.plan import PlanKind
from semblend_trt.streams import Event, current_stream, record, wait

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kernels.layout import KvGeometry
    from kernels.rope import RopeRotation
    from semblend_trt.donors.store import DonorStore
    from semblend_trt.layer_readiness import LayerReadiness
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.staging import HostReader

# Enough groups that little is left to compute behind the last, few enough that launching them takes no longer than the
# copies; the fastest of 8, 14 and 28 on an H200.
LAYER_GROUPS = 14
# Waiting layer by layer keeps a forward from replaying a graph; below some milliseconds of copying that costs more.
OVERLAP_FROM_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class LoadTiming:
    """What one call of `PlanLoader.load` moved, and between which moments."""

    device_tokens: int
    host_tokens: int
    groups: int
    queueing_seconds: float
    began: Event | None
    ended: Event | None

    def milliseconds(self) -> float:
        """From the first to the last byte; waits for it. On the CPU, where queueing is moving, the time of the call."""
        if self.began is None or self.ended is None:
            return self.queueing_seconds * 1e3
        self.ended.synchronize()
        return float(self.began.elapsed_time(self.ended))


@dataclass(frozen=True, slots=True)
class _Load:
    """One plan's moves: `near` are from the arena (or all, without a reader), `far` from the host."""

    target: PagedKv
    near: list[Move]
    far: list[Move]


class PlanLoader:
    """Places plans' spans into `pool`, in stream order.

    `reader` copies from the host on streams of its own; without one, as on the CPU, donors of both tiers are moved by
    one call a plan. `readiness` learns when the layers are there; where nobody waits for it layer by layer, the given
    stream waits for all of them. `last_timing` describes the last load.
    """

    def __init__(
        self,
        store: DonorStore,
        pool: torch.Tensor,
        geometry: KvGeometry,
        rotation: RopeRotation,
        readiness: LayerReadiness,
        reader: HostReader | None,
    ) -> None:
        self._store = store
        self._pool = pool
        self._geometry = geometry
        self._rotation = rotation
        self._readiness = readiness
        self._reader = reader
        self._token_bytes = geometry.bytes_per_token(pool.dtype)
        self.last_timing: LoadTiming | None = None

    def load(self, plans: Sequence[SemanticKvPlan]) -> list[tuple[SemanticKvPlan, Exception]]:
        """Queues the plans' loads behind the current stream's work; what follows on it sees all of them.

        Returns the plans that could not be loaded, with the reason: nothing, or nothing that anybody may read, of them
        is in the pool. Host donors need not be held any longer once this returns; see `DeviceTier` for the others.
        """
        stream = current_stream(self._pool.device)
        self._readiness.join(stream)
        plans = [plan for plan in plans if plan.spans and plan.kind is not PlanKind.DISCOVERY_ONLY]
        if not plans:
            return []
        began, clock = record(stream, timed=True), time.perf_counter()
        failed: list[tuple[SemanticKvPlan, Exception]] = []
        prepared: list[tuple[SemanticKvPlan, _Load]] = []
        with ExitStack() as reads:
            for plan in plans:
                try:
                    prepared.append((plan, self._prepare(plan, reads)))
                except Exception as error:
                    failed.append((plan, error))
            loads = [load for _, load in prepared]
            try:
                ended, groups = self._issue(loads, began)
            except Exception as error:
                if self._reader is not None:
                    end = self._reader.abandoned()
                    self._store.host.read_until(end)
                    wait(stream, [end])
                return [*failed, *((plan, error) for plan, _ in prepared)]
        near = sum(move.length for load in loads for move in load.near)
        far = sum(move.length for load in loads for move in load.far)
        self.last_timing = LoadTiming(near, far, groups, time.perf_counter() - clock, began, ended)
        return failed

    def _prepare(self, plan: SemanticKvPlan, reads: ExitStack) -> _Load:
        donors = {
            donor_id: reads.enter_context(self._store.reading(donor_id))
            for donor_id in dict.fromkeys(span.donor_id for span in plan.spans)
        }
        target = target_of(plan, self._pool, self._geometry)
        moves = moves_of(plan, donors, self._pool, self._geometry)
        check_moves(moves, target, self._rotation)
        load = _Load(target, [], [])
        for move in moves:
            is_near = self._reader is None or isinstance(move.source, PagedKv)
            (load.near if is_near else load.far).append(move)
        return load

    def _issue(self, loads: Sequence[_Load], began: Event | None) -> tuple[Event | None, int]:
        """Returns an event behind everything, and the groups of layers in which the host's part arrives."""
        stream = current_stream(self._pool.device)
        for load in loads:
            kv_move(load.near, load.target, self._rotation)
        ended = record(stream, timed=True)
        distant = [load for load in loads if load.far]
        if self._reader is None or not distant:
            return ended, 0
        self._reader.begin(began)
        groups: list[tuple[int, Event | None]] = []
        num_layers = self._geometry.num_layers
        tokens = sum(move.length for load in distant for move in load.far)
        step = self._layers_at_once(self._reader, tokens)
        for first in range(0, num_layers, step):
            end = min(first + step, num_layers)
            for load in distant:
                self._reader.place(load.far, load.target, first, end)
            groups.append((end, self._reader.placed(timed=end == num_layers)))
        self._store.host.read_until(groups[-1][1])
        self._readiness.expect(groups)
        if not self._readiness.is_awaited or tokens * self._token_bytes < OVERLAP_FROM_BYTES:
            self._readiness.join(stream)
        return groups[-1][1], len(groups)

    def _layers_at_once(self, reader: HostReader, tokens: int) -> int:
        share = -(-self._geometry.num_layers // LAYER_GROUPS)
        return max(1, min(share, reader.capacity // tokens)) if reader.capacity else share
