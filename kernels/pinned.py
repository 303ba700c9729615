"""Pinned host memory that a card reads in place: its copy engine may be busy with a donor for milliseconds."""

# Triton decorates untyped functions, and names compile-time constants in capitals.
# mypy: disable-error-code="misc, no-untyped-def, untyped-decorator"
# ruff: noqa: N803
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.dispatch import launch

if TYPE_CHECKING:
    import torch

WORDS = 512  # that a program copies


def read_pinned(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies the first `source[0]` words of pinned `source` to `target`, both int64 [words], on the current stream."""
    launch(_read_kernel, (triton.cdiv(len(source), WORDS),), target, source, target, WORDS=WORDS, num_warps=4)


@triton.jit
def _read_kernel(source_ptr, target_ptr, WORDS: tl.constexpr):
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    used = words < tl.load(source_ptr)
    tl.store(target_ptr + words, tl.load(source_ptr + words, mask=used), mask=used)
