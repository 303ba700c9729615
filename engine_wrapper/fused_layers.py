"""Decoder layers of four known families with few launches: joined projections, and one pass between two products.

A layer is six launches beside its attention: norm, QKV product, rotation and pool write, output product, norm, gate
and up product, SwiGLU, down product. Whatever is not recognised keeps Transformers' own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from engine_wrapper.shared_linear import SharedLinear
from engine_wrapper.whole_attention import WholeAttention
from kernels.layer_ops import HeadNorms, add_rms_norm, rotate_rows, silu_mul, slots_of
from kernels.sparse_prefill import SequenceRows, sparse_prefill

if TYPE_CHECKING:
    from kernels.layout import KvGeometry
    from semblend_trt.ranks import Ranks

KNOWN_LAYERS = (Qwen2DecoderLayer, Qwen3DecoderLayer, LlamaDecoderLayer, MistralDecoderLayer)

# From a layer and its rotated rows [rows, heads + 2 * kv_heads, head_dim] to [rows, heads, head_dim].
Attend = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear layers of one input joined into one: `weight` [outputs, inputs], `bias` [outputs] or None. Where `ranks`
    share the inputs, their outputs are added up."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    ranks: Ranks | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        projected = linear(rows, self.weight, self.bias)
        return projected if self.ranks is None else self.ranks.add_up(projected)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One decoder layer's weights."""

    input_norm: torch.Tensor
    qkv: Projection
    head_norms: HeadNorms | None
    output: Projection
    post_norm: torch.Tensor
    gate_up: Projection
    down: Projection
    eps: float


@dataclass(frozen=True, slots=True)
class RowTables:
    """What the layers need to know of their rows: `cos`, `sin` float32 [rows, head_dim / 2], `slots` int64 [rows]."""

    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor

    def keep(self, rows: torch.Tensor) -> RowTables:
        """The tables of some of the rows."""
        return RowTables(*(table.index_select(0, rows) for table in (self.cos, self.sin, self.slots)))

    def without_slots(self) -> RowTables:
        """The same tables, of rows whose K and V stay out of the pool."""
        return replace(self, slots=torch.full_like(self.slots, -1))


