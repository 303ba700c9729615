"""The scales by which vLLM stores K and V in e4m3: of each layer one for K and one for V, known from its start on.

Facts: vLLM, `model_executor/layers/attention/attention.py` (the scales on the device, and beside them on the host),
`model_executor/layers/quantization/kv_cache.py` (from the checkpoint, or 1) and `compressed_tensors` beside it (one for
each head), 0.25.1 to 0.32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from engine_wrapper.kv_scales import digest_of, scale_of
from engine_wrapper.self_check import LayoutError
from semblend_trt.namespace import unknown_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# vLLM's names of e4m3; e5m2 and its other kinds are refused.
E4M3 = ("fp8", "fp8_e4m3")


def scales_of(attention: Any) -> tuple[float, float]:
    """The scales of K and V of one of vLLM's Attention modules; waits for the device.

    Raises LayoutError `kv_scales`, with the value, for one that is missing, not one number, or not finite and above 0.
    """
    name = getattr(attention, "layer_name", "a layer")
    return _scale(attention, "k", name), _scale(attention, "v", name)


def _scale(attention: Any, kind: str, name: str) -> float:
    held, value = (getattr(attention, f"_{kind}_scale{each}", None) for each in ("", "_float"))
    found = scale_of(held, name, f"{kind}_scale")
    if not isinstance(value, float) or not math.isclose(found, value, rel_tol=1e-6):
        raise LayoutError("kv_scales", f"{name} has a {kind}_scale of {found!r}, and {value!r} on the host")
    return value


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
