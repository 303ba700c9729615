"""Copies between host and device through staging slots on the device.

Host memory is copied in long runs at the bus's full rate; the kernel that scatters or gathers then works on device
memory. A slot holds some tokens of some layers, so that staging memory is bounded and allocated once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.kv_move import LayerMoves, Move, kv_move
from kernels.layout import ContiguousKv, KvGeometry, PagedKv
from semblend_trt.errors import ConfigurationError
from semblend_trt.streams import Event, current_stream, finish, on, record, side_stream, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kernels.rope import RopeRotation
    from semblend_trt.donors.host_tier import HostKv


@dataclass(slots=True)
class _Slot:
    """One buffer, and the event behind which it may be written again."""

    memory: torch.Tensor
    free: Event | None = None


class Staging:
    """`slots` buffers of at most `byte_budget` bytes together on `device`, used in turn.

    `capacity` is the tokens of one layer that a slot holds. Raises ConfigurationError when that is none.
    """

    def __init__(
        self, byte_budget: int, slots: int, geometry: KvGeometry, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.geometry = geometry
        token_elements = geometry.kv_factor * geometry.kv_heads * geometry.head_dim
        self.capacity = byte_budget // slots // (token_elements * dtype.itemsize)
        if self.capacity < 1:
            raise ConfigurationError(
                f"staging of {byte_budget} bytes has no room for {slots} tokens of one layer; raise "
                "SEMBLEND_STAGING_BYTES"
            )
        memory = torch.empty((slots, self.capacity * token_elements), dtype=dtype, device=device)
        self._slots = [_Slot(row) for row in memory]
        self._turn = 0

    def next(self) -> _Slot:
        """The slot whose turn it is."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        return slot

    def view(self, slot: _Slot, layers: int, tokens: int) -> torch.Tensor:
        """`slot` as [layers, kv_factor, kv_heads, tokens, head_dim], in memory token by token as in the host tier."""
        geometry = self.geometry
        shape = (layers, tokens, geometry.kv_factor, geometry.kv_heads, geometry.head_dim)
        return slot.memory[: torch.Size(shape).numel()].view(shape).permute(0, 2, 3, 1, 4)


