"""Stand-ins for a decoder of TensorRT-LLM, with the signatures of NVIDIA/TensorRT-LLM; each names its file there.

Their numbers are real: the weights are a tiny model's, and the attention is torch's over a paged pool.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kernels.layout import pool_view
from tests.engine_wrapper.trtllm.cache_stand_ins import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine_wrapper.trtllm.cache_stand_ins import KVCacheManager


class AttentionMetadata:
    """`_torch/attention_backend/interface.py`, AttentionMetadata (1.2 @3277953), as the engine fills it in."""

    def __init__(self, manager: KVCacheManager, sequences: list[tuple[int, int, int]], num_contexts: int) -> None:
        """`sequences`: (request id, cached tokens, tokens to compute) of each."""
        self.kv_cache_manager, self.num_contexts, self.all_rank_num_tokens = manager, num_contexts, None
        self.request_ids = [request_id for request_id, _, _ in sequences]
        self.kv_cache_params = SimpleNamespace(num_cached_tokens_per_seq=[cached for _, cached, _ in sequences])
        self.seq_lens = torch.tensor([length for _, _, length in sequences], dtype=torch.int)

    @property
    def num_tokens(self) -> int:
        return int(self.seq_lens.sum())


class RMSNorm(nn.Module):
    """`_torch/modules/rms_norm.py`, RMSNorm (1.2): with a residual it adds it first and returns the sum as well."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return self.norm(hidden_states)
        return self.norm(hidden_states + residual), hidden_states + residual


