"""Runs a Hugging Face decoder along a layer schedule: each layer computes its active rows only.

The model's own layers are used as they are, but for families that `engine_wrapper.fused_layers` knows on a card. Their
attention is replaced through Transformers' attention interface: K and V of the active rows are written to the pool,
then the queries attend to all of their sequence that lies there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from engine_wrapper.fused_layers import FusedDecoder, PagedAttend, fuse
from kernels.layer_ops import has_kernels
from kernels.sparse_prefill import SequenceRows, sparse_prefill, write_rows
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from engine_wrapper.layer_schedule import LayerSchedule, Stage
    from kernels.layout import KvGeometry

ATTENTION_NAME = "semblend_paged"

LayerHook = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """What the attention of one stage needs: the pool and the active rows of each sequence."""

    pool: torch.Tensor
    geometry: KvGeometry
    sequences: tuple[SequenceRows, ...]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged: PagedAttention | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface over a paged pool.

    `query`: [1, heads, rows, head_dim]; `key`, `value`: [1, kv_heads, rows, head_dim], rotated. Returns
    [1, rows, heads, head_dim]. Without `paged`, when somebody runs the model itself, it is Transformers' SDPA.
    """
    if paged is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return output, None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    write_rows(keys, values, paged.pool, layer, paged.sequences, paged.geometry)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return sparse_prefill(queries, paged.pool, layer, paged.sequences, paged.geometry, scale)[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


class SparseForward:
    """The forward of one model over one pool.

    `model`: a `*ForCausalLM` whose decoder has `embed_tokens`, `layers`, `rotary_emb` and `norm`; its attention
    implementation is set to ours. `pool`: [blocks, layers, 2, kv_heads * block_size * head_dim], on the model's device
    and in its dtype. Several of them may stand over one model, each with a pool of its own.

    With `fused`, by default on CUDA devices with Triton, layers of known families run fused (see
    `engine_wrapper.fused_layers`); otherwise they are the model's own. Raises ConfigurationError when the pool does
    not fit the model.
    """

    def __init__(self, model: Any, pool: torch.Tensor, geometry: KvGeometry, fused: bool | None = None) -> None:
        _check_pool(model, pool, geometry)
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model
        self._decoder = model.model
        self._pool = pool
        self._geometry = geometry
        wanted = pool.is_cuda and has_kernels(pool.device) if fused is None else fused
        self.fused = fuse(model, pool, geometry) if wanted else None

    @torch.inference_mode()
    def __call__(
        self,
        schedule: LayerSchedule,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> torch.Tensor:
        """Returns the final, normed hidden rows [executor rows, hidden], in the model's dtype.

        `before_layer` and `after_layer` are called with the layer's index around every layer. Raises ValueError when a
        sequence reaches beyond its blocks or a block beyond the pool.
        """
        before, after = before_layer or _no_hook, after_layer or _no_hook
        if self.fused is not None:
            return self._run_fused(self.fused, schedule, before, after)
        hidden = self._decoder.embed_tokens(schedule.token_ids[None])
        positions = schedule.positions[None]
        # cos, sin: [1, rows, rotary_dim]
        cos, sin = self._decoder.rotary_emb(hidden, position_ids=positions)
        for stage, layers in self._stages(schedule):
            if stage.keep is not None:
                hidden, positions, cos, sin = (
                    tensor.index_select(1, stage.keep) for tensor in (hidden, positions, cos, sin)
                )
            paged = PagedAttention(self._pool, self._geometry, stage.sequences)
            for layer in layers:
                before(layer)
                hidden = self._decoder.layers[layer](
                    hidden,
                    attention_mask=None,
                    position_ids=positions,
                    position_embeddings=(cos, sin),
                    use_cache=False,
                    paged=paged,
                )
                after(layer)
        rows: torch.Tensor = self._decoder.norm(hidden[0].index_select(0, schedule.output_rows))
        return rows

    def _run_fused(
        self, decoder: FusedDecoder, schedule: LayerSchedule, before: LayerHook, after: LayerHook
    ) -> torch.Tensor:
        residual, delta = decoder.embed(schedule.token_ids), None
        tables = None
        for stage, layers in self._stages(schedule):
            attend = PagedAttend(decoder, stage.sequences)
            if tables is None:
                tables = decoder.tables(schedule.positions, attend.slots())
            if stage.keep is not None:
                residual, tables = residual.index_select(0, stage.keep), tables.keep(stage.keep)
                delta = None if delta is None else delta.index_select(0, stage.keep)
            for layer in layers:
                before(layer)
                delta = decoder.layer(layer, delta, residual, tables, attend)
                after(layer)
        assert delta is not None
        return decoder.finish(delta, residual, schedule.output_rows)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [rows, hidden] as returned by the call; returns float32 [rows, vocabulary]."""
        logits: torch.Tensor = self._model.lm_head(hidden)
        return logits.float()

    @torch.inference_mode()
    def warm_up(self, lengths: Iterable[int]) -> None:
        """Prepares the card's libraries for prompts of these lengths; see `engine_wrapper.whole_attention`."""
        if self.fused is not None and self._pool.is_cuda:
            self.fused.whole.prepare(lengths, self._pool.dtype, self._pool.device)

    def _stages(self, schedule: LayerSchedule) -> Iterator[tuple[Stage, range]]:
        bounds = [*(stage.first_layer for stage in schedule.stages), self._geometry.num_layers]
        for stage, (first, end) in zip(schedule.stages, pairwise(bounds), strict=True):
            yield stage, range(first, end)


def _no_hook(layer: int) -> None:
    """In the place of a hook that nobody set."""


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
