"""Runs a Hugging Face decoder along a layer schedule: each layer computes its active rows only.

The model's own layers run with another attention: K and V of the active rows are written to the pool, then the queries
attend to their whole sequence there. Latent attention (MLA) reads its rows from the pool, rounded if that is in fp8.

Facts: Transformers, `models/deepseek_v3/modeling_deepseek_v3.py`: a layer hands its cache the channels free of
position, and those that turn, the first of each pair before the second ones. It expands what it gets back to K and V of
every head. Older versions cache these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from engine_wrapper.layer_schedule import follow, follow_all
from kernels.layout import PoolLayer, indexable, layer_view
from kernels.sparse_prefill import SequenceRows, in_chunks, sparse_prefill, write_rows
from semblend_trt.errors import ConfigurationError
from semblend_trt.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_wrapper.layer_schedule import AttentionMass, DeviationCheck, EvidenceSink, LayerSchedule, Stage
    from kernels.layout import KvGeometry

ATTENTION_NAME = "semblend_paged"
# Gets a layer's index.
LayerHook = Callable[[int], None]
# Gets K and V, each [rows, kv_heads, head_dim], or latent rows and None, before they are written.
Watch = Callable[[torch.Tensor, torch.Tensor | None], None]


def check_latent_cache(model: Any) -> None:
    """Raise ConfigurationError if latent attention caches K and V of every head: its layers have no `expand_kv`."""
    if getattr(model.config, "kv_lora_rank", None) and not hasattr(model.model.layers[0].self_attn, "expand_kv"):
        raise ConfigurationError(
            f"Transformers {metadata.version('transformers')} caches K and V of every head, where the model has one "
            "latent row a token; install a newer one"
        )


def latent_rows(free: torch.Tensor, turning: torch.Tensor) -> torch.Tensor:
    """Return rows as engines keep them, [texts, 1, tokens, channels], from what Transformers caches as K and V."""
    return torch.cat([free, torch.stack(turning.chunk(2, dim=-1), dim=-1).flatten(-2)], dim=-1)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The pool, the active rows of each sequence, a watch on their K and V, and what gets their queries, for one
    stage."""

    pool: torch.Tensor
    geometry: KvGeometry
    sequences: tuple[SequenceRows, ...]
    watch: Watch | None = None
    mass: AttentionMass | None = None

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        """Write K and V of the active rows, or latent rows and None, after the watch."""
        if self.watch is not None:
            self.watch(keys, values)
        write_rows(keys, values, PoolLayer(self.pool, layer, self.geometry), self.sequences)

    def update(
        self, free: torch.Tensor, turning: torch.Tensor, layer: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the active rows of latent attention, [1, 1, rows, channels] in two parts, in place of its cache.

        Returns the stored rows of each sequence up to its last row, one after the other, in the rows' dtype."""
        rows = latent_rows(free, turning)[0].transpose(0, 1)
        self.write(layer, rows, None)
        pool = indexable(layer_view(self.pool, self.geometry, layer, 0))  # [blocks, 1, block_size, channels]
        held = torch.cat([pool[each.block_ids].flatten(0, 2)[: each.last_position + 1] for each in self.sequences])
        held = held.view(self.pool.dtype).to(rows.dtype)  # [tokens, channels]
        kept, turned = held[None, None].split([free.shape[-1], turning.shape[-1]], dim=-1)
        return kept, turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def latent_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequence[SequenceRows], scale: float | None
) -> torch.Tensor:
    """Attend each row to its own sequence up to itself; return [1, rows, heads, channels of V]. `query`: [1, heads,
    rows, channels]; `key`, `value`: [1, heads, tokens, channels], from `PagedAttention.update`."""
    found, begin = [], 0
    for each in sequences:
        end = begin + each.last_position + 1
        own = query[:, :, each.first_row : each.first_row + each.count]
        seen = torch.arange(end - begin, device=query.device) <= each.positions[:, None]
        parts = own, key[:, :, begin:end], value[:, :, begin:end]
        found.append(scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale))
        begin = end
    return torch.cat(found, dim=2).transpose(1, 2)


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
    """Attend over a paged pool, by Transformers' attention interface; return [1, rows, heads, head_dim].

    `query`: [1, heads, rows, head_dim]; `key`, `value`: [1, kv_heads, rows, head_dim], rotated; `s_aux`: [heads], the
    sinks of gpt-oss. With latent rows K and V are those of all tokens, from the pool. Without `paged`, when the model
    itself is called, Transformers' own attention runs; its mask holds the window."""
    if paged is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)[0], None
    if paged is None:
        if (mask := attention_mask) is None:
            rows, tokens = query.shape[2], key.shape[2]
            mask = torch.ones(rows, tokens, dtype=torch.bool, device=query.device).tril(tokens - rows)
        # What is added to scores: 0 where the mask shows a token.
        added = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        return eager_attention_forward(module, query, key, value, added, scaling)[0], None
    if paged.geometry.kv_factor == 1:
        return latent_attention(query, key, value, paged.sequences, scaling), None
    kv = PoolLayer(paged.pool, int(module.layer_idx), paged.geometry)  # type: ignore[arg-type]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    paged.write(kv.layer, keys, values)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = sparse_prefill if paged.mass is None else partial(paged.mass.attend, kv.layer)
    return attend(queries, kv, paged.sequences, scale, sliding_window, s_aux)[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


class _Places:
    """In place of Transformers' cache: keeps nothing. Llama 4 scales queries by position and assumes that rows are
    neighbours; this gives each row's distance from there. `positions`: int64 [rows]."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._lengths = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer: int) -> torch.Tensor:  # noqa: ARG002 - all layers have the same rows
        return self._lengths

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values


@cache
def cache_keyword(forward: Callable[..., Any]) -> str:
    """Return the name by which Transformers' `forward` takes its cache: `cache` since version 5.24."""
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"


class PagedDecoder:
    """The active rows of a forward, as `engine_wrapper.layer_schedule.LayerRows`. A check's layer runs for all rows
    when they are compared; dropped rows leave after that layer."""

    def __init__(
        self, decoder: Any, schedule: LayerSchedule, pool: torch.Tensor, geometry: KvGeometry, *hooks: LayerHook | None
    ) -> None:
        self._decoder, self._pool, self._geometry = decoder, pool, geometry
        self._before, self._after = hooks
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
        self._mass = schedule.mass

    def enter(self, stage: Stage) -> None:
        self._sequences = self._in_chunks = stage.sequences
        if self._chunk is not None:
            self._in_chunks = in_chunks(stage.sequences, self._chunk, self._geometry.block_size)
        if stage.keep is not None:
            self._hidden, self._positions = (
                tensor.index_select(1, stage.keep) for tensor in (self._hidden, self._positions)
            )
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
        if self._before is not None:
            self._before(layer)
        has_chunks = self._chunk is not None and self._decoder.config.layer_types[layer] == "chunked_attention"
        sequences = self._in_chunks if has_chunks else self._sequences
        # Within chunks positions count from the chunk's start, and mass is of the whole request.
        paged = PagedAttention(self._pool, self._geometry, sequences, watch, None if has_chunks else self._mass)
        held = paged if self._geometry.kv_factor == 1 else self._places
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
        if self._after is not None:
            self._after(layer)


class SparseForward:
    """The forward of one model over one pool.

    `model`: a `*ForCausalLM` whose decoder has `embed_tokens`, `layers`, `rotary_emb` and `norm`; its attention is
    replaced. `pool`: [blocks, layers, kv_factor, kv_heads * block_size * head_dim], on the model's device, in its dtype
    or in float8_e4m3fn. `ranks` run the same forward, each with its heads."""

    def __init__(self, model: Any, pool: torch.Tensor, geometry: KvGeometry, ranks: Ranks | None = None) -> None:
        model.set_attn_implementation(ATTENTION_NAME)
        self._model, self._pool, self.geometry = model, pool, geometry
        self._ranks = ranks or Ranks()

    @torch.inference_mode()
    def __call__(
        self,
        schedule: LayerSchedule,
        evidence_sink: EvidenceSink | None = None,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> torch.Tensor:
        """Return the final, normed hidden rows [executor rows, hidden], in the model's dtype.

        The hooks get the layer's index around every layer, and `evidence_sink` each check's evidence. The host waits
        for the device at checks only. Raises ValueError if a sequence exceeds its blocks, or a block id the pool."""
        rows = PagedDecoder(self._model.model, schedule, self._pool, self.geometry, before_layer, after_layer)
        return follow_all(rows, schedule, self.geometry.num_layers, self._ranks, evidence_sink)

    @torch.inference_mode()
    def lowest(
        self, schedule: LayerSchedule, before_layer: LayerHook | None = None, after_layer: LayerHook | None = None
    ) -> torch.Tensor:
        """Run a schedule up to its check, whose layer's K and V it writes too; hooks and errors as in a call. Returns
        the deviations of the checked tokens, float32, without waiting for them."""
        rows = PagedDecoder(self._model.model, schedule, self._pool, self.geometry, before_layer, after_layer)
        deviations = follow(rows, schedule, self.geometry.num_layers, self._ranks)
        assert deviations is not None
        return deviations

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows, vocabulary] for `hidden`, [rows, hidden] as a call returns it."""
        logits: torch.Tensor = self._model.lm_head(hidden).float()
        if (scaling := getattr(self._model.config, "logits_scaling", None)) is not None:
            logits = logits / scaling
        cap = getattr(self._model.config, "final_logit_softcapping", None)
        return logits if cap is None else (logits / cap).tanh() * cap
