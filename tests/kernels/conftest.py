"""Triton kernels compile where there is a CUDA device and run through Triton's interpreter where there is none."""

from importlib.util import find_spec

import pytest
import torch

from tests.kernels.builders import interpret

HAS_TRITON = find_spec("triton") is not None


@pytest.fixture(autouse=True)
def interpreted_without_cuda(monkeypatch):
    """A kernel is interpreted when TRITON_INTERPRET is set while its module is imported, which the tests do lazily."""
    if HAS_TRITON and not torch.cuda.is_available():
        interpret(monkeypatch)


@pytest.fixture(autouse=True)
def nan_in_new_tensors():
    """An output left unwritten fails: every tensor that `torch.empty` makes is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def triton_device():
    """Where the Triton kernels run; a test that asks for it is skipped without Triton."""
    if not HAS_TRITON:
        pytest.skip("skipped: Triton is not installed (the extra `gpu`)")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["torch", "triton"])
def device(request, monkeypatch):
    """Where an operation runs, by one path or the other."""
    if request.param == "triton":
        return str(request.getfixturevalue("triton_device"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return "cpu"
