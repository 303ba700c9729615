"""Scales of an fp8 cache as engines hold them: one number of a tensor, or one for each head, known once the model is
loaded.

A rotation stays within a head and keeps its scale, so that K is turned as it is stored. One that is computed while
prompts are served would be none of what is stored.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch

from engine_wrapper.self_check import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence


def scale_of(held: Any, owner: str, name: str) -> float:
    """The one scale in `held`; else as `scales_in`."""
    return scales_in(held, owner, name, heads=1)[0]


def scales_in(held: Any, owner: str, name: str, heads: int) -> tuple[float, ...]:
    """The scale in `held`, or one for each of the heads; the error calls it `owner` and `name`. Waits for the device.

    Raises LayoutError `kv_scales`, with the value, for one that is missing, of another number of heads, or not finite
    and above 0.
    """
    if not isinstance(held, torch.Tensor):
        raise LayoutError("kv_scales", f"{owner} has no {name} for its fp8 cache, but {held!r}")
    if held.numel() not in (1, heads):
        needed = "one" if heads == 1 else f"one, or one for each of {heads} heads,"
        raise LayoutError("kv_scales", f"{owner} has {held.numel()} values of {name}, where {needed} is needed")
    found: list[float] = held.detach().flatten().tolist()
    if not all(math.isfinite(each) and each > 0 for each in found):
        told = ", ".join(map(repr, found))
        raise LayoutError("kv_scales", f"{owner} has a {name} of {told}; one above 0 is needed")
    return tuple(found)


def digest_of(scales: Sequence[Any]) -> str:
    """A digest of all layers' scales, by which KV of others is kept apart."""
    return hashlib.sha256(repr(scales).encode()).hexdigest()[:16]
