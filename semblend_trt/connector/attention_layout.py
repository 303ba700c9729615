"""How a model's layers attend: groups of layers that do so alike, latent attention (MLA), and chunks.

A token of a layer with a window sees itself and the `sliding_window - 1` tokens before it. A token of a layer with
chunks sees the tokens from the first one of its chunk up to itself. Positions are cut into chunks from 0 on. A layer
with latent attention caches one row a token for all heads (DeepSeek-AI 2024, DeepSeek-V2). Its first `kv_lora_rank`
channels do not depend on the position; the next `qk_rope_head_dim` rotate.

Facts of Transformers: `configuration_utils.py`, `masking_utils.py`, `models/deepseek_v3/` and `models/llama4/` (pairs
of neighbouring channels rotate; K is normed without weights after the rotation, so that it moves as any other). Facts
of vLLM: `model_executor/models/deepseek_v2.py` and `deepseek_scaling_rope.py` (neighbouring channels rotate, every RoPE
type but the default is computed as yarn); `model_executor/models/llama4.py` (which reorders the channels of Q and K as
it loads them, so that halves rotate); `transformers_utils/config.py` (which reads kimi_k2 as DeepSeek-V3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from semblend_trt.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernels.rope import RopeRotation

Attention = Literal["full", "window", "chunks", "latent"]

# Model types with latent attention of DeepSeek-V3's form, and the types by which Transformers reads them.
READ_AS = {"deepseek_v3": "deepseek_v3", "kimi_k2": "deepseek_v3"}
# DeepSeek's published code, which checkpoints of the form name and no engine that is served runs.
PUBLISHED_CODE = "modeling_deepseek.DeepseekV3ForCausalLM"
# What such a configuration must say itself if Transformers does not know its type: defaults would be guesses.
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
# Model types with chunks: of text alone, and of a model that takes images too.
LLAMA4 = ("llama4_text", "llama4")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`layers` with one attention and one rotation, which `is_still` without RoPE.

    `window`: the most tokens that a token sees, itself included, in a "window" or a chunk of "chunks"; None for all.
    "latent" is full attention whose KV is one row a token."""

    layers: tuple[int, ...]
    attention: Attention
    window: int | None
    rotation: RopeRotation


def layer_groups(config: Any, rotations: Sequence[RopeRotation], *, is_latent: bool = False) -> tuple[LayerGroup, ...]:
    """Return the groups of the model of `config`, in the order of their first layers, by each layer's rotation.

    Raises UnsupportedModelError for an unknown attention, and unless each layer has a type."""
    found: dict[tuple[tuple[Attention, int | None], RopeRotation], list[int]] = {}
    for layer, pair in enumerate(zip(_attention(config, "latent" if is_latent else "full"), rotations, strict=True)):
        found.setdefault(pair, []).append(layer)
    return tuple(
        LayerGroup(tuple(layers), attention, window, rotation)
        for ((attention, window), rotation), layers in found.items()
    )


def sizes_of(groups: Sequence[LayerGroup], attention: Attention) -> tuple[int | None, ...]:
    """Return the window, or the chunk, of each layer with that attention; None for the others."""
    found = {layer: group.window for group in groups if group.attention == attention for layer in group.layers}
    return tuple(found.get(layer) for layer in range(sum(len(group.layers) for group in groups)))


def _attention(config: Any, whole: Attention) -> list[tuple[Attention, int | None]]:
    """Return each layer's attention, and its window or chunk; `whole` and None if that hides nothing."""
    kinds: dict[str, tuple[Attention, int | None]] = {
        "full_attention": (whole, None),
        "sliding_attention": ("window", getattr(config, "sliding_window", None)),
        "chunked_attention": ("chunks", getattr(config, "attention_chunk_size", None)),
    }
    layers, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    if unknown := sorted(set(types or ()) - kinds.keys()):
        raise UnsupportedModelError("attention_layout", f"layer types {unknown} are not among {', '.join(kinds)}")
    if types and len(types) != layers:
        raise UnsupportedModelError("attention_layout", f"{len(types)} layer types are named for {layers} layers")
    for kind, (_, size) in kinds.items():
        if size is None or size >= config.max_position_embeddings:
            kinds[kind] = (whole, None)
    return [kinds[kind] for kind in types or ["sliding_attention"] * layers]


def check_latent(raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a configuration, as written, that is not of DeepSeek-V3's form."""
    kind = raw.get("model_type")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    given = {**rope, **raw}
    if kind not in READ_AS.values() and (missing := [name for name in _NEEDED.split() if given.get(name) is None]):
        raise UnsupportedModelError("geometry", f"model type {kind!r} is given without {', '.join(missing)}")
    sizes = {name: raw.get(name, 2) for name in ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")}
    if any(type(size) is not int or size < 1 for size in sizes.values()) or sizes["qk_rope_head_dim"] % 2:
        listed = ", ".join(f"{name} {size!r}" for name, size in sizes.items())
        raise UnsupportedModelError(
            "geometry", f"{listed} make no latent rows that can be moved; all must be above 0, and the last even"
        )
    for name, (reason, what) in _NOT_KNOWN.items():
        found = given.get(name)
        if found not in (None, True):
            raise UnsupportedModelError(reason, f"{name} of model type {kind!r} is {found!r}: {what}")
    if raw.get("rope_interleave", True) is not True:
        raise UnsupportedModelError(
            "rope_unknown", f"rope_interleave is {raw['rope_interleave']!r}; engines turn neighbouring channels, true"
        )


def latent_rotation(rotation: RopeRotation, rope_type: str, latent: int) -> RopeRotation:
    """Return the rotation of a whole row, from that of its rotating channels, which follow `latent` others.

    Raises UnsupportedModelError for a RoPE type that engines compute otherwise."""
    if rope_type not in ("default", "yarn"):
        raise UnsupportedModelError(
            "rope_unknown",
            f"RoPE type {rope_type!r} of latent attention is computed as yarn by vLLM; supported are default, yarn",
        )
    return replace(rotation, interleaved=True, first_channel=latent)


def check_chunked(model_type: str, config: Any) -> None:
    """Raise UnsupportedModelError for layers with chunks of another form than Llama 4's. There layers with chunks have
    RoPE (1 in `no_rope_layers`), and layers with full attention have none."""
    types = list(getattr(config, "layer_types", None) or ())
    if model_type != LLAMA4[0]:
        if "chunked_attention" in types:
            raise UnsupportedModelError("attention_layout", f"model type {model_type!r} is not known to have chunks")
        return
    chunk, rotates = config.attention_chunk_size, list(config.no_rope_layers)
    refusal = None
    if type(chunk) is not int or chunk < 1:
        refusal = f"attention_chunk_size is {chunk!r}; a whole number of tokens above 0 is needed"
    elif types != [("full_attention", "chunked_attention")[each] for each in rotates]:
        refusal = (
            f"layer types {types} do not fit no_rope_layers {rotates}; engines put chunks into the layers with RoPE"
        )
    elif 0 not in rotates and chunk < config.max_position_embeddings:
        refusal = f"all layers have chunks of {chunk}; no check could see far"
    elif config.attention_bias:
        refusal = f"attention_bias is {config.attention_bias}; vLLM computes {model_type} without"
    if refusal is not None:
        raise UnsupportedModelError("attention_layout", refusal)
