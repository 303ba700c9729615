"""Runs a Hugging Face decoder along a layer schedule: each layer computes its active rows only.

The model's own layers are used as they are (`engine_wrapper.plain_rows`), but for families that
`engine_wrapper.fused_layers` knows on a card (`engine_wrapper.fused_rows`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine_wrapper.fused_layers import fuse
from engine_wrapper.fused_rows import FusedRows
from engine_wrapper.layer_loop import follow, follow_all, no_hook
from engine_wrapper.plain_rows import ATTENTION_NAME, PlainRows
from engine_wrapper.rehearsal import rehearsal
from kernels.dispatch import has_kernels
from semblend_trt.errors import ConfigurationError
from semblend_trt.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine_wrapper.course import Course
    from engine_wrapper.graph_forward import GraphForward
    from engine_wrapper.layer_loop import EvidenceSink, LayerHook
    from engine_wrapper.layer_schedule import LayerSchedule
    from kernels.layout import KvGeometry

# Above every deviation, and finite as a threshold must be.
_KEEP_ALL = 1e30


class SparseForward:
    """The forward of one model over one pool.

    `model`: a `*ForCausalLM` whose decoder has `embed_tokens`, `layers`, `rotary_emb` and `norm`; its attention
    implementation is set to ours. `pool`: [blocks, layers, 2, kv_heads * block_size * head_dim], on the model's device
    and in its dtype. Several of them may stand over one model, each with a pool of its own.

    With `fused`, by default on CUDA devices with Triton, layers of known families run fused (see
    `engine_wrapper.fused_layers`); otherwise they are the model's own. `ranks` run the same forward, each with its part
    of the model's heads. Raises ConfigurationError when the pool does not fit the model.
    """

    def __init__(
        self,
        model: Any,
        pool: torch.Tensor,
        geometry: KvGeometry,
        fused: bool | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        _check_pool(model, pool, geometry)
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model
        self._pool = pool
        self._geometry = geometry
        self._ranks = ranks or Ranks()
        wanted = pool.is_cuda and has_kernels(pool.device) if fused is None else fused
        self.fused = fuse(model, pool, geometry) if wanted else None

    @torch.inference_mode()
    def __call__(
        self,
        schedule: LayerSchedule,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
        evidence_sink: EvidenceSink | None = None,
        graphs: GraphForward | None = None,
    ) -> torch.Tensor:
        """Returns the final, normed hidden rows [executor rows, hidden], in the model's dtype.

        `before_layer` and `after_layer` are called with the layer's index around every layer, `evidence_sink` with what
        each check found. The host waits for the device at checkpoints only. Without hooks, `graphs` run what a check
        leaves, where they can. Raises ValueError when a sequence reaches beyond its blocks or a block beyond the pool.
        """
        if before_layer is not None or after_layer is not None:
            graphs = None
        hooks = before_layer or no_hook, after_layer or no_hook
        rows = self._rows(schedule)

        def replayed(course: Course, begun: int) -> torch.Tensor | None:
            if graphs is None or not isinstance(rows, FusedRows) or not graphs.fits(course, begun):
                return None
            return graphs.rest(course, rows.begun(begun, course.stages[0].keep))

        layers = self._geometry.num_layers
        return follow_all(rows, schedule, layers, self._ranks, evidence_sink, replayed, *hooks)

    @torch.inference_mode()
    def lowest(
        self, schedule: LayerSchedule, before_layer: LayerHook | None = None, after_layer: LayerHook | None = None
    ) -> torch.Tensor:
        """Runs a schedule up to its checkpoint, in whose layer and below K and V of all its rows are then in the pool.

        Returns the deviations of the checked tokens, float32, for which nothing has waited. Hooks and errors are as in
        a call.
        """
        assert schedule.checkpoint is not None
        before, after = before_layer or no_hook, after_layer or no_hook
        deviations = follow(self._rows(schedule), schedule, self._geometry.num_layers, self._ranks, None, before, after)
        assert deviations is not None
        after(schedule.checkpoint.layer)
        return deviations

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [rows, hidden] as returned by the call; returns float32 [rows, vocabulary]."""
        logits: torch.Tensor = self._model.lm_head(hidden)
        return logits.float()

    @torch.inference_mode()
    def warm_up(self, lengths: Iterable[int]) -> None:
        """Prepares the card for prompts of these lengths (see `engine_wrapper.whole_attention`) and for checks."""
        if self.fused is not None and self._pool.is_cuda:
            self.fused.whole.prepare(lengths, self._pool.dtype, self._pool.device)
            self.rehearse()

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Runs checked plans of 512 tokens over a pool of their own, so that every kernel is compiled."""
        layers, block_size = self._geometry.num_layers, self._geometry.block_size
        # The first one leaves its own KV behind, from which the second one does not deviate.
        schedules = [rehearsal(layers, block_size, min(1, layers - 1), threshold) for threshold in (0.0, _KEEP_ALL)]
        pool = self._pool.new_zeros(schedules[0][1], *self._pool.shape[1:])
        forward = SparseForward(self._model, pool, self._geometry, self.fused is not None, self._ranks)
        for schedule, _ in schedules:
            forward(schedule.to(pool.device))

    def _rows(self, schedule: LayerSchedule) -> FusedRows | PlainRows:
        if self.fused is not None:
            return FusedRows(self.fused, schedule)
        return PlainRows(self._model.model, schedule, self._pool, self._geometry)


def _check_pool(model: Any, pool: torch.Tensor, geometry: KvGeometry) -> None:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wanted = (config.num_hidden_layers, config.num_key_value_heads, head_dim)
    given = (geometry.num_layers, geometry.kv_heads, geometry.head_dim)
    if given != wanted:
        raise ConfigurationError(
            f"the pool is laid out for {given[0]} layers, {given[1]} KV heads and head dimension {given[2]}; "
            f"the model has {wanted[0]}, {wanted[1]} and {wanted[2]}"
        )
    expected = (geometry.num_layers, 2, geometry.row_elements)
    if pool.ndim != 4 or tuple(pool.shape[1:]) != expected:
        raise ConfigurationError(
            f"the pool has shape {list(pool.shape)}; [blocks, {expected[0]}, 2, {expected[2]}] is needed"
        )
    weight = model.get_input_embeddings().weight
    if pool.dtype != weight.dtype or pool.device != weight.device:
        raise ConfigurationError(
            f"the pool is {pool.dtype} on {pool.device}; it must be {weight.dtype} on {weight.device} like the model"
        )
