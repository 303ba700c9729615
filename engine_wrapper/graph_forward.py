"""Short iterations as CUDA graphs: the suffix behind reused KV, what a check leaves to compute, and decode steps.

A forward for a bucket of rows and sequences, whole or from a check's layer on, is a row of graphs of a few layers each:
the first runs while the others are launched, and each waits for the KV of its own layers only. The inputs lie in one
buffer in pinned memory, which the first graph reads; the host never waits for the device.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from engine_wrapper.fused_layers import BegunLayer
from engine_wrapper.layer_schedule import build_schedule, no_hook
from engine_wrapper.sequence_work import SequenceSlice
from kernels.layout import PoolLayer
from kernels.sparse_prefill.captured import (
    ITEM_FIELDS,
    TILE_FIELDS,
    LaunchShape,
    LaunchTables,
    fill_tables,
    launch_shape,
    read_pinned,
    sparse_prefill,
)
from kernels.sparse_prefill.rows import check_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from engine_wrapper.fused_layers import FusedDecoder
    from engine_wrapper.layer_schedule import LayerHook, LayerSchedule
    from kernels.layout import KvGeometry

MAX_ROWS = 256
# Further schedules run eagerly: each forward's graphs take time once, and host memory for good.
MAX_FORWARDS = 128
# Behind two graphs of one layer. A graph of fewer layers starts sooner behind a transfer, one of more costs less to
# launch.
LAYERS_A_GRAPH = 2
# Sequences may share blocks: a graph's buffer has room for so many block ids beside those of the pool.
SHARED_BLOCKS = 4096
# Rows of the graphs that are captured ahead: of a decode step, and of the usual questions behind a document.
PREPARED_ROWS = (1, 16, 32, 64, 128, 256)


def bucket(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


class StaticInputs:
    """The inputs of a captured forward, at fixed addresses: one buffer on the device, one like it on the host.

    They are token ids, positions and slots [rows], output rows [sequences], launch tables and block ids. Spare rows
    hold token 0 at position 0 and write no slot. `block_room` is the most block ids of all sequences together. On a
    card the host's buffer is pinned, and the card reads it in place.
    """

    def __init__(self, shape: LaunchShape, block_room: int, pool: torch.Tensor, geometry: KvGeometry) -> None:
        self._shape = shape
        self._pool = pool
        self._geometry = geometry
        words = sum(_sizes(shape, block_room))
        self._host = torch.zeros(words, dtype=torch.int64, pin_memory=pool.is_cuda)
        self._device = torch.zeros(words, dtype=torch.int64, device=pool.device)
        self._read = torch.cuda.Event() if pool.is_cuda else None
        # NumPy writes so few words in a fraction of torch's time.
        self._parts = [each.numpy() for each in _parts(self._host, shape, block_room)]
        _, self.token_ids, positions, self.slots, self.output_rows, items, tiles, block_ids = _parts(
            self._device, shape, block_room
        )
        self.launch = LaunchTables(items, tiles, positions, block_ids)

    def fill(self, schedule: LayerSchedule, *, writes: bool = True) -> None:
        """Fills the host's buffer from a schedule on the host.

        Without `writes` no row has a slot, as a warm-up needs it. Raises ValueError, before anything is written, when
        the schedule does not fit the shape or the pool.
        """
        if self._read is not None:
            self._read.synchronize()  # of the last forward, which ended long ago
        sequences, rows = schedule.stages[0].sequences, schedule.stages[0].num_rows
        check_rows({}, 0, PoolLayer(self._pool, 0, self._geometry), sequences)
        used, tokens, positions, slots, outputs, items, tiles, block_ids = self._parts
        known, size, blocks = len(schedule.token_ids), self._geometry.block_size, 0
        tokens[:known], tokens[known:] = schedule.token_ids.numpy(), 0
        outputs[: len(sequences)], outputs[len(sequences) :] = schedule.output_rows.numpy(), 0
        positions[rows:], slots[rows:] = 0, -1
        for sequence in sequences:
            own = slice(sequence.first_row, sequence.first_row + sequence.count)
            at, held = sequence.host_positions.numpy(), sequence.host_block_ids.numpy()
            positions[own] = at
            slots[own] = held[at // size] * size + at % size if writes else -1
            block_ids[blocks : blocks + len(held)] = held
            blocks += len(held)
        fill_tables(self._shape, sequences, items, tiles)
        used[0] = len(self._host) - len(block_ids) + blocks

    def read(self) -> None:
        """Queues on the current stream that the device takes over what the host's buffer holds then."""
        read_pinned(self._host, self._device)

    def read_was_queued(self) -> None:
        """The next `fill` waits until what is queued on the device's current stream has run."""
        if self._read is not None:
            self._read.record(torch.cuda.current_stream(self._device.device))


