"""Runs a Hugging Face decoder along a layer schedule: each layer computes its active rows only.

The model's own layers run with another attention: K and V of the active rows are written to the pool, then the queries
attend to their whole sequence in the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from engine_wrapper.latent_cache import LatentCache, latent_attention
from engine_wrapper.layer_schedule import follow, follow_all, no_hook
from kernels.layout import PoolLayer
from kernels.sparse_prefill import SequenceRows, in_chunks, sparse_prefill, write_rows
from semblend_trt.ranks import Ranks

if TYPE_CHECKING:
    from engine_wrapper.layer_schedule import DeviationCheck, EvidenceSink, LayerHook, LayerSchedule, Stage
    from kernels.layout import KvGeometry

ATTENTION_NAME = "semblend_paged"


# Gets K and V, each [rows, kv_heads, head_dim], or latent rows and None, before they are written.
Watch = Callable[[torch.Tensor, torch.Tensor | None], None]


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The pool, the active rows of each sequence and a watch on their K and V, for one stage."""

    pool: torch.Tensor
    geometry: KvGeometry
    sequences: tuple[SequenceRows, ...]
    watch: Watch | None = None

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        """Write K and V of the active rows, or latent rows and None, after the watch."""
        if self.watch is not None:
            self.watch(keys, values)
        write_rows(keys, values, PoolLayer(self.pool, layer, self.geometry), self.sequences)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged: PagedAttention | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface over a paged pool.

    `query`: [1, heads, rows, head_dim]; `key`, `value`: [1, kv_heads, rows, head_dim], rotated; `s_aux`: [heads], the
    sinks of gpt-oss. Over latent rows (MLA) K and V are those of all tokens, from the pool (`latent_cache.py`). Returns
    [1, rows, heads, head_dim]. Without `paged`, when the model itself is called, it is
    Transformers' own attention, by SDPA where there are no sinks; its mask holds the window.
    """
    if paged is None and s_aux is not None:
        output, _ = eager_attention_forward(module, query, key, value, _added(attention_mask, query, key), scaling)
        return output, None
    if paged is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return output, None
    if paged.geometry.kv_factor == 1:
        return latent_attention(query, key, value, paged.sequences, scaling), None
    kv = PoolLayer(paged.pool, int(module.layer_idx), paged.geometry)  # type: ignore[arg-type]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    paged.write(kv.layer, keys, values)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return sparse_prefill(queries, kv, paged.sequences, scale, sliding_window, s_aux)[None], None


def _added(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What attention adds to scores: 0 where `mask`, or without one all tokens before a row's own, shows a token."""
    if mask is None:
        rows, tokens = query.shape[2], key.shape[2]
        mask = torch.ones(rows, tokens, dtype=torch.bool, device=query.device).tril(tokens - rows)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


class _Places:
    """In the place of Transformers' cache: keeps nothing, and tells Llama 4, which scales its queries by their position
    and takes rows to be neighbours, how far each of them is from there."""

    def __init__(self, positions: torch.Tensor) -> None:
        """`positions`: int64 [rows]."""
        self._lengths = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer: int) -> torch.Tensor:  # noqa: ARG002 - all layers have the same rows
        return self._lengths

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values


@cache
def cache_keyword(forward: Callable[..., Any]) -> str:
    """By which name the `forward` of a class of Transformers takes its cache: `cache` since version 5.24."""
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"


