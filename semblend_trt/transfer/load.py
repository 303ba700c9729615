"""Loads an iteration's plans: device donors in one launch a plan, host donors layer by layer beside it."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.kv_move import Move, check_moves, prepared
from kernels.layout import PagedKv
from semblend_trt.donors.host_tier import HostKv
from semblend_trt.errors import DonorUnavailableError, PlanError
from semblend_trt.plan import PlanKind
from semblend_trt.streams import Event, Stream, current_stream, record, wait

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from kernels.layout import KvGeometry
    from kernels.rope import Rotation
    from semblend_trt.donors.store import DonorStore
    from semblend_trt.plan import PlanSpan, SemanticKvPlan
    from semblend_trt.transfer.staging import HostReader

# Layers from the host arrive in groups. With more groups less is left to compute behind the last one; with fewer the
# launches cost less than the copies. 14 was the fastest of 8, 14 and 28 for 24k tokens on an H200.
LAYER_GROUPS = 14
# A group of fewer bytes arrives sooner than the host queues the next one.
GROUP_BYTES = 24 << 20
# Groups that are queued beyond the layers that a forward has come to. Queueing one takes the host up to half of its
# transfer, and preparing the forward up to two transfers.
GROUPS_AHEAD = 3


class LayerReadiness:
    """The layers that are still on their way, in the order in which they arrive.

    A forward that calls `wait` before every layer, on the stream it runs on, sets `is_awaited`. Without one, and
    where no Python runs between the layers (CUDA graphs, compiled layers), `join` makes the whole load precede what
    follows on a stream. The engine's thread alone uses it.
    """

    def __init__(self) -> None:
        self.is_awaited = False
        self._groups: Generator[tuple[int, Event | None]] | None = None
        self._queued: deque[tuple[int, Event | None]] = deque()
        self._ahead = self._arrived_layers = 0

    @property
    def is_arriving(self) -> bool:
        """True while some layers are not waited for yet: what reads them must call `wait` or `join`."""
        return bool(self._queued) or self._groups is not None

    def expect(self, groups: Generator[tuple[int, Event | None]], ahead: int = 1) -> None:
        """Announces one load. Each group, (end_layer, event), says: layers below `end_layer` are in the pool behind
        `event`. Asking `groups` for one queues its transfer: here for the first `ahead`, which is at least 1, and then
        for so many beyond the layers that a forward has come to. What was announced before must have been joined."""
        self._groups, self._ahead, self._arrived_layers = groups, ahead, 0
        self._ask()

    def wait(self, layer: int, stream: Stream | None) -> None:
        """Queues on `stream` that what follows, which reads or writes `layer`, starts once it is in the pool. Raises
        what a further transfer raises."""
        while self._queued and self._arrived_layers <= layer:
            self._arrived_layers, event = self._queued.popleft()
            wait(stream, [event])
            self._ask()

    def join(self, stream: Stream | None) -> None:
        """Queues on `stream` that what follows starts once every layer is in the pool."""
        while self._queued:
            wait(stream, [self._queued.popleft()[1]])
            self._ask()

    def abandon(self, stream: Stream | None) -> None:
        """Has no further transfer queued, and those that were precede what follows on `stream`: the forward that was to
        read the layers has failed."""
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        self.join(stream)

    def _ask(self) -> None:
        while self._groups is not None and len(self._queued) < self._ahead:
            group = next(self._groups, None)
            if group is None:
                self._groups = None
            else:
                self._queued.append(group)


@dataclass(frozen=True, slots=True)
class _Load:
    """One plan's moves: `near` are from the arena (or all, without a reader), `far` from the host."""

    target: PagedKv
    near: list[Move]
    far: list[Move]