class TrtllmAttention:
    """`_torch/attention_backend/trtllm.py`, TrtllmAttention (1.2; main moves the options into `forward_args`). Queries
    are the last tokens of each sequence, and are rotated here where RoPE is fused."""

    def __init__(self, layer_idx: int, rotate: Callable[..., Any] | None) -> None:
        self.layer_idx, self._rotate = layer_idx, rotate

    def forward(self, q: Any, k: Any, v: Any, metadata: AttentionMetadata, **options: Any) -> torch.Tensor:
        manager = metadata.kv_cache_manager
        geometry = manager.geometry
        view = pool_view(manager.pool, geometry)[:, self.layer_idx]
        if k is None:
            kv_size = geometry.kv_heads * geometry.head_dim
            q, k, v = q.split([q.shape[-1] - 2 * kv_size, kv_size, kv_size], dim=-1)
        outputs, row = [], 0
        for index, blocks in enumerate(manager.get_batch_cache_indices(metadata.request_ids)):
            begin, length = metadata.kv_cache_params.num_cached_tokens_per_seq[index], int(metadata.seq_lens[index])
            positions = torch.arange(begin, begin + length)
            part = [each[row : row + length].unflatten(-1, (-1, geometry.head_dim)) for each in (q, k, v)]
            if self._rotate is not None:
                part[:2] = self._rotate(positions, *part[:2])
            places = torch.tensor(blocks)[positions // BLOCK], positions % BLOCK
            for kind in (0, 1):
                view[places[0], kind, :, places[1]] = part[1 + kind]
            stored = view[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : begin + length]
            mask = torch.arange(begin + length)[None] <= positions[:, None]
            outputs.append(
                nn.functional.scaled_dot_product_attention(
                    part[0].transpose(0, 1)[None], stored[0][None], stored[1][None], attn_mask=mask, enable_gqa=True
                )[0].transpose(0, 1)
            )
            row += length
        return torch.cat(outputs).flatten(1)


class Attention(nn.Module):
    """`_torch/modules/attention.py`, Attention (1.2 @3277953; with `style` "main" as @00547a25). TRTLLM's attention is
    always given q, k and v in one tensor."""

    def __init__(self, source: Any, layer_idx: int, rotate: Callable[..., Any], *, fused: bool, style: str) -> None:
        super().__init__()
        self.layer_idx, self.rope_fusion, self.head_dim, self.style = layer_idx, fused, source.head_dim, style
        self.projections = nn.ModuleList([source.q_proj, source.k_proj, source.v_proj])
        self.q_size, self.kv_size = source.q_proj.out_features, source.k_proj.out_features
        self.o_proj, self.rotate = source.o_proj, rotate
        self.q_scaling, self.attn_output_gate, self.has_quant_scale = 1.0, None, False
        self.attn = TrtllmAttention(layer_idx, rotate if fused else None)
        self.asks: dict[str, Any] = {}

    def forward(self, position_ids: torch.Tensor, hidden_states: Any, attn_metadata: Any, **kwargs: Any) -> Any:
        parts = [each(hidden_states) for each in self.projections]
        if not self.rope_fusion:
            heads = [each.unflatten(-1, (-1, self.head_dim)) for each in parts[:2]]
            parts[:2] = (each.flatten(1) for each in self.rotate(position_ids[0], *heads))
        qkv = torch.cat(parts, dim=-1)[: attn_metadata.num_tokens]
        options: dict[str, Any] = {"attention_mask": "causal", "out_scale": None, "attention_window_size": None}
        options |= self.asks
        if self.style == "main":
            options = {"forward_args": SimpleNamespace(**options, output=None)}
        return self.o_proj(self.attn.forward(qkv, None, None, attn_metadata, **options))


class DecoderLayer(nn.Module):
    """`_torch/models/modeling_qwen.py`, QwenDecoderLayer (1.2 @3277953); the MLP is called as in `modeling_qwen3.py`,
    with what attention data parallelism would need."""

    def __init__(self, source: Any, attention: Attention) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.layer_idx = attention, source.mlp, attention.layer_idx
        self.input_layernorm = RMSNorm(source.input_layernorm)
        self.post_attention_layernorm = RMSNorm(source.post_attention_layernorm)

    def forward(
        self, position_ids: Any, hidden_states: Any, attn_metadata: Any, residual: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(
            position_ids=position_ids, hidden_states=hidden_states, attn_metadata=attn_metadata, **kwargs
        )
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        assert attn_metadata.all_rank_num_tokens is None
        return self.mlp(hidden_states), residual


class FusedNormLayer(DecoderLayer):
    """`_torch/models/modeling_llama.py`, LlamaDecoderLayer (1.2): a layer ends with the next one's first norm, the last
    with the model's, so that only the lowest begins with a norm."""

    next_layer_layernorm: RMSNorm

    def forward(
        self, position_ids: Any, hidden_states: Any, attn_metadata: Any, residual: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(
            position_ids=position_ids, hidden_states=hidden_states, attn_metadata=attn_metadata, **kwargs
        )
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.next_layer_layernorm(self.mlp(hidden_states), residual)


class DecoderModel(nn.Module):
    """`_torch/models/modeling_qwen.py`, QwenModel, and `modeling_llama.py`, LlamaModel (1.2 @3277953)."""

    def __init__(self, source: Any, *, fused: bool, style: str) -> None:
        super().__init__()
        rotary = source.rotary_emb

        def rotate(positions: torch.Tensor, *parts: torch.Tensor) -> list[torch.Tensor]:
            cos, sin = (each[0][:, None] for each in rotary(parts[0], positions[None]))
            half = cos.shape[-1] // 2
            return [each * cos + torch.cat((-each[..., half:], each[..., :half]), dim=-1) * sin for each in parts]

        self.embed_tokens, self.norm = source.embed_tokens, RMSNorm(source.norm)
        self.has_fused_norms = source.config.model_type == "llama"
        kind = FusedNormLayer if self.has_fused_norms else DecoderLayer
        self.layers = nn.ModuleList(
            kind(each, Attention(each.self_attn, index, rotate, fused=fused, style=style))
            for index, each in enumerate(source.layers)
        )
        norms = [*(layer.input_layernorm for layer in list(self.layers)[1:]), self.norm]
        for layer, norm in zip(self.layers, norms, strict=True):
            layer.next_layer_layernorm = norm

    def forward(
        self, attn_metadata: Any, input_ids: Any = None, position_ids: Any = None, inputs_embeds: Any = None,
        spec_metadata: Any = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(
                position_ids=position_ids, hidden_states=hidden_states, attn_metadata=attn_metadata, residual=residual
            )
        return hidden_states if self.has_fused_norms else self.norm(hidden_states, residual)[0]


class CausalModel(nn.Module):
    """`_torch/models/modeling_utils.py`, DecoderModelForCausalLM (1.2 @3277953)."""

    def __init__(self, source: Any, *, fused: bool, style: str) -> None:
        super().__init__()
        self.model, self.lm_head = DecoderModel(source.model, fused=fused, style=style), source.lm_head

    def forward(self, attn_metadata: Any, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, attn_metadata=attn_metadata, position_ids=position_ids, **kwargs)
        return self.lm_head(hidden[attn_metadata.seq_lens.cumsum(0) - 1])
