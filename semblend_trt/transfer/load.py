"""Loads an iteration's plans: device donors in one launch a plan, host donors layer by layer beside it."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from kernels.device import Event, Stream, current_stream, record, wait
from kernels.kv_move import Move, check_moves, prepared
from kernels.layout import PagedKv
from semblend_trt.donors.store import HostKv
from semblend_trt.errors import DonorUnavailableError, PlanError
from semblend_trt.plan import PlanKind

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from kernels.layout import KvGeometry
    from kernels.rope import Rotation
    from semblend_trt.donors.store import DonorStore
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.transfer.staging import HostReader

# More groups of host layers leave less to compute after the last; fewer keep launches cheaper than copies. 14 was the
# fastest of 8, 14 and 28 for 24k tokens on an H200.
LAYER_GROUPS = 14
# A group of fewer bytes arrives sooner than the host queues the next one.
GROUP_BYTES = 24 << 20
# Groups queued beyond a forward's layer. Queueing one costs up to half its transfer; preparing the forward, up to two.
GROUPS_AHEAD = 3


class LayerReadiness:
    """Track the layers on their way, in order of arrival.

    A forward that calls `wait` before every layer, on its own stream, sets `is_awaited`. Otherwise `join` puts the
    whole load before later work on a stream, as where no Python runs between layers (CUDA graphs, compiled layers). The
    engine's thread alone uses it."""

    def __init__(self) -> None:
        self.is_awaited = False
        self._groups: Generator[tuple[int, Event | None]] | None = None
        self._queued: deque[tuple[int, Event | None]] = deque()
        self._ahead = self._arrived_layers = 0

    @property
    def is_arriving(self) -> bool:
        """True while some layers are not waited for: their readers must call `wait` or `join`."""
        return bool(self._queued) or self._groups is not None

    def expect(self, groups: Generator[tuple[int, Event | None]], ahead: int = 1) -> None:
        """Announce one load; an earlier one must have been joined.

        A group (end_layer, event) says: layers below `end_layer` are in the pool after `event`. Each group drawn from
        `groups` queues its transfer. The first `ahead` groups, at least 1, are drawn here; later ones keep that lead
        over the forward."""
        self._groups, self._ahead, self._arrived_layers = groups, ahead, 0
        self._ask()

    def wait(self, layer: int, stream: Stream | None) -> None:
        """Have `stream` wait until `layer`, for its next work, is in the pool. Raises a further transfer's error."""
        while self._queued and self._arrived_layers <= layer:
            self._arrived_layers, event = self._queued.popleft()
            wait(stream, [event])
            self._ask()

    def join(self, stream: Stream | None) -> None:
        """Have `stream` wait until every layer is in the pool."""
        while self._queued:
            wait(stream, [self._queued.popleft()[1]])
            self._ask()

    def abandon(self, stream: Stream | None) -> None:
        """Queue no further transfer after a failed forward, and have `stream` wait for those queued."""
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        self.join(stream)

    def _ask(self) -> None:
        while self._groups is not None and len(self._queued) < self._ahead:
            if (group := next(self._groups, None)) is None:
                self._groups = None
            else:
                self._queued.append(group)


# One plan's target, and its moves: from the arena (or all, without a reader), and from the host.
_Load: TypeAlias = "tuple[PagedKv, list[Move], list[Move]]"


