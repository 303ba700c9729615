"""Decoder layers of four known families with few kernel launches, and the active rows of a forward through them.

Projections of one input are joined, and one pass does what stands between two products. Beside its attention a layer
has eight launches: norm, QKV product, rotation and pool write, output product, norm, gate and up product, SwiGLU, down
product. Layers of other families stay Transformers' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from kernels.layer_ops import HeadNorms, add_rms_norm, rotate_rows, silu_mul, slots_of
from kernels.layout import PoolLayer
from kernels.sparse_prefill import SequenceRows, sparse_prefill, write_rows
from kernels.sparse_prefill.rows import to_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine_wrapper.layer_schedule import DeviationCheck, LayerSchedule, Stage
    from kernels.layout import KvGeometry
    from semblend_trt.ranks import Ranks

KNOWN_LAYERS = (Qwen2DecoderLayer, Qwen3DecoderLayer, LlamaDecoderLayer, MistralDecoderLayer)

# Lengths of whole prompts are padded to so many buckets between one power of two and the next.
BUCKETS_AN_OCTAVE = 16
SMALLEST_BUCKET = 64


class SharedLinear(nn.Linear):
    """This rank's part of a linear layer's inputs. The ranks' results are added up: each has the layer's outputs.

    Rank 0 alone adds the bias.
    """

    def __init__(self, linear: nn.Linear, inputs: slice, ranks: Ranks) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(linear.weight[:, inputs].clone(), requires_grad=False)
        self.bias = linear.bias if ranks.rank == 0 else None  # type: ignore[assignment]
        self.out_features, self.in_features = self.weight.shape
        self.ranks = ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input`: [..., this rank's inputs]; returns [..., outputs] of all ranks."""
        return self.ranks.add_up(super().forward(input))


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear layers of one input joined into one: `weight` [outputs, inputs], `bias` [outputs] or None.

    Ranks that share the inputs add up their outputs.
    """

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


class RowTables(NamedTuple):
    """Rotation and slot of each row: `cos`, `sin` float32 [rows, head_dim / 2], `slots` int64 [rows], -1 for none."""

    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor


def bucket_rows(rows: int) -> int:
    """The smallest bucket that holds `rows`: at most a sixteenth more."""
    octave = 1 << max(rows - 1, SMALLEST_BUCKET - 1).bit_length() - 1
    step = max(octave // BUCKETS_AN_OCTAVE, 1)
    return max(-(-rows // step) * step, SMALLEST_BUCKET)


class WholeAttention:
    """Causal attention of whole prompts to their own fresh K and V, through torch's SDPA.

    On Hopper torch takes cuDNN, which is the fastest. cuDNN builds a plan for every new length, for about a third of a
    second: longer than many a prefill. So lengths are padded to buckets, and only prepared buckets are served here. The
    kernel over the paged pool, which is a little slower, serves the rest. Rows are [rows, heads + 2 * kv_heads,
    head_dim]: query heads, then key heads, then value heads.
    """

    def __init__(self, num_heads: int, kv_heads: int, head_dim: int, scale: float) -> None:
        self._shape = num_heads + 2 * kv_heads, head_dim
        self._split = [num_heads, kv_heads, kv_heads]
        self._scale = scale
        self._prepared: set[int] = set()

    def prepare(self, lengths: Iterable[int], dtype: torch.dtype, device: torch.device) -> None:
        """Has cuDNN build plans for prompts of these lengths. It keeps them for the calling thread only."""
        for bucket in sorted({bucket_rows(length) for length in lengths} - self._prepared):
            self._attend(torch.zeros((bucket, *self._shape), dtype=dtype, device=device))
            self._prepared.add(bucket)

    def serves(self, rows: int, device: torch.device) -> bool:
        """True where cuDNN needs no plan, or has built one."""
        return device.type != "cuda" or bucket_rows(rows) in self._prepared

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """`heads`: [rows, heads + 2 * kv_heads, head_dim], rotated; returns [rows, heads, head_dim]."""
        rows = heads.shape[0]
        if heads.is_cuda and bucket_rows(rows) > rows:
            # Padded rows stand behind all others, so that no row attends to them.
            return self._attend(pad(heads, (0, 0, 0, 0, 0, bucket_rows(rows) - rows)))[:rows]
        return self._attend(heads)

    def _attend(self, heads: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.transpose(0, 1)[None] for part in heads.split(self._split, 1))
        attended = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self._scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return attended[0].transpose(0, 1)


class FusedDecoder:
    """The layers of one model over one pool, [blocks, layers, 2, kv_heads * block_size * head_dim]."""

    def __init__(self, model: Any, layers: Sequence[FusedLayer], pool: torch.Tensor, geometry: KvGeometry) -> None:
        self._model = model
        self._layers = layers
        self.pool = pool
        self.geometry = geometry
        self.dtype: torch.dtype = model.dtype
        # Whether the pool holds K and V as they are computed: what is rounded for it is read from it.
        self.keeps_fresh = pool.dtype == self.dtype
        self.num_heads = int(model.config.num_attention_heads)
        self.scale = float(model.model.layers[0].self_attn.scaling)
        self.whole = WholeAttention(self.num_heads, geometry.kv_heads, geometry.head_dim, self.scale)

    def kv(self, layer: int) -> PoolLayer:
        """A layer's part of the pool."""
        return PoolLayer(self.pool, layer, self.geometry)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`token_ids`: int64 [rows]; returns [rows, hidden], which the layers may write."""
        rows: torch.Tensor = self._model.model.embed_tokens(token_ids)
        return rows

    def tables(self, positions: torch.Tensor, slots: torch.Tensor) -> RowTables:
        """`positions`: int64 [rows]. The model's own rotation, always in float32."""
        wide = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = self._model.model.rotary_emb(wide, position_ids=positions[None])
        half = self.geometry.head_dim // 2
        return RowTables(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous(), slots)

    def project(
        self, index: int, delta: torch.Tensor | None, residual: torch.Tensor, tables: RowTables
    ) -> torch.Tensor:
        """Runs the layer up to its attention; returns rotated rows, [rows, heads + 2 * kv_heads, head_dim].

        Writes K and V of the rows that have a slot in `tables` into the pool. The hidden rows are `residual + delta`;
        `delta`, None before the first layer, is added to `residual`.
        """
        weights = self._layers[index]
        qkv = weights.qkv(_normed(delta, residual, weights.input_norm, weights.eps))
        rotate_rows(qkv, tables.cos, tables.sin, tables.slots, self.kv(index), weights.head_norms)
        return qkv.view(qkv.shape[0], -1, self.geometry.head_dim)

    def mix(self, index: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Runs the layer behind its attention; `attended`: [rows, heads, head_dim]. Writes `residual`, returns a
        delta."""
        weights = self._layers[index]
        normed = _normed(weights.output(attended.flatten(1)), residual, weights.post_norm, weights.eps)
        return weights.down(silu_mul(weights.gate_up(normed)))

    def finish(self, delta: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The final norm of some rows, [len(rows), hidden]."""
        norm = self._model.model.norm
        return _normed(delta.index_select(0, rows), residual.index_select(0, rows), norm.weight, norm.variance_epsilon)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary]."""
        logits: torch.Tensor = self._model.lm_head(hidden)
        return logits.float()


class PagedAttend:
    """Attention of one stage's rows: to their fresh K and V if all sequences are whole prompts and the pool holds no
    others, else to the pool."""

    def __init__(self, decoder: FusedDecoder, sequences: tuple[SequenceRows, ...]) -> None:
        self._decoder = decoder
        self._sequences = sequences
        self._fresh = decoder.keeps_fresh and all(
            each.first_position == 0 and each.contiguous and decoder.whole.serves(each.count, decoder.pool.device)
            for each in sequences
        )

    def __call__(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        decoder = self._decoder
        if not self._fresh:
            query = heads[:, : decoder.num_heads]
            return sparse_prefill(query, decoder.kv(layer), self._sequences, decoder.scale)
        parts = [decoder.whole(heads[each.first_row : each.first_row + each.count]) for each in self._sequences]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class BegunLayer:
    """Rows before the attention of a layer: `residual` [rows, hidden] and the projected `heads`, [rows, heads +
    2 * kv_heads, head_dim], whose K and V are in the pool."""

    layer: int
    residual: torch.Tensor
    heads: torch.Tensor

    def fill(self, rows: BegunLayer) -> None:
        """Copies `rows` over the first ones."""
        self.residual[: len(rows.residual)] = rows.residual
        self.heads[: len(rows.heads)] = rows.heads


class FusedRows:
    """The active rows of a forward, as `engine_wrapper.layer_schedule.LayerRows`.

    In a check's layer, rows stop behind the projections until the check has decided: dropped rows never attend there.
    """

    def __init__(self, decoder: FusedDecoder, schedule: LayerSchedule) -> None:
        self._decoder = decoder
        self._positions = schedule.positions
        # The hidden rows are residual + delta; while heads are set, a layer's projected rows, residual alone.
        self._residual = decoder.embed(schedule.token_ids)
        self._delta: torch.Tensor | None = None
        self._heads: torch.Tensor | None = None
        self._tables: RowTables | None = None

    def enter(self, stage: Stage) -> None:
        self._stage = stage
        self._attend = PagedAttend(self._decoder, stage.sequences)
        if self._tables is None:
            slots = slots_of(stage.sequences, self._decoder.geometry.block_size)
            self._tables = self._decoder.tables(self._positions, slots)
        if stage.keep is None:
            return
        self._tables = RowTables(*(table.index_select(0, stage.keep) for table in self._tables))
        self._residual = self._residual.index_select(0, stage.keep)
        self._delta = None if self._delta is None else self._delta.index_select(0, stage.keep)
        self._heads = None if self._heads is None else self._heads.index_select(0, stage.keep)

    def run(self, layer: int) -> None:
        assert self._tables is not None
        heads, self._heads = self._heads, None
        if heads is None:
            heads = self._decoder.project(layer, self._delta, self._residual, self._tables)
        self._delta = self._decoder.mix(layer, self._attend(layer, heads), self._residual)

    def compare(self, check: DeviationCheck, ranks: Ranks) -> torch.Tensor:
        assert self._tables is not None
        decoder, geometry = self._decoder, self._decoder.geometry
        # The donor's K and V have to stay in the pool until they are compared.
        unwritten = self._tables._replace(slots=torch.full_like(self._tables.slots, -1))
        self._heads = decoder.project(check.layer, self._delta, self._residual, unwritten)
        self._delta = None
        _, keys, values = self._heads.split([decoder.num_heads, geometry.kv_heads, geometry.kv_heads], 1)
        deviations = check.deviations(keys, values, decoder.pool, geometry, ranks)
        write_rows(keys, values, decoder.kv(check.layer), self._stage.sequences)
        return deviations

    def begun(self, layer: int, keep: torch.Tensor | None) -> BegunLayer:
        """The rows `keep`, int64 on the host, or all of them, behind `compare` at `layer`."""
        assert self._heads is not None
        if keep is None:
            return BegunLayer(layer, self._residual, self._heads)
        rows = to_device(keep, self._residual.device)
        return BegunLayer(layer, self._residual.index_select(0, rows), self._heads.index_select(0, rows))

    def output(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._delta is not None
        return self._decoder.finish(self._delta, self._residual, rows)


def fuse(model: Any, pool: torch.Tensor, geometry: KvGeometry) -> FusedDecoder | None:
    """The model's layers fused, or None when one of them is not known.

    The weights of joined projections are copied into one tensor, and the model's own parameters become views of it. A
    second call copies nothing.
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