class FusedDecoder:
    """The layers of one model over one pool, [blocks, layers, 2, kv_heads * block_size * head_dim]."""

    def __init__(self, model: Any, layers: Sequence[FusedLayer], pool: torch.Tensor, geometry: KvGeometry) -> None:
        self._model = model
        self._layers = layers
        self.pool = pool
        self.geometry = geometry
        self.num_heads = int(model.config.num_attention_heads)
        self.scale = float(model.model.layers[0].self_attn.scaling)
        self.whole = WholeAttention(self.num_heads, geometry.kv_heads, geometry.head_dim, self.scale)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`token_ids`: int64 [rows]; returns [rows, hidden], which the layers may write."""
        rows: torch.Tensor = self._model.model.embed_tokens(token_ids)
        return rows

    def tables(self, positions: torch.Tensor, slots: torch.Tensor) -> RowTables:
        """`positions`: int64 [rows]. The model's own rotation, in float32 whatever the model's dtype."""
        wide = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = self._model.model.rotary_emb(wide, position_ids=positions[None])
        half = self.geometry.head_dim // 2
        return RowTables(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous(), slots)

    def layer(
        self, index: int, delta: torch.Tensor | None, residual: torch.Tensor, tables: RowTables, attend: Attend
    ) -> torch.Tensor:
        """Runs one layer; the hidden rows are `residual + delta`. Writes `residual` and returns the new delta.

        `delta` is None before the first layer.
        """
        return self.mix(index, attend(index, self.project(index, delta, residual, tables)), residual)

    def project(
        self, index: int, delta: torch.Tensor | None, residual: torch.Tensor, tables: RowTables
    ) -> torch.Tensor:
        """The layer up to its attention: rotated rows [rows, heads + 2 * kv_heads, head_dim], whose K and V are in the
        pool wherever `tables` names a slot. Adds `delta` to `residual`."""
        weights = self._layers[index]
        qkv = weights.qkv(_normed(delta, residual, weights.input_norm, weights.eps))
        rotate_rows(qkv, tables.cos, tables.sin, tables.slots, self.pool, index, self.geometry, weights.head_norms)
        return qkv.view(qkv.shape[0], -1, self.geometry.head_dim)

    def mix(self, index: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The layer from its attention's output [rows, heads, head_dim] on; writes `residual`, returns the delta."""
        weights = self._layers[index]
        normed = _normed(weights.output(attended.flatten(1)), residual, weights.post_norm, weights.eps)
        return weights.down(silu_mul(weights.gate_up(normed)))

    def keys_and_values(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The parts of projected rows that belong in the pool, each a view [rows, kv_heads, head_dim]."""
        _, keys, values = heads.split([self.num_heads, self.geometry.kv_heads, self.geometry.kv_heads], 1)
        return keys, values

    def finish(self, delta: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The final norm of some rows, [len(rows), hidden]."""
        norm = self._model.model.norm
        return _normed(delta.index_select(0, rows), residual.index_select(0, rows), norm.weight, norm.variance_epsilon)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary]."""
        logits: torch.Tensor = self._model.lm_head(hidden)
        return logits.float()


class PagedAttend:
    """Attention of one stage's rows: to their fresh K and V where all sequences are whole, else to the pool."""

    def __init__(self, decoder: FusedDecoder, sequences: tuple[SequenceRows, ...]) -> None:
        self._decoder = decoder
        self._sequences = sequences
        self._fresh = all(
            each.first_position == 0 and each.contiguous and decoder.whole.serves(each.count, decoder.pool.device)
            for each in sequences
        )

    def slots(self) -> torch.Tensor:
        """Where the rows lie in the pool, int64 [rows]."""
        return slots_of(self._sequences, self._decoder.geometry.block_size)

    def __call__(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        decoder = self._decoder
        if not self._fresh:
            query = heads[:, : decoder.num_heads]
            return sparse_prefill(query, decoder.pool, layer, self._sequences, decoder.geometry, decoder.scale)
        parts = [decoder.whole(heads[each.first_row : each.first_row + each.count]) for each in self._sequences]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def fuse(model: Any, pool: torch.Tensor, geometry: KvGeometry) -> FusedDecoder | None:
    """The model's layers fused, or None when one of them is not known.

    The weights of joined projections are copied once into one tensor, of which the model's own parameters become
    views; a second call finds them joined.
    """
    if not all(_is_known(layer) for layer in model.model.layers):
        return None
    return FusedDecoder(model, [_fused(layer) for layer in model.model.layers], pool, geometry)


def _normed(delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return add_rms_norm(residual, None, weight, eps) if delta is None else add_rms_norm(delta, residual, weight, eps)


def _is_known(layer: Any) -> bool:
    """True for a plain layer of a known family: no adapter, no quantised product, no other activation."""
    if type(layer) not in KNOWN_LAYERS or layer.self_attn.config.hidden_act != "silu":
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return all(
        type(each) in (nn.Linear, SharedLinear) for each in (*linears, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )


def _fused(layer: Any) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)
    return FusedLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=norms,
        output=_joined(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=_joined(mlp.down_proj),
        eps=layer.input_layernorm.variance_epsilon,
    )


def _joined(*linears: nn.Linear) -> Projection:
    weight = _joined_tensor([each.weight for each in linears])
    has_bias = any(each.bias is not None for each in linears)
    bias = _joined_tensor([each.bias for each in linears]) if has_bias else None
    return Projection(weight, bias, getattr(linears[0], "ranks", None))


def _joined_tensor(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """`parts` one after another in one tensor, of which they are views afterwards."""
    first = parts[0].data
    if len(parts) == 1:
        return first
    size = sum(part.shape[0] for part in parts)
    if _are_adjacent(parts):
        return first.as_strided((size, *first.shape[1:]), first.stride())
    joined = torch.cat([part.data for part in parts])
    for part, view in zip(parts, joined.split([part.shape[0] for part in parts]), strict=True):
        part.data = view
    return joined


def _are_adjacent(parts: Sequence[torch.Tensor]) -> bool:
    offset, storage = parts[0].storage_offset(), parts[0].untyped_storage().data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.untyped_storage().data_ptr() != storage or part.storage_offset() != offset:
            return False
        offset += part.numel()
    return True