class HostReader:
    """Places spans of host donors into a pool: copied to `staging` on one stream, rotated and scattered on another."""

    def __init__(self, device: torch.device, rotation: RopeRotation, staging: Staging) -> None:
        self._rotation, self._staging = rotation, staging
        self._copies, self._moves = side_stream(device), side_stream(device)

    def begin(self, begun: Event | None) -> None:
        """What is placed from now on waits for `begun`: until then other work may use the target's blocks."""
        wait(self._moves, [begun])

    def layers_at_once(self, most: int, tokens: int) -> int:
        """How many layers of `tokens` tokens to place together: `most`, or as many as a slot holds."""
        return max(1, min(most, self._staging.capacity // tokens))

    def placing(self, moves: Sequence[Move], target: PagedKv, layers: int) -> Callable[[int, int], None]:
        """A function that queues `moves`, all from ContiguousKv of the host, for the layers from a first one up to an
        end: at most `layers` at once, of which a slot holds a token."""
        divided = list(batches(moves, self._staging.capacity // layers))
        # Laid out once for each slot: to do it for every few layers takes the host longer than the copies.
        laid: dict[tuple[int, int], LayerMoves] = {}

        def place(first_layer: int, end_layer: int) -> None:
            for number, batch in enumerate(divided):
                slot = self._staging.next()
                staged = self._staging.view(slot, layers, sum(move.length for move in batch))
                wait(self._copies, [slot.free])
                with on(self._copies):
                    staged_moves = _staged(batch, staged, first_layer, end_layer)
                wait(self._moves, [record(self._copies)])
                with on(self._moves):
                    key = (number, id(slot))
                    if key not in laid:
                        laid[key] = LayerMoves(staged_moves, target, self._rotation)
                    laid[key].make(range(end_layer - first_layer), first_layer)
                slot.free = record(self._moves)

        return place

    def placed(self) -> Event | None:
        """An event behind everything that was placed so far."""
        return record(self._moves)

    def abandoned(self) -> Event | None:
        """An event behind everything that was queued so far, also where placing it failed half-way."""
        wait(self._moves, [record(self._copies)])
        return record(self._moves)


class HostWriter:
    """Copies paged KV between the device and host memory, through one slot, on the stream that is current."""

    def __init__(self, rotation: RopeRotation, staging: Staging | None) -> None:
        self._rotation = rotation
        self._staging = staging

    def copy(self, source: PagedKv, tokens: int, held: HostKv) -> None:
        """Copies the first `tokens` positions into `held`. When it returns or raises, no copy to `held` is under way
        any more: the memory may then become another donor's."""
        try:
            for _ in self.chunks(source, tokens, held):
                pass
        finally:
            finish(current_stream(source.pool.device))

    def chunks(self, source: PagedKv, tokens: int, held: HostKv) -> Iterator[None]:
        """Queues the copies of `copy` on the current stream, a chunk for each step, without waiting."""
        done = 0
        for part, _, length in held.parts_of(0, tokens):
            yield from self._chunks_of_part(source, done, length, part.tensor)
            done += length

    def copy_up(self, held: HostKv, target: PagedKv) -> None:
        """Copies all of `held` to the first positions of `target`; done when it returns."""
        moves, done = [], 0
        for part, start, length in held.parts_of(0, held.capacity):
            moves.append(Move(part, start, done, length, turn=0))
            done += length
        if self._staging is None:
            kv_move(moves, target, self._rotation)
        else:
            self._stage_up(self._staging, moves, target)
        finish(current_stream(target.pool.device))

    def _stage_up(self, staging: Staging, moves: Sequence[Move], target: PagedKv) -> None:
        num_layers = target.geometry.num_layers
        layers = max(1, min(num_layers, staging.capacity // sum(move.length for move in moves)))
        for first in range(0, num_layers, layers):
            end = min(first + layers, num_layers)
            part = target.layers(first, end)
            for batch in batches(moves, staging.capacity // layers):
                staged = staging.view(staging.next(), end - first, sum(move.length for move in batch))
                kv_move(_staged(batch, staged, first, end), part, self._rotation)

    def _chunks_of_part(self, source: PagedKv, first_token: int, tokens: int, held: torch.Tensor) -> Iterator[None]:
        """As `chunks`, for positions `first_token .. first_token + tokens - 1`, to the front of `held`."""
        if self._staging is None:
            kv_move([Move(source, first_token, 0, tokens, turn=0)], ContiguousKv(held), self._rotation)
            yield
            return
        staging, num_layers = self._staging, source.geometry.num_layers
        layers = max(1, min(num_layers, staging.capacity // tokens))
        chunk = staging.capacity // layers
        for start in range(0, tokens, chunk):
            length = min(chunk, tokens - start)
            staged = staging.view(staging.next(), layers, length)
            moves = [Move(source, first_token + start, 0, length, turn=0)]
            gather = LayerMoves(moves, ContiguousKv(staged), self._rotation)
            for first in range(0, num_layers, layers):
                end = min(first + layers, num_layers)
                gather.make(range(first, end))
                _copy_rows(staged[: end - first], held[first:end, :, :, start : start + length])
                yield


def batches(moves: Sequence[Move], capacity: int) -> Iterator[list[Move]]:
    """The same moves in groups of at most `capacity` tokens; a move that does not fit is divided."""
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


def _staged(batch: Sequence[Move], staged: torch.Tensor, first_layer: int, end_layer: int) -> list[Move]:
    """Queues copies of the given layers of `batch` into the first layers of `staged`, one move behind the other.
    Returns the moves that read from there."""
    moves: list[Move] = []
    column = 0
    for move in batch:
        assert isinstance(move.source, ContiguousKv)  # as every donor of the host is
        source = move.source.layers(first_layer, end_layer)
        rows = source.tensor[:, :, :, move.source_start : move.source_start + move.length]
        _copy_rows(rows, staged[: end_layer - first_layer, :, :, column : column + move.length])
        moves.append(Move(ContiguousKv(staged), column, move.target_start, move.length, turn=move.shift))
        column += move.length
    return moves


def _copy_rows(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies [layers, kv_factor, kv_heads, tokens, head_dim]; the tokens of each layer lie in one run of memory.

    Each run is one asynchronous copy. Other strides torch would first gather on the host.
    """
    runs, target_runs = (tensor.permute(0, 3, 1, 2, 4) for tensor in (source, target))
    if runs.is_contiguous() and target_runs.is_contiguous():
        target_runs.copy_(runs, non_blocking=True)
        return
    for layer, target_layer in zip(runs, target_runs, strict=True):
        target_layer.copy_(layer, non_blocking=True)
