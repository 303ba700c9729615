"""Copies between host and device through staging slots on the device.

Host memory is copied in long runs at the bus's full rate; the kernel that scatters or gathers then works on device
memory. A slot holds some tokens of some layers, so staging memory is bounded and allocated once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import TYPE_CHECKING

import torch

from kernels.device import Event, current_stream, finish, on, record, side_stream, wait
from kernels.kv_move import LayerMoves, Move, kv_move
from kernels.layout import ContiguousKv, KvGeometry, PagedKv, by_token
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kernels.rope import Rotation
    from semblend_trt.donors.store import HostKv


# A slot's capacity is a multiple of this, for 2, 3, 4, 6 or 12 equal rooms.
_ROOMS = 12


@dataclass(slots=True)
class _Slot:
    """One buffer, its place among the slots, and the event after which it is `free`."""

    number: int
    memory: torch.Tensor
    free: Event | None = None


class Staging:
    """`slots` buffers of at most `byte_budget` bytes together on `device`, used in turn.

    `capacity` is the tokens of one layer that a slot holds; `turns` gives the slot whose turn it is. Raises
    ConfigurationError when the capacity is 0."""

    def __init__(
        self, byte_budget: int, slots: int, geometry: KvGeometry, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.geometry = geometry
        self._token_elements = geometry.kv_factor * geometry.kv_heads * geometry.head_dim
        self.capacity = byte_budget // slots // (self._token_elements * dtype.itemsize)
        if self.capacity < 1:
            raise ConfigurationError(
                f"staging of {byte_budget} bytes has no room for {slots} tokens of one layer; raise "
                "SEMBLEND_STAGING_BYTES"
            )
        if self.capacity > _ROOMS:
            self.capacity -= self.capacity % _ROOMS
        self._memory = torch.empty((slots, self.capacity * self._token_elements), dtype=dtype, device=device)
        self.turns = cycle([_Slot(number, row) for number, row in enumerate(self._memory)])

    def rooms(self, layers: int) -> torch.Tensor:
        """Return all slots like `view`, each cut into `layers` equal rooms; `layers` divides the capacity."""
        return by_token(self._memory, self.geometry, len(self._memory) * layers)

    def view(self, slot: _Slot, layers: int, tokens: int) -> torch.Tensor:
        """Return `slot` as [layers, kv_factor, kv_heads, tokens, head_dim], token by token as in the host tier."""
        return by_token(slot.memory[: layers * tokens * self._token_elements], self.geometry, layers)


class HostReader:
    """Place spans of host donors into a pool: copied to `staging` on one stream, rotated and scattered on another."""

    def __init__(self, device: torch.device, rotation: Rotation, staging: Staging) -> None:
        self._rotation, self._staging = rotation, staging
        self._copies, self._moves = side_stream(device), side_stream(device)

    def begin(self, begun: Event | None) -> None:
        """Have later placements wait for this event: until then other work may use the target's blocks."""
        wait(self._moves, [begun])

    def layers_at_once(self, most: int, tokens: int) -> int:
        """Return how many layers of `tokens` tokens to place together: at most `most`, within a slot's rooms."""
        capacity = self._staging.capacity
        counts = range(1, min(most, capacity // tokens) + 1)
        return max((count for count in counts if capacity % count == 0), default=1)

    def placing(self, moves: Sequence[Move], target: PagedKv, layers: int) -> Callable[[int, int], Event | None]:
        """Return a function that queues `moves`, all from ContiguousKv of the host, for a range of layers.

        It takes the first layer and the end, at most `layers` (from `layers_at_once`) apart. It returns an event after
        everything placed so far."""
        rooms = self._staging.rooms(layers)
        divided = list(batches(moves, rooms.shape[3]))
        laid: dict[int, LayerMoves] = {}

        def place(first_layer: int, end_layer: int) -> Event | None:
            count, placed = end_layer - first_layer, None
            for number, batch in enumerate(divided):
                slot = next(self._staging.turns)
                own = range(slot.number * layers, slot.number * layers + count)
                wait(self._copies, [slot.free])
                with on(self._copies):
                    _copy_layers(batch, rooms[own.start : own.stop], first_layer, end_layer)
                    # Made once for all layers and slots, while the first copies run; its table follows them at once. On
                    # another stream, the card's only copy engine would take it after further groups.
                    if number not in laid:
                        laid[number] = LayerMoves(_staged(batch, ContiguousKv(rooms)), target, self._rotation)
                wait(self._moves, [record(self._copies)])
                with on(self._moves):
                    laid[number].make(own, first_layer)
                slot.free = placed = record(self._moves)
            return placed

        return place

    def abandoned(self) -> Event | None:
        """Return an event after everything queued so far, also where placing failed half-way."""
        wait(self._moves, [record(self._copies)])
        return record(self._moves)


class HostWriter:
    """Copy paged KV between the device and host memory, through one slot, on the current stream."""

    def __init__(self, rotation: Rotation, staging: Staging | None) -> None:
        self._rotation, self._staging = rotation, staging

    def copy(self, source: PagedKv, tokens: int, held: HostKv) -> None:
        """Copy the first `tokens` positions into `held`.

        When it returns or raises, no copy to `held` runs any more: the memory may become another donor's."""
        try:
            for _ in self.chunks(source, tokens, held):
                pass
        finally:
            finish(current_stream(source.pool.device))

    def chunks(self, source: PagedKv, tokens: int, held: HostKv) -> Iterator[None]:
        """Queue the copies of `copy` on the current stream, a chunk a step, without waiting."""
        for part, _, done, length in held.parts_of(0, tokens):
            yield from self._chunks_of_part(source, done, length, part)

    def copy_up(self, held: HostKv, target: PagedKv) -> None:
        """Copy all of `held` to the first positions of `target`; done when it returns."""
        parts = held.parts_of(0, held.capacity)
        moves = [Move(part, start, done, length, turn=0) for part, start, done, length in parts]
        staging, num_layers = self._staging, target.geometry.num_layers
        if staging is None:
            kv_move(moves, target, self._rotation)
        else:
            layers = max(1, min(num_layers, staging.capacity // held.capacity))
            for first in range(0, num_layers, layers):
                end = min(first + layers, num_layers)
                for batch in batches(moves, staging.capacity // layers):
                    staged = staging.view(next(staging.turns), end - first, sum(move.length for move in batch))
                    _copy_layers(batch, staged, first, end)
                    kv_move(_staged(batch, ContiguousKv(staged)), target.layers(first, end), self._rotation)
        finish(current_stream(target.pool.device))

    def _chunks_of_part(self, source: PagedKv, first_token: int, tokens: int, part: ContiguousKv) -> Iterator[None]:
        """Do as `chunks`, for `tokens` positions from `first_token` on, to the start of `part`."""
        if self._staging is None:
            kv_move([Move(source, first_token, 0, tokens, turn=0)], part, self._rotation)
            yield
            return
        staging, num_layers = self._staging, source.geometry.num_layers
        layers = max(1, min(num_layers, staging.capacity // tokens))
        chunk = staging.capacity // layers
        for start in range(0, tokens, chunk):
            length = min(chunk, tokens - start)
            staged = staging.view(next(staging.turns), layers, length)
            moves = [Move(source, first_token + start, 0, length, turn=0)]
            gather = LayerMoves(moves, ContiguousKv(staged), self._rotation)
            for first in range(0, num_layers, layers):
                end = min(first + layers, num_layers)
                gather.make(range(first, end))
                _copy_rows(staged[: end - first], part.tensor[first:end, :, :, start : start + length])
                yield


def batches(moves: Sequence[Move], capacity: int) -> Iterator[list[Move]]:
    """Yield the same moves in groups of at most `capacity` tokens; a move that does not fit is divided."""
    batch: list[Move] = []
    room = capacity
    for move in moves:
        done = 0
        while done < move.length:
            length = min(room, move.length - done)
            batch.append(Move(move.source, move.source_start + done, move.target_start + done, length, turn=move.shift))
            done, room = done + length, room - length
            if not room:
                yield batch
                batch, room = [], capacity
    if batch:
        yield batch


def _copy_layers(batch: Sequence[Move], staged: torch.Tensor, first_layer: int, end_layer: int) -> None:
    """Queue copies of these layers of `batch` into `staged`, one move after the other."""
    column = 0
    for move in batch:
        assert isinstance(move.source, ContiguousKv)  # like every host donor
        rows = move.source.tensor[first_layer:end_layer, :, :, move.source_start : move.source_start + move.length]
        _copy_rows(rows, staged[:, :, :, column : column + move.length])
        column += move.length


def _staged(batch: Sequence[Move], staged: ContiguousKv) -> list[Move]:
    """Return the moves that read `batch` from where `_copy_layers` puts it."""
    columns = accumulate((move.length for move in batch), initial=0)
    return [
        Move(staged, column, move.target_start, move.length, turn=move.shift)
        for column, move in zip(columns, batch, strict=False)
    ]


def _copy_rows(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy [layers, kv_factor, kv_heads, tokens, head_dim], each layer's run in one copy: torch would gather others."""
    runs, target_runs = (tensor.permute(0, 3, 1, 2, 4) for tensor in (source, target))
    if runs.is_contiguous() and target_runs.is_contiguous():
        target_runs.copy_(runs, non_blocking=True)
        return
    for layer, target_layer in zip(runs, target_runs, strict=True):
        target_layer.copy_(layer, non_blocking=True)
