"""The scales of an fp8 cache as engines hold them: one for a tensor or for each head, once the model is loaded.

A rotation stays within a head and keeps its scale, so K is turned as it is stored. A scale that is computed while
prompts are served would not be the stored KV's.

Facts: vLLM, `model_executor/layers/attention/attention.py` (the scales on the device, and beside them on the host),
`model_executor/layers/quantization/kv_cache.py` (from the checkpoint, or 1) and `compressed_tensors` beside it (one for
each head, and the largest on the host), 0.28 to 0.32."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from semblend_trt.errors import LayoutError

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


def are_of_heads(scales: Iterable[tuple[Scale, Scale]]) -> bool:
    """Return True if heads have scales of their own."""
    return any(isinstance(each, tuple) for pair in scales for each in pair)


def head_scales(pair: tuple[Scale, Scale], heads: int) -> torch.Tensor:
    """Return a layer's scales of K and V as float32 [2, heads], on the host."""
    return torch.stack([torch.tensor(each).expand(heads) for each in pair])
