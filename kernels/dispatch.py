"""Whether a Triton kernel can serve tensors, and how one is launched; torch serves the rest."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_FP8_CAPABILITY = (8, 9)


def has_kernels(device: torch.device) -> bool:
    """Return whether Triton is installed and runs: on CUDA, and with TRITON_INTERPRET=1 on the CPU, for tests."""
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interpreted) and has_triton()


def triton_serves(target: torch.Tensor, sources: Iterable[torch.Tensor]) -> bool:
    """Return whether a kernel on `target`'s device can read and write all tensors; their channels must be side by side.

    The tensors must lie on one device that `has_kernels`. Sources may also lie in pinned host memory, which a card
    reads in place."""
    if not has_kernels(target.device):
        return False
    if target.is_cuda and target.dtype == torch.float8_e4m3fn and _capability(target.device) < _FP8_CAPABILITY:
        return False
    return target.stride(-1) == 1 and all(
        source.stride(-1) == 1 and (source.device == target.device or (target.is_cuda and source.is_pinned()))
        for source in sources
    )


def launch(kernel: Any, grid: tuple[int, ...], near: torch.Tensor, *arguments: object, **constants: object) -> None:
    """Launch a Triton kernel on the current stream of the device of `near`, or run it in the interpreter."""
    with torch.cuda.device_of(near):
        kernel[grid](*arguments, **constants)


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
