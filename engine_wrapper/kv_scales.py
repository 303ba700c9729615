"""The scales of an fp8 cache as engines hold them: one for a tensor or for each head, once the model is loaded.

A rotation stays within a head and keeps its scale, so K is turned as it is stored. A scale that is computed while
prompts are served would not be the stored KV's.

Facts: vLLM, `model_executor/layers/attention/attention.py` (the scales on the device, and beside them on the host),
`model_executor/layers/quantization/kv_cache.py` (from the checkpoint, or 1) and `compressed_tensors` beside it (one for
each head, and the largest on the host), 0.28 to 0.32."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch

from semblend_trt.errors import LayoutError
from semblend_trt.namespace import unknown_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# vLLM's names of e4m3; e5m2 and its other kinds are refused.
E4M3 = ("fp8", "fp8_e4m3")
# One for all heads, or one for each.
Scale = float | tuple[float, ...]


def scales_in(held: Any, owner: str, name: str, heads: int) -> tuple[float, ...]:
    """Return the scale in `held`, or one for each head; errors name `owner` and `name`. Waits for the device. Raises
    LayoutError `kv_scales`, with the value, if it is missing, for other heads, or not finite and above 0."""
    if not isinstance(held, torch.Tensor):
        raise LayoutError("kv_scales", f"{owner} has no {name} for its fp8 cache, but {held!r}")
    if held.numel() not in (1, heads):
        needed = "one" if heads == 1 else f"one, or one for each of {heads} heads,"
        raise LayoutError("kv_scales", f"{owner} has {held.numel()} values of {name}, where {needed} is needed")
    found: list[float] = held.detach().flatten().tolist()
    if not all(math.isfinite(each) and each > 0 for each in found):
        shown = ", ".join(map(repr, found))
        raise LayoutError("kv_scales", f"{owner} has a {name} of {shown}; one above 0 is needed")
    return tuple(found)


def digest_of(scales: Sequence[Any]) -> str:
    """Return a digest of all layers' scales, which keeps KV of other scales apart."""
    return hashlib.sha256(repr(scales).encode()).hexdigest()[:16]


# -- vLLM's ------------------------------------------------------------------------------------------------------------


def scales_of(attention: Any) -> tuple[Scale, Scale]:
    """Return the scales of K and V of one of vLLM's Attention modules; wait for the device. Raises as `scales_in`."""
    name = getattr(attention, "layer_name", "a layer")
    return _scale(attention, "k", name), _scale(attention, "v", name)


def _scale(attention: Any, kind: str, name: str) -> Scale:
    held, value = (getattr(attention, f"_{kind}_scale{each}", None) for each in ("", "_float"))
    found = scales_in(held, name, f"{kind}_scale", getattr(attention, "num_kv_heads", 1))
    if not isinstance(value, float) or not math.isclose(max(found), value, rel_tol=1e-6):
        shown = ", ".join(map(repr, found))
        raise LayoutError("kv_scales", f"{name} has a {kind}_scale of {shown}, and {value!r} on the host")
    return value if len(found) == 1 else found


def are_of_heads(scales: Iterable[tuple[Scale, Scale]]) -> bool:
    """Return True if heads have scales of their own."""
    return any(isinstance(each, tuple) for pair in scales for each in pair)


def head_scales(pair: tuple[Scale, Scale], heads: int) -> torch.Tensor:
    """Return a layer's scales of K and V as float32 [2, heads], on the host."""
    return torch.stack([torch.tensor(each).expand(heads) for each in pair])


def described_dtype(cache_dtype: str | None, layers: Mapping[str, Any]) -> str | None:
    """Return the cache's dtype, with its scales' digest once the model is loaded. `layers`: vLLM's, by name."""
    if cache_dtype not in E4M3:
        return cache_dtype
    held = [layers[name] for name in sorted(layers) if hasattr(layers[name], "kv_cache")]
    if not held:
        return E4M3[-1]
    try:
        return f"{E4M3[-1]}+{digest_of([scales_of(each) for each in held])}"
    except LayoutError:
        return f"{E4M3[-1]}+{unknown_value()}"
