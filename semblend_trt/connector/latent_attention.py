"""Latent attention (MLA) of DeepSeek-V3's form: what its cache holds, and which configurations are of that form.

A layer caches one row a token for all heads: `kv_lora_rank` channels that are free of position, then
`qk_rope_head_dim` channels that turn (DeepSeek-AI 2024, DeepSeek-V2). Facts: vLLM,
`model_executor/models/deepseek_v2.py` (its rotary embedding turns pairs of neighbouring channels, and computes every
RoPE type but the default as yarn), `model_executor/layers/rotary_embedding/deepseek_scaling_rope.py` and
`transformers_utils/config.py` (which reads kimi_k2 by DeepSeek-V3's configuration); Transformers,
`models/deepseek_v3/`, whose cache holds K and V of every head instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels.rope import RopeRotation

# Each model type of that form, and the type by which Transformers reads its configuration.
READ_AS = {"deepseek_v3": "deepseek_v3", "kimi_k2": "deepseek_v3"}
# DeepSeek's published code, which checkpoints of the form name and no engine that is served runs.
PUBLISHED_CODE = "modeling_deepseek.DeepseekV3ForCausalLM"
_ROPE_TYPES = ("default", "yarn")
# What such a configuration must say itself where Transformers does not know its type: defaults would be guesses.
_NEEDED = (
    "kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim num_hidden_layers num_attention_heads hidden_size "
    "max_position_embeddings rope_theta"
)
# Fields that change what such a layer caches or attends to, and the values that change nothing.
_NOT_KNOWN = {
    "index_topk": ("attention_layout", "a sparse indexer picks the tokens that it attends to"),
    "sliding_window": ("sliding_window", "engines compute it without a window"),
    "llama_4_scaling": ("attention_layout", "queries are scaled by their position"),
    "truncate": ("rope_unknown", "engines compute its RoPE in different ways"),
    "apply_yarn_scaling": ("rope_unknown", "engines compute its RoPE in different ways"),
}


def check_latent(raw: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for a configuration, as written, that is not of DeepSeek-V3's form."""
    kind = raw.get("model_type")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    given = {**rope, **raw}
    if kind not in READ_AS.values() and (missing := [name for name in _NEEDED.split() if given.get(name) is None]):
        raise UnsupportedModelError("geometry", f"model type {kind!r} is given without {', '.join(missing)}")
    sizes = {name: raw.get(name, 2) for name in ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")}
    if any(type(size) is not int or size < 1 for size in sizes.values()) or sizes["qk_rope_head_dim"] % 2:
        told = ", ".join(f"{name} {size!r}" for name, size in sizes.items())
        raise UnsupportedModelError(
            "geometry", f"{told} make no latent rows that can be moved; all must be above 0, and the last even"
        )
    for name, (reason, what) in _NOT_KNOWN.items():
        found = given.get(name)
        if found not in (None, True):
            raise UnsupportedModelError(reason, f"{name} of model type {kind!r} is {found!r}: {what}")
    if raw.get("rope_interleave", True) is not True:
        raise UnsupportedModelError(
            "rope_unknown", f"rope_interleave is {raw['rope_interleave']!r}; engines turn neighbouring channels, true"
        )


def latent_row(config: Any) -> tuple[int, int]:
    """Channels of a row that are free of position, and those behind them that turn, of a configuration that was
    checked, as Transformers understands it."""
    return config.kv_lora_rank, config.qk_rope_head_dim


def latent_rotation(rotation: RopeRotation, rope_type: str, latent: int) -> RopeRotation:
    """The rotation of a whole row, from that of the channels that turn. Raises UnsupportedModelError."""
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedModelError(
            "rope_unknown",
            f"RoPE type {rope_type!r} of latent attention is computed as yarn by vLLM; supported are "
            f"{', '.join(_ROPE_TYPES)}",
        )
    return replace(rotation, interleaved=True, first_channel=latent)
