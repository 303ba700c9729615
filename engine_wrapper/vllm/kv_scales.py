"""The scales by which vLLM stores K and V in e4m3: of each layer one for K and one for V, or one for each of their
heads, known from its start on.

Facts: vLLM, `model_executor/layers/attention/attention.py` (the scales on the device, and beside them on the host),
`model_executor/layers/quantization/kv_cache.py` (from the checkpoint, or 1) and `compressed_tensors` beside it (one for
each head, and the largest on the host), 0.25.1 to 0.32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from engine_wrapper.kv_scales import digest_of, scales_in
from engine_wrapper.self_check import LayoutError
from semblend_trt.namespace import unknown_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# vLLM's names of e4m3; e5m2 and its other kinds are refused.
E4M3 = ("fp8", "fp8_e4m3")
# One of all heads, or one for each.
Scale = float | tuple[float, ...]


def scales_of(attention: Any) -> tuple[Scale, Scale]:
    """The scales of K and V of one of vLLM's Attention modules; waits for the device.

    Raises LayoutError `kv_scales`, with the value, for one that is missing, of another number of heads, or not finite
    and above 0.
    """
    name = getattr(attention, "layer_name", "a layer")
    return _scale(attention, "k", name), _scale(attention, "v", name)


def _scale(attention: Any, kind: str, name: str) -> Scale:
    held, value = (getattr(attention, f"_{kind}_scale{each}", None) for each in ("", "_float"))
    found = scales_in(held, name, f"{kind}_scale", getattr(attention, "num_kv_heads", 1))
    if not isinstance(value, float) or not math.isclose(max(found), value, rel_tol=1e-6):
        told = ", ".join(map(repr, found))
        raise LayoutError("kv_scales", f"{name} has a {kind}_scale of {told}, and {value!r} on the host")
    return value if len(found) == 1 else found


def are_of_heads(scales: Iterable[tuple[Scale, Scale]]) -> bool:
    """Whether heads have scales of their own."""
    return any(isinstance(each, tuple) for pair in scales for each in pair)


def head_scales(pair: tuple[Scale, Scale], heads: int) -> torch.Tensor:
    """A layer's scales of K and V as float32 [2, heads], on the host."""
    return torch.stack([torch.tensor(each).expand(heads) for each in pair])


def scales_of_heads(
    scales: Sequence[tuple[Scale, Scale]], heads: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Each layer's `head_scales`, on `device`; none where all heads have the same."""
    return tuple(head_scales(each, heads).to(device) for each in scales) if are_of_heads(scales) else ()


def described_dtype(cache_dtype: str | None, layers: Mapping[str, Any]) -> str | None:
    """The cache's dtype with a digest of its scales, by which KV of others is kept apart; without one before the model
    is loaded. `layers` are vLLM's attention layers by name."""
    if cache_dtype not in E4M3:
        return cache_dtype
    held = [layers[name] for name in sorted(layers) if hasattr(layers[name], "kv_cache")]
    return f"{E4M3[-1]}+{_digest(held)}" if held else E4M3[-1]


def _digest(held: Iterable[Any]) -> str:
    try:
        scales = [scales_of(each) for each in held]
    except LayoutError:
        return unknown_value()
    return digest_of(scales)