class PlanLoader:
    """Places plans' spans into `pool`, in stream order.

    `reader` copies from the host on streams of its own; without one, as on the CPU, donors of both tiers are moved by
    one call a plan. `readiness` learns when the layers are there. The given stream waits for all of them, unless a
    forward waits layer by layer.
    """

    def __init__(
        self,
        store: DonorStore,
        pool: torch.Tensor,
        geometry: KvGeometry,
        rotation: Rotation,
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

    def load(self, plans: Sequence[SemanticKvPlan]) -> list[tuple[SemanticKvPlan, Exception]]:
        """Queues the plans' loads behind the current stream's work; what follows on it sees all of them.

        Returns the plans that could not be loaded, with the reason: nothing, or nothing that may be read, of them
        is in the pool. Host donors are read until `readiness` has no more to ask for; see `DeviceTier` for the others.
        """
        stream = current_stream(self._pool.device)
        self._readiness.join(stream)
        plans = [plan for plan in plans if plan.spans and plan.kind is not PlanKind.DISCOVERY_ONLY]
        if not plans:
            return []
        failed: list[tuple[SemanticKvPlan, Exception]] = []
        prepared: list[tuple[SemanticKvPlan, _Load]] = []
        with ExitStack() as reads:
            for plan in plans:
                try:
                    prepared.append((plan, self._prepare(plan, reads)))
                except Exception as error:
                    failed.append((plan, error))
            try:
                self._issue([load for _, load in prepared], stream, reads)
            except Exception as error:
                self._readiness.abandon(stream)
                return [*failed, *((plan, error) for plan, _ in prepared)]
        return failed

    def _prepare(self, plan: SemanticKvPlan, reads: ExitStack) -> _Load:
        donors = {
            donor_id: reads.enter_context(self._store.reading(donor_id))
            for donor_id in dict.fromkeys(span.donor_id for span in plan.spans)
        }
        target = target_of(plan, self._pool, self._geometry)
        moves = moves_of(plan, donors)
        check_moves(moves, target, self._rotation)
        load = _Load(target, [], [])
        for move in moves:
            is_near = self._reader is None or isinstance(move.source, PagedKv)
            (load.near if is_near else load.far).append(move)
        return load

    def _issue(self, loads: Sequence[_Load], stream: Stream | None, reads: ExitStack) -> None:
        distant = [load for load in loads if load.far]
        if self._reader is not None and distant:
            self._reader.begin(record(stream))
        for load in loads:
            if load.near:
                prepared(load.near, load.target, self._rotation)(range(self._geometry.num_layers), 0)
        if self._reader is not None and distant:
            self._readiness.expect(self._placed(distant, self._reader, reads.pop_all()), GROUPS_AHEAD)
            if not self._readiness.is_awaited:
                self._readiness.join(stream)

    def _placed(
        self, loads: Sequence[_Load], reader: HostReader, reads: ExitStack
    ) -> Generator[tuple[int, Event | None]]:
        """Queues the loads from the host, a group of layers each time that it is asked for one, as `LayerReadiness` has
        it; `reads` are let go behind the last."""
        num_layers = self._geometry.num_layers
        tokens = sum(move.length for load in loads for move in load.far)
        layer_bytes = tokens * self._token_bytes // num_layers
        most = max(-(-num_layers // LAYER_GROUPS), -(-GROUP_BYTES // layer_bytes))
        # Groups of the lower half are twice as large: while they come, the host lays out the moves of all layers and
        # prepares the forward. The last layer comes alone: only its own computing is then left behind the transfer.
        largest, step = (reader.layers_at_once(min(count, num_layers), tokens) for count in (2 * most, most))
        lower, upper = range(0, num_layers // 2, largest), range(num_layers // 2, num_layers, step)
        cuts = sorted({*lower, *upper, num_layers - 1, num_layers})
        with reads:
            try:
                placing = [reader.placing(load.far, load.target, largest) for load in loads]
                for first, end in pairwise(cuts):
                    placed: Event | None = None
                    for place in placing:
                        placed = place(first, end)
                    yield end, placed
            except BaseException:  # also where no further group is asked for
                wait(current_stream(self._pool.device), [reader.abandoned()])
                raise
            finally:
                self._store.host.read_until(reader.abandoned())


def target_of(plan: SemanticKvPlan, pool: torch.Tensor, geometry: KvGeometry) -> PagedKv:
    """The request's blocks in `pool`. Raises PlanError when the plan has none."""
    if plan.target_block_ids is None:
        raise PlanError("blocks_unknown", f"request {plan.request_id}: the plan has spans but no target blocks yet")
    return PagedKv(pool, block_vector(plan.target_block_ids), geometry)


def block_vector(block_ids: Sequence[int]) -> torch.Tensor:
    """Block ids as int64 [n] on the host; torch itself reads a long sequence three times as slowly."""
    return torch.from_numpy(np.fromiter(block_ids, dtype=np.int64, count=len(block_ids)))


def moves_of(plan: SemanticKvPlan, donors: Mapping[str, PagedKv | HostKv]) -> list[Move]:
    """The plan's spans as moves, several for a span of a donor in parts; `donors` by id.

    Raises DonorUnavailableError when a donor does not hold its span.
    """
    return [move for span in plan.spans for move in _moves_of_span(span, donors[span.donor_id])]


def _moves_of_span(span: PlanSpan, donor: PagedKv | HostKv) -> list[Move]:
    if not 0 <= span.donor_start < span.donor_end <= donor.capacity:
        raise DonorUnavailableError(
            f"donor {span.donor_id} holds {donor.capacity} tokens; the span needs {span.donor_start}..{span.donor_end}"
        )
    if not isinstance(donor, HostKv):
        return [Move(donor, span.donor_start, span.target_start, span.length)]
    moves, target = [], span.target_start
    for part, start, length in donor.parts_of(span.donor_start, span.length):
        moves.append(Move(part, start, target, length, turn=span.shift))
        target += length
    return moves
