"""The active rows of a forward through vLLM's own layers and its own attention.

To the attention backend every run of neighbouring positions is a sequence: the blocks of its request, its rows as
queries, and the keys up to its last position. So every model whose layers vLLM runs can be planned.

If most rows are single ones, as a sample's are, each would read all keys before it. Then SemBlend's kernel takes the
backend's place and reads vLLM's cache once for a tile of rows.

Facts: vLLM, `v1/attention/backend.py` (CommonAttentionMetadata); `forward_context.py` (which rows are padding, that no
expert gets; with `VLLM_USE_LAYERNAME=0` also how many layers with experts have run, which tells them apart);
`model_executor/layers/attention/attention.py` (K and V are written before an implementation's `forward`, and
`sliding_window` counts the token itself); `model_executor/models/transformers/__init__.py` (an attention's `forward` is
called past its module's hooks)."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from engine_wrapper.deviation_check import stand_apart
from engine_wrapper.vllm.decoder import fresh_rows, take_fresh, write
from engine_wrapper.vllm.graphs import MOST_ROWS, room_for
from engine_wrapper.vllm.hooks import forward_context, own_kernels, prefill_backend_of, replaced_backend
from engine_wrapper.vllm.refusals import BACKENDS, LATENT_BACKENDS, PREFILL_BACKENDS, RESERVING_BACKENDS
from kernels.layout import to_device
from kernels.sparse_prefill import SequenceRows, in_chunks, sparse_prefill
from semblend_trt.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from typing_extensions import Self

    from engine_wrapper.layer_schedule import DeviationCheck, LayerSchedule, Stage
    from engine_wrapper.vllm.decoder import Decoder, Rows
    from engine_wrapper.vllm.graphs import WholeGraphs
    from engine_wrapper.vllm.hooks import StepGraphs
    from semblend_trt.ranks import Ranks

# Keys that a run reads in the time of one more row: measured (H200, FlashAttention 3, Qwen2.5-7B, 8k and 24k keys).
KEYS_PER_ROW = 4096


def own_builder(group: Any, max_rows: int) -> Any:
    """Return a second builder of an attention group, for up to `max_rows` sequences a forward. If the backend reserves
    memory for decodes, the engine's limit stays. Raises LayoutError for unknown backends.

    Its metadata suits `WholeGraphs` in an engine of one card that captures prompts, by FlashAttention 3."""
    name = group.backend.get_name()
    if name not in BACKENDS:
        raise LayoutError("attention_backend", f"the attention backend is {name}; use one of {', '.join(BACKENDS)}")
    theirs = group.get_metadata_builder(0)
    if name in LATENT_BACKENDS and (found := prefill_backend_of(theirs)) not in PREFILL_BACKENDS:
        problem = f"{name} computes its prompts by {found}; set mla_prefill_backend to {PREFILL_BACKENDS[0]}"
        raise LayoutError("attention_backend", problem)
    config = copy(theirs.vllm_config)
    config.scheduler_config, config.compilation_config = copy(config.scheduler_config), copy(config.compilation_config)
    if name not in RESERVING_BACKENDS:
        config.scheduler_config.max_num_seqs = max_rows
    graphs, parallel = config.compilation_config, config.parallel_config
    captures_prompts = graphs.cudagraph_mode.has_piecewise_cudagraphs() and parallel.tensor_parallel_size == 1
    support = theirs.get_cudagraph_support(config, theirs.kv_cache_spec)
    is_whole = captures_prompts and name == "FLASH_ATTN" and support is AttentionCGSupport.ALWAYS
    graphs.cudagraph_mode = CUDAGraphMode.FULL if is_whole else CUDAGraphMode.NONE
    with set_current_vllm_config(config):
        return type(theirs)(theirs.kv_cache_spec, group.layer_names, config, theirs.device)


def takes_whole_graphs(builder: Any) -> bool:
    """Return whether the metadata of `own_builder` suits `WholeGraphs`."""
    return builder.vllm_config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL


@contextmanager
def as_prompts(builder: Any) -> Iterator[None]:
    """Have the builder count all runs as prompts, none as a decode."""
    rows_of_a_decode, builder.reorder_batch_threshold = builder.reorder_batch_threshold, 0
    try:
        yield
    finally:
        builder.reorder_batch_threshold = rows_of_a_decode


class VllmRows:
    """Rows between two layers (`layer_schedule.LayerRows`), with their own metadata in vLLM's forward context while
    they are entered. `sparse`: SemBlend's kernel may attend."""

    def __init__(self, parts: Decoder, schedule: LayerSchedule, sparse: bool) -> None:
        self._parts, self._schedule = parts, schedule
        self._hidden: torch.Tensor | None = None
        self._residual: torch.Tensor | None = None
        self._positions = schedule.positions
        self._sequences: tuple[SequenceRows, ...] = ()
        self._sparse, self._is_attending, self._adapters = sparse, False, 0
        self._left = ExitStack()

    def __enter__(self) -> Self:
        # Graphs were captured of the engine's own batches alone.
        own = forward_context(
            attn_metadata=None, slot_mapping=None, cudagraph_runtime_mode=CUDAGraphMode.NONE, is_padding=None
        )
        self._context = context = self._left.enter_context(own)
        # Each forward within this context begins at the lowest layer with experts.
        context.moe_layer_index = 0
        self._left.callback(setattr, context, "moe_layer_index", 0)
        return self

    def __exit__(self, *raised: object) -> None:
        self._left.close()

    def enter(self, stage: Stage, *, is_whole: bool = False) -> None:
        """Drop the rows that the stage does not keep. `is_whole`: their attention is read after a graph's replay."""
        # Nothing here waits for the device: the host prepares the forward while donors' KV is moved.
        if stage.keep is not None:
            assert self._hidden is not None
            self._hidden, self._positions = (
                each.index_select(0, stage.keep) for each in (self._hidden, self._positions)
            )
            if self._residual is not None:
                self._residual = self._residual.index_select(0, stage.keep)
        self._sequences = stage.sequences
        if self._parts.adapters is not None:
            self._adapters = self._parts.adapters.map_rows(stage.sequences)
        size = self._parts.geometry.block_size
        pairs = [(each.host_positions.numpy(), each.host_block_ids.numpy()) for each in self._sequences]
        numbers = np.concatenate([blocks[own // size] * size + own % size for own, blocks in pairs])
        self._row_slots = slots = to_device(torch.from_numpy(numbers), self._positions.device)
        self._context.slot_mapping = dict.fromkeys(self._parts.names, slots)
        chunks, check, metadata = self._parts.chunks, self._schedule.check, dict[int | None, Any]()
        is_sample = check is not None and check.is_sample
        apart = self._sparse and (is_sample or stand_apart(own for own, _ in pairs))
        is_ours = apart or (self._schedule.mass is not None and not is_whole)
        if is_ours and not self._is_attending:
            attending = self._parts.attention[: check.layer if check is not None and is_sample else None]
            self._left.enter_context(replaced_backend("forward", attending, self._attend))
            self._is_attending = True
        for chunk in set(chunks):
            seen = in_chunks(self._sequences, chunk, size) if chunk else self._sequences
            metadata[chunk] = seen if is_ours else self._metadata(seen, slots)
        self._context.attn_metadata = {
            name: metadata[chunk] for name, chunk in zip(self._parts.names, chunks, strict=True)
        }

    def whole(
        self, forward: Callable[..., torch.Tensor], graphs: StepGraphs, wholes: WholeGraphs | None
    ) -> torch.Tensor:
        """Return a one-stage schedule's output rows, by the model's own forward, compiled where vLLM compiles it."""
        (stage,) = self._schedule.stages
        self.enter(stage, is_whole=wholes is not None and stage.num_rows <= MOST_ROWS)
        with self._parts.calls.counted():
            hidden = None if wholes is None or self._is_attending else self._replayed(wholes)
            if hidden is None:
                if self._schedule.mass is not None and not self._is_attending:
                    self.enter(stage)
                rows = self._schedule.token_ids, self._positions, self._adapters
                with graphs.replayed(*rows) as (input_ids, positions):
                    hidden = forward(input_ids=input_ids, positions=positions)
            return hidden.index_select(0, self._schedule.output_rows)

    def _replayed(self, wholes: WholeGraphs) -> torch.Tensor | None:
        """Return the entered rows by a graph of a whole forward, None without one. Their attention is read after it."""
        metadata, mass = self._context.attn_metadata[self._parts.names[0]], self._schedule.mass
        layers = range(0) if mass is None else mass.layers
        hidden = wholes.replay(self._schedule.token_ids, self._positions, metadata, self._adapters, layers)
        if hidden is not None and mass is not None:
            for layer, queries in zip(layers, wholes.queries[:, : len(self._positions)], strict=True):
                attention = self._parts.attention[layer]
                given = attention.impl.scale, attention.sliding_window, attention.impl.sinks
                mass.read(queries, self._parts.cache(layer), *given)
        return hidden

    def run(self, layer: int) -> None:
        """Run a layer."""
        rows = self._begun()
        with self._parts.calls.counted():
            self._hidden, self._residual = self._parts.calls.run(layer, self._positions, rows)

    def compare(self, check: DeviationCheck, ranks: Ranks) -> torch.Tensor:
        """Run the check's layer up to K and V of all rows, which are written once the deviations are taken."""
        parts, layer = self._parts, check.layer

        def take(keys: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
            stored = parts.stored(layer, keys, values)
            scales = parts.head_scales[layer] if parts.head_scales else None
            deviations = check.deviations(*stored, parts.pool, parts.geometry, ranks, scales)
            write(parts.attention[layer], parts.caches[layer], keys, values, self._row_slots)
            return deviations

        hidden, residual = self._begun()
        if not check.is_sample:
            # A layer writes into what it is given, and runs again for the rows that go on.
            hidden, residual = hidden.clone(), None if residual is None else residual.clone()
        with parts.calls.counted():
            deviations: torch.Tensor = take_fresh(parts, layer, self._positions, (hidden, residual), take)
        return deviations

    def output(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to some rows, int64; return [len(rows), hidden]."""
        assert self._hidden is not None
        residual = None if self._residual is None else self._residual.index_select(0, rows)
        return self._parts.calls.norm((self._hidden.index_select(0, rows), residual))

    def _begun(self) -> Rows:
        """Hidden rows and their residual, those that enter the lowest layer at first."""
        if self._hidden is None:
            self._left.enter_context(own_kernels(self._parts.unfused))
            self._hidden = self._parts.calls.embed(self._schedule.token_ids)
        return self._hidden, self._residual

    def _attend(
        self, layer: int, stock: Any, attention: Any, queries: Any, *kv: Any, output: torch.Tensor, **options: Any
    ) -> Any:
        """Attend in place of an implementation's `forward`, after K and V are written. The last of `kv` is metadata."""
        if not isinstance(kv[-1], tuple):
            return stock(attention, queries, *kv, output=output, **options)
        if any(each is not None for each in options.values()):
            raise LayoutError("model_call", f"layer {layer} asks attention for {', '.join(options)}, not known here")
        rows = sum(each.count for each in kv[-1])  # a graph's padding comes after them
        cache, impl = self._parts.cache(layer), attention.impl
        mass = None if self._parts.chunks[layer] else self._schedule.mass
        attend = sparse_prefill if mass is None else partial(mass.attend, layer)
        output[:rows] = attend(queries[:rows], cache, kv[-1], impl.scale, attention.sliding_window, impl.sinks)
        return output

    def _metadata(self, sequences: Sequence[SequenceRows], slots: torch.Tensor) -> Any:
        """The backend's metadata for the rows, as the sequences that their layers see."""
        device = self._positions.device
        places = [each.host_positions.numpy() for each in sequences]
        tables = [each.host_block_ids.numpy() for each in sequences]
        runs = [np.split(own, np.flatnonzero(np.diff(own) != 1) + 1) for own in places]
        lengths = np.array([len(run) for own in runs for run in own])
        ends = np.array([run[-1] + 1 for own in runs for run in own])
        builder = self._parts.builder
        if takes_whole_graphs(builder) and (room := room_for(len(slots), len(ends))) is not None:
            lengths, ends = (np.pad(each, (0, room[1] - len(each))) for each in (lengths, ends))
        table, row = np.zeros((len(ends), max(map(len, tables))), dtype=np.int32), 0
        for own, blocks in zip(runs, tables, strict=True):
            table[row : row + len(own), : len(blocks)] = blocks
            row += len(own)
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        seq_lens = torch.from_numpy(ends.astype(np.int32))
        common = CommonAttentionMetadata(
            query_start_loc=to_device(starts, device),
            query_start_loc_cpu=starts,
            seq_lens=to_device(seq_lens, device),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(ends),
            num_actual_tokens=len(slots),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=to_device(torch.from_numpy(table), device),
            slot_mapping=slots,
            causal=True,
            positions=self._positions,
        )
        # With more runs than it has room for as decodes, all count as prompts.
        are_too_many = common.num_reqs > builder.vllm_config.scheduler_config.max_num_seqs
        with as_prompts(builder) if are_too_many else nullcontext():
            return builder.build(0, common)


def own_rows_as_stored(parts: Decoder) -> AbstractContextManager[None]:
    """Have a latent attention read a run's own rows as its cache holds them, not as computed. Facts: vLLM 0.28 and
    0.32, `forward_mha` of `model_executor/layers/attention/mla_attention.py`."""

    def attend(
        layer: int, stock: Any, queries: Any, latent: torch.Tensor, turning: torch.Tensor, *rest: Any, **options: Any
    ) -> None:
        rows, _ = parts.stored(layer, *fresh_rows((latent, turning), parts.geometry))
        read = (rows.float() * parts.attention[layer]._k_scale).to(latent.dtype)  # [rows, 1, channels]
        free, turned = (each.contiguous() for each in read.split([latent.shape[1], turning.shape[-1]], dim=2))
        stock(queries, free.squeeze(1), turned, *rest, **options)

    return replaced_backend("forward_mha", parts.attention, attend)