class PlanLoader:
    """Place plans' spans into `pool`, in stream order.

    `reader` copies from the host on its own streams; without one, as on the CPU, one call a plan moves donors of both
    tiers. `readiness` learns when the layers arrive. The current stream waits for all of them, unless a forward waits
    layer by layer. `in_blocks` gives those of some donors that are not saved yet, in blocks that only later work on
    that stream may write."""

    def __init__(
        self,
        store: DonorStore,
        pool: torch.Tensor,
        geometry: KvGeometry,
        rotation: Rotation,
        readiness: LayerReadiness,
        reader: HostReader | None,
    ) -> None:
        self._store, self._pool, self._geometry, self._rotation = store, pool, geometry, rotation
        self._readiness, self._reader = readiness, reader
        self.in_blocks: Callable[[set[str]], Mapping[str, PagedKv]] = lambda _: {}

    def load(self, plans: Sequence[SemanticKvPlan]) -> list[tuple[SemanticKvPlan, Exception]]:
        """Queue the plans' loads after the current stream's work; later work on it sees all of them.

        Returns the plans that could not be loaded, with the reason; nothing that may be read of them is in the pool.
        Host donors are read until `readiness` has asked for every group; see `DeviceTier` for the others."""
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
        ids = {span.donor_id for span in plan.spans}
        in_blocks = self.in_blocks(ids)
        donors = {each: in_blocks.get(each) or reads.enter_context(self._store.reading(each)) for each in ids}
        target, moves = target_of(plan, self._pool, self._geometry), moves_of(plan, donors)
        check_moves(moves, target, self._rotation)
        near, far = list[Move](), list[Move]()
        for move in moves:
            is_near = self._reader is None or isinstance(move.source, PagedKv)
            (near if is_near else far).append(move)
        return target, near, far

    def _issue(self, loads: Sequence[_Load], stream: Stream | None, reads: ExitStack) -> None:
        distant = [(target, far) for target, _, far in loads if far]
        if self._reader is not None and distant:
            self._reader.begin(record(stream))
        for target, near, _ in loads:
            if near:
                prepared(near, target, self._rotation)(range(self._geometry.num_layers), 0)
        if self._reader is not None and distant:
            self._readiness.expect(self._placed(distant, self._reader, reads.pop_all()), GROUPS_AHEAD)
            if not self._readiness.is_awaited:
                self._readiness.join(stream)

    def _placed(
        self, loads: Sequence[tuple[PagedKv, list[Move]]], reader: HostReader, reads: ExitStack
    ) -> Generator[tuple[int, Event | None]]:
        """Queue one group of host layers per step, for `LayerReadiness`; close `reads` after the last."""
        num_layers = self._geometry.num_layers
        tokens = sum(move.length for _, moves in loads for move in moves)
        layer_bytes = tokens * self._geometry.bytes_per_token(self._pool.dtype) // num_layers
        most = max(-(-num_layers // LAYER_GROUPS), -(-GROUP_BYTES // layer_bytes))
        # The lower half has double groups: meanwhile the host lays out all moves and prepares the forward. The last
        # layer comes alone, so that only its own computing follows the transfer.
        largest, step = (reader.layers_at_once(min(count, num_layers), tokens) for count in (2 * most, most))
        lower, upper = range(0, num_layers // 2, largest), range(num_layers // 2, num_layers, step)
        cuts = sorted({*lower, *upper, num_layers - 1, num_layers})
        with reads:
            try:
                placing = [reader.placing(moves, target, largest) for target, moves in loads]
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
    """Return the request's blocks in `pool`. Raises PlanError when the plan has no blocks."""
    if plan.target_block_ids is None:
        raise PlanError("blocks_unknown", f"request {plan.request_id}: the plan has spans but no target blocks yet")
    return PagedKv(pool, block_vector(plan.target_block_ids), geometry)


def block_vector(block_ids: Sequence[int]) -> torch.Tensor:
    """Return block ids as int64 [n] on the host; torch itself reads a long sequence three times as slowly."""
    return torch.from_numpy(np.fromiter(block_ids, dtype=np.int64, count=len(block_ids)))


def moves_of(plan: SemanticKvPlan, donors: Mapping[str, PagedKv | HostKv]) -> list[Move]:
    """Return the plan's spans as moves, several for a span of a donor in parts; `donors` by id.

    Raises DonorUnavailableError when a donor does not hold its span."""
    moves = []
    for span in plan.spans:
        donor = donors[span.donor_id]
        if not 0 <= span.donor_start < span.donor_end <= donor.capacity:
            raise DonorUnavailableError(
                f"donor {span.donor_id} holds {donor.capacity} tokens; the span needs "
                f"{span.donor_start}..{span.donor_end}"
            )
        if not isinstance(donor, HostKv):
            moves.append(Move(donor, span.donor_start, span.target_start, span.length))
            continue
        for part, start, done, length in donor.parts_of(span.donor_start, span.length):
            moves.append(Move(part, start, span.target_start + done, length, turn=span.shift))
    return moves
