"""Scales of an fp8 cache as engines hold them: one number of a tensor, known once the model is loaded.

A rotation keeps a tensor's scale, so that K is turned as it is stored. A scale for each head, or one that is computed
while prompts are served, would be none of the tensor's.
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
    """The scale in `held`, which the error calls `owner` and `name`; waits for the device.

    Raises LayoutError `kv_scales`, with the value, for one that is missing, not one number, or not finite and above 0.
    """
    if not isinstance(held, torch.Tensor):
        raise LayoutError("kv_scales", f"{owner} has no {name} for its fp8 cache, but {held!r}")
    if held.numel() != 1:
        raise LayoutError("kv_scales", f"{owner} has {held.numel()} values of {name}, where one is needed")
    value = float(held.item())
    if not (math.isfinite(value) and value > 0):
        raise LayoutError("kv_scales", f"{owner} has a {name} of {value!r}; one above 0 is needed")
    return value


def digest_of(scales: Sequence[Any]) -> str:
    """A digest of all layers' scales, by which KV of others is kept apart."""
    return hashlib.sha256(repr(scales).encode()).hexdigest()[:16]