class PagedDecoder:
    """The active rows of a forward, as `engine_wrapper.layer_schedule.LayerRows`.

    A check's layer runs for all rows when they are compared; dropped rows leave behind that layer.
    """

    def __init__(self, decoder: Any, schedule: LayerSchedule, pool: torch.Tensor, geometry: KvGeometry) -> None:
        self._decoder = decoder
        self._pool = pool
        self._geometry = geometry
        # Granite's decoder multiplies its embeddings; others have no factor.
        self._hidden = decoder.embed_tokens(schedule.token_ids[None])
        if (factor := getattr(decoder, "embedding_multiplier", None)) is not None:
            self._hidden = self._hidden * factor
        self._positions = schedule.positions[None]
        # Gemma's full attention and windows rotate in two ways.
        self._kinds = decoder.config.layer_types if hasattr(decoder.rotary_emb, "layer_types") else None
        self._chunk = getattr(decoder.config, "attention_chunk_size", None)
        self._is_scaled = getattr(decoder.config, "attn_temperature_tuning", False)
        self._compared: int | None = None

    def enter(self, stage: Stage) -> None:
        self._sequences = self._in_chunks = stage.sequences
        if self._chunk is not None:
            self._in_chunks = in_chunks(stage.sequences, self._chunk, self._geometry.block_size)
        if stage.keep is not None:
            self._hidden, self._positions = (
                tensor.index_select(1, stage.keep) for tensor in (self._hidden, self._positions)
            )
        # What rotates the rows of each kind of attention, as the model's own code makes it.
        self._turned = {
            kind: self._decoder.rotary_emb(self._hidden, self._positions, *([] if kind is None else [kind]))
            for kind in set(self._kinds or [None])
        }
        self._places = _Places(self._positions[0]) if self._is_scaled else None

    def run(self, layer: int) -> None:
        if layer != self._compared:
            self._run(layer, None)

    def compare(self, check: DeviationCheck, ranks: Ranks) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def watch(keys: torch.Tensor, values: torch.Tensor | None) -> None:
            found.append(check.deviations(keys, values, self._pool, self._geometry, ranks))

        self._run(check.layer, watch)
        self._compared = check.layer
        return found[0]

    def output(self, rows: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._decoder.norm(self._hidden[0].index_select(0, rows))
        return normed

    def _run(self, layer: int, watch: Watch | None) -> None:
        has_chunks = self._chunk is not None and self._decoder.config.layer_types[layer] == "chunked_attention"
        sequences = self._in_chunks if has_chunks else self._sequences
        paged = PagedAttention(self._pool, self._geometry, sequences, watch)
        held = (
            LatentCache(self._pool, self._geometry, sequences, paged.write)
            if self._geometry.kv_factor == 1
            else self._places
        )
        run = self._decoder.layers[layer]
        self._hidden = run(
            self._hidden,
            attention_mask=None,
            position_ids=self._positions,
            position_embeddings=self._turned[None if self._kinds is None else self._kinds[layer]],
            use_cache=False,
            paged=paged,
            **{cache_keyword(type(run).forward): held},
        )


class SparseForward:
    """The forward of one model over one pool.

    `model`: a `*ForCausalLM` whose decoder has `embed_tokens`, `layers`, `rotary_emb` and `norm`; its attention
    implementation is set to ours. `pool`: [blocks, layers, kv_factor, kv_heads * block_size * head_dim], on the model's
    device, in its dtype or in float8_e4m3fn. One model may have several forwards, each with its own pool. `ranks` run
    the same forward, each with its part of the model's heads.
    """

    def __init__(self, model: Any, pool: torch.Tensor, geometry: KvGeometry, ranks: Ranks | None = None) -> None:
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model
        self._pool = pool
        self._geometry = geometry
        self._ranks = ranks or Ranks()

    @torch.inference_mode()
    def __call__(
        self,
        schedule: LayerSchedule,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
        evidence_sink: EvidenceSink | None = None,
    ) -> torch.Tensor:
        """Returns the final, normed hidden rows [executor rows, hidden], in the model's dtype.

        `before_layer` and `after_layer` are called with the layer's index around every layer, `evidence_sink` with what
        each check found. The host waits for the device at checks only. Raises ValueError when a sequence exceeds its
        blocks or a block id the pool.
        """
        before, after = before_layer or no_hook, after_layer or no_hook
        layers = self._geometry.num_layers
        return follow_all(self._rows(schedule), schedule, layers, self._ranks, evidence_sink, before, after)

    @torch.inference_mode()
    def lowest(
        self, schedule: LayerSchedule, before_layer: LayerHook | None = None, after_layer: LayerHook | None = None
    ) -> torch.Tensor:
        """Runs a schedule up to its check; writes K and V of all rows up to the check's layer.

        Returns the deviations of the checked tokens, float32, without waiting for them. Hooks and errors as in a call.
        """
        assert schedule.check is not None
        before, after = before_layer or no_hook, after_layer or no_hook
        deviations = follow(self._rows(schedule), schedule, self._geometry.num_layers, self._ranks, None, before, after)
        assert deviations is not None
        after(schedule.check.layer)
        return deviations

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [rows, hidden] as returned by the call; returns float32 [rows, vocabulary]."""
        logits: torch.Tensor = self._model.lm_head(hidden)
        logits = logits.float()
        if (scaling := getattr(self._model.config, "logits_scaling", None)) is not None:
            logits = logits / scaling
        cap = getattr(self._model.config, "final_logit_softcapping", None)
        return logits if cap is None else (logits / cap).tanh() * cap

    @torch.inference_mode()
    def _rows(self, schedule: LayerSchedule) -> PagedDecoder:
        return PagedDecoder(self._model.model, schedule, self._pool, self._geometry)
