"""Layers of a model that attend and rotate alike.

Facts: `layer_types` and `sliding_window` as Transformers 5 understands them (`configuration_utils.py`,
`masking_utils.py`): a token of a window layer sees itself and the `sliding_window - 1` tokens before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kernels.rope import RopeRotation, Rotation, by_layer
from semblend_trt.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`layers` with one attention and one rotation.

    `window`: the tokens that a token sees, itself included, if `attention` is "window"; else None. "latent" is full
    attention whose KV is one row a token (`latent_attention.py`). A rotation that `is_still` is that of layers without
    RoPE.
    """

    layers: tuple[int, ...]
    attention: Literal["full", "window", "latent"]
    window: int | None
    rotation: RopeRotation


def layer_groups(config: Any, rotations: Sequence[RopeRotation], *, is_latent: bool = False) -> tuple[LayerGroup, ...]:
    """The groups of the model of `config`, a configuration as Transformers understands it, in the order of their first
    layers. `rotations`: of each layer.

    Raises UnsupportedModelError for an attention that is neither full nor a window, and where there are not as many
    types as layers.
    """
    found: dict[tuple[int | None, RopeRotation], list[int]] = {}
    for layer, pair in enumerate(zip(_windows(config), rotations, strict=True)):
        found.setdefault(pair, []).append(layer)
    whole: Literal["full", "latent"] = "latent" if is_latent else "full"
    return tuple(
        LayerGroup(tuple(layers), whole if window is None else "window", window, rotation)
        for (window, rotation), layers in found.items()
    )


def check_groups(groups: Sequence[LayerGroup], num_layers: int) -> None:
    """Raises UnsupportedModelError unless every layer is in one group, once."""
    layers = sorted(layer for group in groups for layer in group.layers)
    if layers != list(range(num_layers)):
        raise UnsupportedModelError(
            "attention_layout", f"the layer groups hold layers {layers}; each of 0..{num_layers - 1} is needed once"
        )


def windows_of(groups: Sequence[LayerGroup]) -> tuple[int | None, ...]:
    """The window of each layer, None for full attention."""
    found = {layer: group.window for group in groups for layer in group.layers}
    return tuple(found[layer] for layer in sorted(found))


def lowest_check_layer(groups: Sequence[LayerGroup]) -> int:
    """The lowest layer whose K and V can show that text far away is another one: a layer with full attention lies below
    it. That is the number of layers where none has full attention."""
    windows = windows_of(groups)
    return windows.index(None) + 1 if None in windows else len(windows)


def rotation_of(groups: Sequence[LayerGroup]) -> Rotation:
    """The rotation of all layers, as the kernels take it."""
    found = {layer: group.rotation for group in groups for layer in group.layers}
    return by_layer([found[layer] for layer in sorted(found)])


def _windows(config: Any) -> list[int | None]:
    """The window of each layer; one that hides nothing is none."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if unknown := sorted(set(types or ()) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModelError("attention_layout", f"layer types {unknown} are neither full nor window attention")
    layers = config.num_hidden_layers
    if types and len(types) != layers:
        raise UnsupportedModelError("attention_layout", f"{len(types)} layer types are named for {layers} layers")
    if window is None or window >= config.max_position_embeddings:
        return [None] * layers
    return [None if kind == "full_attention" else window for kind in types or ["sliding_attention"] * layers]
