"""Short iterations as CUDA graphs: the suffix behind reused KV, and decode steps.

A graph holds the whole forward for a bucket of rows and sequences. What differs between two iterations lies in one
buffer on the device, filled by one copy from pinned memory; nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine_wrapper.static_inputs import StaticInputs
from kernels.sparse_prefill.captured import LaunchShape, launch_shape, sparse_prefill

if TYPE_CHECKING:
    from engine_wrapper.fused_layers import FusedDecoder
    from engine_wrapper.layer_schedule import LayerSchedule

MAX_ROWS = 256
# Captures beyond these run eagerly: each takes time once, and host memory for good.
MAX_GRAPHS = 128
# Block ids that a graph's buffer has room for beside those of the pool: sequences may share blocks.
SHARED_BLOCKS = 4096


def bucket(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, the inputs it reads and the logits it writes, float32 [sequences, vocabulary]."""

    graph: torch.cuda.CUDAGraph
    inputs: StaticInputs
    logits: torch.Tensor


class GraphForward:
    """Runs schedules of one stage and at most MAX_ROWS rows by replaying graphs.

    The first iteration of a bucket captures its graph, which takes some hundredths of a second. All graphs share one
    memory pool: their outputs are copied before the next one runs.
    """

    def __init__(self, decoder: FusedDecoder) -> None:
        self._decoder = decoder
        self._graphs: dict[LaunchShape, _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def fits(self, schedule: LayerSchedule) -> bool:
        """True when the schedule has one output row a sequence and a graph, or there is room for one."""
        is_whole = len(schedule.stages) == 1 and schedule.checkpoint is None
        if not is_whole or len(schedule.token_ids) > MAX_ROWS:
            return False
        sequences = schedule.stages[0].sequences
        blocks = sum(len(sequence.block_ids) for sequence in sequences)
        if len(schedule.output_rows) != len(sequences) or blocks > self._block_room:
            return False
        return len(self._graphs) < MAX_GRAPHS or shape_of(schedule, self._decoder) in self._graphs

    @torch.inference_mode()
    def __call__(self, schedule: LayerSchedule) -> torch.Tensor:
        """Runs a schedule that fits, its tensors on the host; returns logits, float32 [sequences, vocabulary].

        Raises ValueError when a sequence reaches beyond its blocks or a block beyond the pool.
        """
        shape = shape_of(schedule, self._decoder)
        captured = self._graphs.get(shape)
        if captured is None:
            captured = self._graphs[shape] = self._capture(shape, schedule)
        captured.inputs.upload(schedule)
        captured.graph.replay()
        return captured.logits[: len(schedule.output_rows)].clone()

    @property
    def _block_room(self) -> int:
        return int(self._decoder.pool.shape[0]) + SHARED_BLOCKS

    def _capture(self, shape: LaunchShape, schedule: LayerSchedule) -> _Captured:
        inputs = StaticInputs(shape, self._block_room, self._decoder.pool, self._decoder.geometry)
        inputs.upload(schedule)
        current = torch.cuda.current_stream()
        aside = torch.cuda.Stream()
        aside.wait_stream(current)
        # Kernels are compiled and libraries initialised outside the capture, on a stream as the capture uses.
        with torch.cuda.stream(aside):
            run_static(self._decoder, shape, inputs)
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Saves may allocate in threads of their own meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = run_static(self._decoder, shape, inputs)
        return _Captured(graph, inputs, logits)


def shape_of(schedule: LayerSchedule, decoder: FusedDecoder) -> LaunchShape:
    """The launch for a schedule: its rows and sequences rounded up to buckets."""
    sequences, pool = schedule.stages[0].sequences, decoder.pool
    return launch_shape(
        bucket(len(schedule.token_ids)),
        bucket(len(sequences)),
        bucket(max(sequence.count for sequence in sequences)),
        max(sequence.last_position for sequence in sequences) + 1,
        (decoder.num_heads, pool.dtype, pool.device),
        decoder.geometry,
    )


def run_static(decoder: FusedDecoder, shape: LaunchShape, inputs: StaticInputs) -> torch.Tensor:
    """The forward over what `inputs` hold: logits, float32 [shape.sequences, vocabulary]."""

    def attend(layer: int, heads: torch.Tensor) -> torch.Tensor:
        query = heads[:, : decoder.num_heads]
        return sparse_prefill(query, decoder.pool, layer, shape, inputs.launch, decoder.geometry, decoder.scale)

    residual, delta = decoder.embed(inputs.token_ids), None
    tables = decoder.tables(inputs.launch.positions, inputs.slots)
    for layer in range(decoder.geometry.num_layers):
        delta = decoder.layer(layer, delta, residual, tables, attend)
    assert delta is not None
    return decoder.logits(decoder.finish(delta, residual, inputs.output_rows))
