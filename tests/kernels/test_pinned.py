"""Words of pinned memory that are in use arrive, and no others."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("used", [1, 511, 512, 1300])
def test_the_words_in_use_are_copied(used: int, triton_device: str) -> None:
    from kernels.pinned import read_pinned

    source = torch.arange(-50, 1250, dtype=torch.int64, pin_memory=triton_device == "cuda")
    source[0] = used
    target = torch.full((1300,), -7, dtype=torch.int64, device=triton_device)
    read_pinned(source, target)
    assert torch.equal(target[:used].cpu(), source[:used])
    assert bool((target[used:] == -7).all())
