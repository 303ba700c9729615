"""The active rows of a forward through SGLang's own layers, over its pool of slots.

SemBlend's kernel attends in the place of SGLang's backend, so that any set of rows may be active in any layer. What
goes on beside the hidden rows is in the batch, a copy of SGLang's running one, and is handed over when rows leave.

Facts: SGLang 0.5.23, `srt/models/llama.py`, `qwen2.py`, `qwen3.py`; `srt/layers/radix_attention.py`;
`srt/layers/layer_boundary/residual/batch.py` (`export_replay_handoff`); `srt/model_executor/forward_batch_info.py`, and
`forward_context.py` beside it."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.layer_boundary.residual import batch as residual
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from engine_wrapper.patches import replaced_method
from engine_wrapper.self_check import compare_rotation
from kernels.layout import PoolLayer
from kernels.sparse_prefill import sparse_prefill, write_rows
from semblend_trt.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from engine_wrapper.layer_schedule import DeviationCheck, LayerSchedule, Stage
    from kernels.layout import KvGeometry, LayeredPool, SequenceRows
    from kernels.rope import Rotation
    from semblend_trt.ranks import Ranks


class _TakenError(Exception):
    """Leaves a layer with what was made of its K and V."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """What planned rows need of SGLang's decoder, `model`. `longest`: tokens of the longest sequence."""

    runner: Any
    model: Any
    pool: LayeredPool
    geometry: KvGeometry
    rotation: Rotation
    longest: int

    def attention(self, layer: int) -> Any:
        """Return a layer's RadixAttention."""
        return self.model.layers[layer].self_attn.attn

    def cache(self, layer: int) -> PoolLayer:
        """Return the cache of one layer."""
        return PoolLayer(self.pool.layers(layer, layer + 1), 0, replace(self.geometry, num_layers=1))

    def by_head(self, keys: Any, values: Any, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V as [rows, kv_heads, head_dim]. Raises LayoutError if the attention is called otherwise."""
        if keys is None or values is None or not options.pop("save_kv_cache", True) or options:
            raise LayoutError("attention_call", f"an attention is called without K, V or with {sorted(options)}")
        shape = -1, self.geometry.kv_heads, self.geometry.head_dim
        return keys.reshape(shape), values.reshape(shape)


@contextmanager
def in_forward(runner: Any, batch: Any) -> Iterator[None]:
    """Run what is inside as SGLang runs a forward of `batch`."""
    with forward_context(ForwardContext(attn_backend=runner.attn_backend), forward_batch=batch), torch.no_grad():
        yield


def rows_batch(batch: Any, token_ids: torch.Tensor, positions: torch.Tensor) -> Any:
    """Return a batch of these rows, int64 [rows], for layers whose attention is ours: it names no slots."""
    own, rows = copy(batch), len(token_ids)
    own.forward_mode, own.batch_size = ForwardMode.EXTEND, 1
    own.input_ids, own.positions = token_ids.to(batch.input_ids.dtype), positions.to(batch.positions.dtype)
    own.extend_num_tokens = own.seq_lens_sum = own.global_num_token_non_padded_cpu = rows
    own.rids = own.residual_stream = own.orig_seq_lens = own.kv_loc_plan = own.kv_loc_cols = own.spec_info = None
    for name in ("global_num_token_non_padded", "num_token_non_padded"):
        if (held := getattr(batch, name, None)) is not None:
            setattr(own, name, torch.full_like(held, rows))
    return own


class SglangRows:
    """Rows between two layers (`layer_schedule.LayerRows`); SemBlend attends for the model while they are entered."""

    def __init__(self, parts: Decoder, schedule: LayerSchedule, batch: Any) -> None:
        """`batch`: SGLang's running one, from which ours are copied."""
        self._parts, self._schedule, self._running = parts, schedule, batch
        self._positions = schedule.positions
        self._sequences: tuple[SequenceRows, ...] = ()
        self._hidden: torch.Tensor | None = None
        self._batch: Any = None
        self._left = ExitStack()

    def __enter__(self) -> Self:
        self._left.enter_context(
            in_forward(self._parts.runner, rows_batch(self._running, self._schedule.token_ids, self._positions))
        )
        for layer in range(self._parts.geometry.num_layers):
            attend = partial(self._attend, layer)
            self._left.enter_context(replaced_method(self._parts.attention(layer), "forward", attend))
        return self

    def __exit__(self, *raised: object) -> None:
        self._left.close()

    def enter(self, stage: Stage) -> None:
        """Drop the rows that the stage does not keep."""
        if (kept := stage.keep) is not None:
            handed = residual.export_replay_handoff(self._hidden, self._batch)
            self._positions = self._positions.index_select(0, kept)
            self._take(_mapped(handed, lambda rows: rows.index_select(0, kept)))
        self._sequences = stage.sequences

    def run(self, layer: int) -> None:
        """Run a layer."""
        self._begin()
        self._hidden = self._parts.model.layers[layer](self._batch.positions, self._hidden, self._batch)

    def compare(self, check: DeviationCheck, ranks: Ranks) -> torch.Tensor:
        """Run the check's layer up to K and V of all rows, which are written once the deviations are taken."""
        parts, layer = self._parts, check.layer

        def take(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            found = check.deviations(keys, values, parts.pool, parts.geometry, ranks)
            write_rows(keys, values, parts.cache(layer), self._sequences)
            return found

        self._begin()
        handed = residual.export_replay_handoff(self._hidden, self._batch)
        # A layer writes into what it is given, and runs again for the rows that go on.
        self._take(_mapped(handed, torch.Tensor.clone))
        deviations: torch.Tensor = take_fresh(parts, layer, self._batch, self._hidden, take)
        self._take(handed)
        return deviations

    def output(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to some rows, int64; return [len(rows), hidden]."""
        if not len(rows):
            assert self._hidden is not None
            return self._hidden.new_empty((0, self._hidden.shape[-1]))
        normed: torch.Tensor = residual.final_norm(self._hidden, self._batch, self._parts.model.norm)
        return normed.index_select(0, rows)

    def _begin(self) -> None:
        """Have the rows that enter the lowest layer, at first."""
        if self._hidden is None:
            self._batch = rows_batch(self._running, self._schedule.token_ids, self._positions)
            residual.start(self._batch)
            self._hidden = self._parts.model.embed_tokens(self._batch.input_ids)

    def _take(self, handed: Any) -> None:
        self._batch = rows_batch(self._running, self._positions, self._positions)  # no layer reads token ids
        self._hidden = residual.import_replay_handoff(handed, self._batch)

    def _attend(
        self, layer: int, queries: torch.Tensor, keys: Any, values: Any, _: Any, *more: Any, **options: Any
    ) -> torch.Tensor:
        """Write K and V of the rows, then attend, in the place of an attention's `forward`."""
        if more:
            options["save_kv_cache"] = more[0]
        parts, attention = self._parts, self._parts.attention(layer)
        cache = parts.cache(layer)
        write_rows(*parts.by_head(keys, values, options), cache, self._sequences)
        mass = self._schedule.mass
        attend = sparse_prefill if mass is None else partial(mass.attend, layer)
        own = queries.view(-1, attention.tp_q_head_num, parts.geometry.head_dim)
        attended: torch.Tensor = attend(own, cache, self._sequences, attention.scaling)
        return attended.reshape(len(own), -1)


def take_fresh(
    parts: Decoder,
    layer: int,
    batch: Any,
    hidden: torch.Tensor | None,
    take: Callable[[torch.Tensor, torch.Tensor], Any],
) -> Any:
    """Run a layer up to its attention; return what `take` makes of K and V, each [rows, kv_heads, head_dim]. The layer
    may write into `hidden`. Raises LayoutError `model_call`."""
    attention = parts.attention(layer)

    def leave(_: torch.Tensor, keys: Any, values: Any, *__: Any, **options: Any) -> None:
        raise _TakenError(take(*parts.by_head(keys, values, options)))

    # Our own attention may be in its place already.
    own = vars(attention).pop("forward", None)
    try:
        with replaced_method(attention, "forward", leave):
            parts.model.layers[layer](batch.positions, hidden, batch)
    except _TakenError as taken:
        return taken.args[0]
    finally:
        if own is not None:
            attention.forward = own
    raise LayoutError("model_call", f"layer {layer} has not called its attention")


def check_rotation(parts: Decoder, running: Any, token_ids: torch.Tensor) -> None:
    """Do as `self_check.compare_rotation` for the decoder, int64 [tokens]."""

    def keys_of(layer: int, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        batch = rows_batch(running, ids, positions)
        with in_forward(parts.runner, batch):
            residual.start(batch)
            hidden = parts.model.embed_tokens(batch.input_ids)
            return take_fresh(parts, layer, batch, hidden, lambda keys, _: keys)

    compare_rotation(token_ids, parts.longest, parts.rotation, parts.geometry.num_layers, keys_of)


def _mapped(handed: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same hand-over of changed rows."""
    other = handed.residual
    return handed._replace(value=change(handed.value), residual=None if other is None else change(other))
