"""Says where a Triton kernel can serve; torch serves elsewhere."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_FP8_CAPABILITY = (8, 9)


def triton_serves(target: torch.Tensor, sources: Iterable[torch.Tensor]) -> bool:
    """True when a kernel launched on `target`'s device can read and write all tensors, their channels side by side.

    CUDA tensors of one device, and sources in pinned host memory, which the card reads in place. With
    TRITON_INTERPRET=1, tensors on the CPU, for tests. Never without Triton.
    """
    if not has_triton():
        return False
    if target.is_cuda:
        if target.dtype == torch.float8_e4m3fn and _capability(target.device) < _FP8_CAPABILITY:
            return False
    elif target.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return False
    return target.stride(-1) == 1 and all(
        source.stride(-1) == 1 and (source.device == target.device or (target.is_cuda and source.is_pinned()))
        for source in sources
    )


@cache
def has_triton() -> bool:
    """True where Triton is installed."""
    return find_spec("triton") is not None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
