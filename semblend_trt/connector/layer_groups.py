"""Layers of a model that attend and rotate alike.

Facts: `layer_types`, `sliding_window` and `attention_chunk_size` as Transformers 5 understands them
(`configuration_utils.py`, `masking_utils.py`): a token of a window layer sees itself and the `sliding_window - 1`
tokens before it, one of a layer with chunks the tokens from its chunk's first one up to itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kernels.rope import RopeRotation, Rotation, by_layer
from semblend_trt.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence


Attention = Literal["full", "window", "chunks", "latent"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`layers` with one attention and one rotation.

    `window`: the most tokens that a token sees, itself included: those of a "window", or of a chunk of "chunks"; None
    for all. "latent" is full attention whose KV is one row a token (`latent_attention.py`). A rotation that `is_still`
    is that of layers without RoPE.
    """

    layers: tuple[int, ...]
    attention: Attention
    window: int | None
    rotation: RopeRotation


def layer_groups(config: Any, rotations: Sequence[RopeRotation], *, is_latent: bool = False) -> tuple[LayerGroup, ...]:
    """The groups of the model of `config`, a configuration as Transformers understands it, in the order of their first
    layers. `rotations`: of each layer.

    Raises UnsupportedModelError for an attention that is none of those known, and where there are not as many types as
    layers.
    """
    found: dict[tuple[tuple[Attention, int | None], RopeRotation], list[int]] = {}
    for layer, pair in enumerate(zip(_attention(config, "latent" if is_latent else "full"), rotations, strict=True)):
        found.setdefault(pair, []).append(layer)
    return tuple(
        LayerGroup(tuple(layers), attention, window, rotation)
        for ((attention, window), rotation), layers in found.items()
    )


def check_groups(groups: Sequence[LayerGroup], num_layers: int) -> None:
    """Raises UnsupportedModelError unless every layer is in one group, once."""
    layers = sorted(layer for group in groups for layer in group.layers)
    if layers != list(range(num_layers)):
        raise UnsupportedModelError(
            "attention_layout", f"the layer groups hold layers {layers}; each of 0..{num_layers - 1} is needed once"
        )


def sizes_of(groups: Sequence[LayerGroup], attention: Attention) -> tuple[int | None, ...]:
    """Of each layer the window, or the chunk, if that is its attention; else None."""
    found = {layer: group.window for group in groups if group.attention == attention for layer in group.layers}
    return tuple(found.get(layer) for layer in range(sum(len(group.layers) for group in groups)))


def lowest_check_layer(groups: Sequence[LayerGroup]) -> int:
    """The lowest layer whose K and V can show that text far away is another one: a layer with full attention lies below
    it. That is the number of layers where none has full attention."""
    layers = sum(len(group.layers) for group in groups)
    return min((group.layers[0] + 1 for group in groups if group.window is None), default=layers)


def halved(groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """The groups of an engine that keeps a head's channels in another order: the pairs that turn are halves there."""
    return tuple(replace(group, rotation=replace(group.rotation, interleaved=False)) for group in groups)


def rotation_of(groups: Sequence[LayerGroup]) -> Rotation:
    """The rotation of all layers, as the kernels take it."""
    found = {layer: group.rotation for group in groups for layer in group.layers}
    return by_layer([found[layer] for layer in sorted(found)])


def _attention(config: Any, whole: Attention) -> list[tuple[Attention, int | None]]:
    """The attention of each layer and its window or chunk; one that hides nothing is `whole`, without any."""
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
