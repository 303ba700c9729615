"""Donors in host memory and their texts, for tests of files."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kernels.layout import ContiguousKv
from semblend_trt.donors.donor_file import DonorText, KvForm
from semblend_trt.donors.host_tier import HostKv

if TYPE_CHECKING:
    from collections.abc import Callable

FORM = KvForm(num_layers=3, kv_factor=2, kv_heads=2, head_dim=8, dtype=torch.float32)


def host_kv(*sizes: int, form: KvForm = FORM, fill: float | None = None) -> HostKv:
    """KV in parts of so many tokens as the host tier holds it, random unless it is filled."""
    generator = torch.Generator().manual_seed(sum(sizes))
    parts = []
    for size in sizes:
        in_memory = (form.num_layers, size, form.kv_factor, form.kv_heads, form.head_dim)
        rows = torch.randn(in_memory, generator=generator) if fill is None else torch.full(in_memory, fill)
        parts.append(ContiguousKv(rows.to(form.dtype).permute(0, 2, 3, 1, 4)))
    return HostKv(tuple(parts))


@pytest.fixture
def form() -> KvForm:
    return FORM


@pytest.fixture
def make_host_kv() -> Callable[..., HostKv]:
    return host_kv


@pytest.fixture
def make_text() -> Callable[[int], DonorText]:
    return lambda tokens: DonorText("key", np.arange(7, 7 + tokens, dtype=np.int32), bytes(range(16)))


def _at_once(call: Callable[[], Any]) -> Any:
    """What the call gives or raises; one that waits for another side fails here and keeps no process from ending."""
    ended = []

    def run():
        try:
            ended.append((call(), None))
        except Exception as error:
            ended.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert ended, "the call waits"
    given, error = ended[0]
    if error is not None:
        raise error
    return given


@pytest.fixture
def at_once() -> Callable[[Callable[[], Any]], Any]:
    return _at_once
