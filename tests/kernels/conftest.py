"""Triton kernels compile where there is a CUDA device and run through Triton's interpreter where there is none."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

HAS_TRITON = find_spec("triton") is not None


@pytest.fixture(autouse=True)
def interpreted_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is interpreted when TRITON_INTERPRET is set while its module is imported, which the tests do lazily."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def triton_device() -> str:
    """Where the Triton kernels run; a test that asks for it is skipped without Triton."""
    if not HAS_TRITON:
        pytest.skip("skipped: Triton is not installed (the extra `gpu`)")
    return "cuda" if torch.cuda.is_available() else "cpu"
