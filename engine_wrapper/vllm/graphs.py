"""CUDA graphs of whole forwards of planned rows, attention included.

A card computes few rows in less time than the host takes to launch their layers. Of such forwards vLLM captures the
parts between two attentions.

Facts: vLLM (0.28 to 0.33), `v1/attention/backends/flash_attn.py` (FlashAttention 3 reads lengths, blocks and its own
schedule from tensors, so that one graph serves every batch of its size), and `platforms/interface.py` (all graphs share
a memory pool, since one runs at a time)."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.platforms import current_platform

from engine_wrapper.vllm.hooks import forward_context, replaced_backend

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

# Rows and sequences of the graphs. With more rows the card takes longer than the host.
_ROWS, _SEQUENCES = (64, 128, 192, 256), (4, 16, 64)
MOST_ROWS = _ROWS[-1]
# What has a number for each row.
_OF_ROWS = ("input_ids", "positions", "slot_mapping")
_FAULT = "whole_graph"


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, torch.Tensor]
    output: torch.Tensor


def room_for(rows: int, sequences: int) -> tuple[int, int] | None:
    """Return the rows and sequences of the smallest graph for a forward, None if it has too many."""
    fitting = (next((each for each in _ROWS if each >= rows), 0), next((n for n in _SEQUENCES if n >= sequences), 0))
    return fitting if all(fitting) else None


class WholeGraphs:
    """Captures a forward when its size runs first, and replays it from then on. If a capture fails, none follows.

    `queries`: those of the last forward that kept them, [kept layers, rows and padding, heads, head_dim]."""

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        names: Sequence[str],
        attention: Sequence[Any],
        longest: int,
        blocks: int,
        faults: Counter[str],
    ) -> None:
        """`forward`: the model's. `names`, `attention`: its layers'. `longest`: of a sequence, in tokens and blocks."""
        self._forward, self._names, self._attention = forward, names, attention
        self._longest, self._blocks, self._faults = longest, blocks, faults
        self._captured: dict[tuple[int, ...], _Captured] = {}
        self.queries = torch.empty(0)

    def replay(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: Any, adapters: int, kept: range
    ) -> torch.Tensor | None:
        """Return the hidden rows, with padding after them, until another graph runs; None without a graph.

        `metadata`: FlashAttention's, its sequences padded by `room_for`. `adapters`: kinds of rows that LoRA's kernels
        tell apart. `kept`: layers whose `queries` are kept. Call it within vLLM's forward context."""
        room = room_for(len(input_ids), len(metadata.seq_lens))
        if room is None or self._faults[_FAULT]:
            return None
        key, given = (*room, adapters, len(kept)), _tensors(metadata) | {"input_ids": input_ids, "positions": positions}
        try:
            if key not in self._captured:
                with self._kept_queries(kept):
                    self._captured[key] = self._capture(room[0], given, metadata)
            graph, inputs, output = self._captured[key]
            inputs["slot_mapping"].fill_(-1)  # padding is written nowhere
            for name, each in given.items():
                inputs[name][tuple(map(slice, each.shape))] = each
            graph.replay()
        except Exception:
            logger.warning("whole forwards are not captured on this engine from now on", exc_info=True)
            self._faults[_FAULT] += 1
            return None
        return output

    @contextmanager
    def _kept_queries(self, layers: range) -> Iterator[None]:
        """Have a forward keep the queries of some layers, which all graphs write to the same place."""

        def attend(layer: int, stock: Any, attention: Any, queries: torch.Tensor, *kv: Any, **options: Any) -> Any:
            if not self.queries.numel():
                self.queries = queries.new_empty(len(layers), MOST_ROWS, *queries.shape[1:])
            self.queries[layer, : len(queries)] = queries
            return stock(attention, queries, *kv, **options)

        attention = self._attention[layers.start : layers.stop]
        with replaced_backend("forward", attention, attend) if layers else nullcontext():
            yield

    def _capture(self, rows: int, given: Mapping[str, torch.Tensor], metadata: Any) -> _Captured:
        """Capture a forward of this number of rows, which writes no KV before it is replayed."""
        own = {name: each.new_zeros(rows) if name in _OF_ROWS else each.clone() for name, each in given.items()}
        own["slot_mapping"].fill_(-1)
        own["block_table"] = own["block_table"].new_zeros(len(metadata.seq_lens), self._blocks)
        fixed, tokens = copy(metadata), {"input_ids": own["input_ids"], "positions": own["positions"]}
        sizes = {"num_actual_tokens": rows, "max_query_len": rows, "max_seq_len": self._longest}
        vars(fixed).update(sizes, **{name: own[name] for name in _tensors(metadata)})
        layers = {"attn_metadata": fixed, "slot_mapping": fixed.slot_mapping}
        layers = {name: dict.fromkeys(self._names, each) for name, each in layers.items()}
        graph, pool = torch.cuda.CUDAGraph(), current_platform.get_global_graph_pool()
        with forward_context(moe_layer_index=0, **layers) as context:
            self._forward(**tokens)  # loads the kernels
            context.moe_layer_index = 0
            # Other threads may move KV meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                output = self._forward(**tokens)
        return _Captured(graph, own, output)


def _tensors(metadata: Any) -> dict[str, torch.Tensor]:
    return {name: each for name, each in vars(metadata).items() if isinstance(each, torch.Tensor)}