def _sizes(shape: LaunchShape, block_room: int) -> list[int]:
    """Elements (int64) of the parts of a buffer, in their order."""
    items, tiles = (-(-count // 2) for count in (shape.items * ITEM_FIELDS, shape.tiles * TILE_FIELDS))
    return [1, shape.rows, shape.rows, shape.rows, shape.sequences, items, tiles, block_room]


def _parts(buffer: torch.Tensor, shape: LaunchShape, block_room: int) -> list[torch.Tensor]:
    """How many words are in use, token ids, positions, slots, output rows, items and tiles (int32 [count, fields]), and
    block ids, which stand last."""
    *parts, items, tiles, block_ids = buffer.split(_sizes(shape, block_room))
    for words, count, fields in ((items, shape.items, ITEM_FIELDS), (tiles, shape.tiles, TILE_FIELDS)):
        parts.append(words.view(torch.int32)[: count * fields].view(count, fields))
    return [*parts, block_ids]


@dataclass(frozen=True, slots=True)
class _Captured:
    """A forward's graphs, each with its layers, their inputs, and the last one's output: logits, float32 [sequences,
    vocabulary]. With rows `begun` in a layer, it is normed hidden rows, [sequences, hidden]."""

    graphs: tuple[tuple[range, torch.cuda.CUDAGraph], ...]
    inputs: StaticInputs
    begun: BegunLayer | None
    output: torch.Tensor


class GraphForward:
    """Runs schedules of one stage and at most MAX_ROWS rows by replaying graphs.

    Unless `prepare` has, the first iteration of a bucket captures its graphs, in some hundredths of a second. All
    graphs share one memory pool: an output is copied before another forward runs.
    """

    def __init__(self, decoder: FusedDecoder) -> None:
        self._decoder = decoder
        self._forwards: dict[tuple[LaunchShape, int | None], _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        """Forwards captured so far."""
        return len(self._forwards)

    def fits(self, schedule: LayerSchedule, layer: int | None = None) -> bool:
        """True when the schedule has one output row a sequence, and has graphs or room for them.

        `layer`: the one within which the schedule begins; None for the lowest.
        """
        is_whole = len(schedule.stages) == 1 and schedule.check is None
        if not is_whole or schedule.stages[0].num_rows > MAX_ROWS:
            return False
        sequences = schedule.stages[0].sequences
        blocks = sum(len(sequence.block_ids) for sequence in sequences)
        if len(schedule.output_rows) != len(sequences) or blocks > self._block_room:
            return False
        return len(self._forwards) < MAX_FORWARDS or (shape_of(schedule, self._decoder), layer) in self._forwards

    @torch.inference_mode()
    def __call__(
        self, schedule: LayerSchedule, begun: BegunLayer | None = None, wait: LayerHook = no_hook
    ) -> torch.Tensor:
        """Runs a schedule that fits, its tensors on the host; with `begun`, from these rows within a layer on.

        `wait` is called with each layer's index before the graph that holds the layer is launched. Returns logits,
        float32 [sequences, vocabulary]; with `begun`, the normed hidden rows, [sequences, hidden]. Raises ValueError
        when a sequence reaches beyond its blocks or a block beyond the pool.
        """
        captured = self._captured(schedule, None if begun is None else begun.layer, writes=True)
        captured.inputs.fill(schedule)
        if captured.begun is not None and begun is not None:
            captured.begun.fill(begun)
        for layers, graph in captured.graphs:
            for layer in layers:
                wait(layer)
            graph.replay()
        captured.inputs.read_was_queued()
        return captured.output[: len(schedule.output_rows)].clone()

    @torch.inference_mode()
    def prepare(self, reaches: Iterable[int], check_layers: Iterable[int] = ()) -> None:
        """Captures graphs of one sequence: of PREPARED_ROWS rows, the last of which attends to so many tokens; also of
        rows that a check in one of `check_layers` leaves.

        Nothing is written into the pool. At least half of the room for graphs stays free.
        """
        geometry = self._decoder.geometry
        layers = (None, *check_layers)
        for reach in dict.fromkeys(reaches):
            for rows in (count for count in PREPARED_ROWS if count <= reach):
                blocks = (0,) * geometry.blocks_for(reach)
                sequence = SequenceSlice(0, reach - rows, (0,) * rows, blocks)
                schedule = build_schedule([sequence], geometry.num_layers)
                for layer in layers:
                    if len(self._forwards) < MAX_FORWARDS // 2 and self.fits(schedule, layer):
                        self._captured(schedule, layer, writes=False)

    @property
    def _block_room(self) -> int:
        return int(self._decoder.pool.shape[0]) + SHARED_BLOCKS

    def _captured(self, schedule: LayerSchedule, layer: int | None, *, writes: bool) -> _Captured:
        decoder, geometry, shape = self._decoder, self._decoder.geometry, shape_of(schedule, self._decoder)
        key = shape, layer
        if key not in self._forwards:
            inputs, begun = StaticInputs(shape, self._block_room, decoder.pool, geometry), None
            inputs.fill(schedule, writes=writes)
            if layer is not None:
                residual = decoder.embed(inputs.token_ids)
                heads = decoder.num_heads + 2 * geometry.kv_heads
                begun = BegunLayer(layer, residual, residual.new_zeros(shape.rows, heads, geometry.head_dim))
            self._forwards[key] = self._capture(shape, inputs, begun)
        return self._forwards[key]

    def _capture(self, shape: LaunchShape, inputs: StaticInputs, begun: BegunLayer | None) -> _Captured:
        # The card may be another one than torch's current one.
        device = self._decoder.pool.device
        current, (aside, capturing) = torch.cuda.current_stream(device), _streams(device)
        aside.wait_stream(current)
        # Kernels are compiled and libraries initialised outside the capture, on a stream as the capture uses.
        with torch.cuda.stream(aside):
            run_static(self._decoder, shape, inputs, begun)
        current.wait_stream(aside)
        graphs: list[tuple[range, torch.cuda.CUDAGraph]] = []

        def captured(layers: range) -> torch.cuda.graph:
            graphs.append((layers, torch.cuda.CUDAGraph()))
            # Saves may allocate in threads of their own meanwhile.
            return torch.cuda.graph(graphs[-1][1], self._memory, capturing, capture_error_mode="thread_local")

        with _nothing_collected():
            output = run_static(self._decoder, shape, inputs, begun, captured)
        return _Captured(tuple(graphs), inputs, begun, output)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Streams to run a forward on before its capture, and to capture it on.

    PyTorch hands 32 streams of each priority out in turn (c10/cuda/CUDAStream.cpp). With the default one, the stream of
    a capture would sooner or later be a saver's too, and what a save queues would become part of the graph.
    """
    return torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keeps Python's collector off: if it freed the graphs and streams of a dropped engine, the capture would fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def shape_of(schedule: LayerSchedule, decoder: FusedDecoder) -> LaunchShape:
    """The launch for a schedule of one stage: its rows and sequences rounded up to buckets."""
    sequences = schedule.stages[0].sequences
    return launch_shape(
        bucket(schedule.stages[0].num_rows),
        bucket(len(sequences)),
        bucket(max(sequence.count for sequence in sequences)),
        max(sequence.last_position for sequence in sequences) + 1,
        (decoder.num_heads, decoder.dtype, decoder.pool.device),
        decoder.geometry,
    )


def parts_of(first: int, num_layers: int) -> list[range]:
    """The layers from `first` on, a range for each graph. The last layer is alone, as it comes from the host."""
    cuts = {first, first + 1, *range(first + 2, num_layers, LAYERS_A_GRAPH), num_layers - 1, num_layers}
    return [range(start, end) for start, end in pairwise(sorted(cuts))]


def run_static(
    decoder: FusedDecoder,
    shape: LaunchShape,
    inputs: StaticInputs,
    begun: BegunLayer | None = None,
    within: Callable[[range], AbstractContextManager[object]] = nullcontext,
) -> torch.Tensor:
    """The forward over what `inputs` hold: logits, float32 [shape.sequences, vocabulary].

    With `begun`, whose residual it writes, the forward from there on: normed hidden rows, [shape.sequences, hidden].
    Each of `parts_of` the layers runs in the context that `within` gives for it.
    """
    num_layers, first = decoder.geometry.num_layers, 0 if begun is None else begun.layer
    delta: torch.Tensor | None = None
    for layers in parts_of(first, num_layers):
        with within(layers):
            if layers.start == first:
                inputs.read()
                residual = decoder.embed(inputs.token_ids) if begun is None else begun.residual
                tables = decoder.tables(inputs.launch.positions, inputs.slots)
            for layer in layers:
                if begun is not None and layer == first:
                    heads = begun.heads
                else:
                    heads = decoder.project(layer, delta, residual, tables)
                query = heads[:, : decoder.num_heads]
                attended = sparse_prefill(query, decoder.kv(layer), shape, inputs.launch, decoder.scale)
                delta = decoder.mix(layer, attended, residual)
            if layers.stop == num_layers:
                assert delta is not None
                hidden = decoder.finish(delta, residual, inputs.output_rows)
                output = decoder.logits(hidden) if begun is None else hidden
    return output
