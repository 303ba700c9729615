"""Whole prompts: buckets are few and close, and padding changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from engine_wrapper.embedded.model_runner import ModelRunner
from engine_wrapper.fused_layers import SMALLEST_BUCKET, WholeAttention, bucket_rows
from engine_wrapper.sequence_work import SequenceSlice
from kernels.layout import KvGeometry
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
CPU = torch.device("cpu")


@given(rows=st.integers(1, 1 << 20))
def test_a_bucket_holds_its_rows_and_little_more(rows: int) -> None:
    bucket = bucket_rows(rows)
    assert rows <= bucket <= max(SMALLEST_BUCKET, rows * 17 // 16 + 1)
    assert bucket_rows(bucket) == bucket


def test_buckets_are_few() -> None:
    assert len({bucket_rows(rows) for rows in range(4096, 32769)}) <= 3 * 16 + 1


@pytest.mark.parametrize("rows", [1, 40, 77])
def test_padding_changes_no_row(rows: int) -> None:
    attention = WholeAttention(HEADS, KV_HEADS, HEAD_DIM, 0.2)
    generator = torch.Generator().manual_seed(rows)
    heads = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=generator)
    padded = attention(pad(heads, (0, 0, 0, 0, 0, 19)))[:rows]
    torch.testing.assert_close(padded, attention(heads), atol=1e-6, rtol=0)
    assert attention(heads).shape == (rows, HEADS, HEAD_DIM)


def test_only_prepared_buckets_are_served_on_a_card() -> None:
    attention = WholeAttention(HEADS, KV_HEADS, HEAD_DIM, 0.2)
    card = torch.device("cuda")
    assert attention.serves(500, CPU)
    assert not attention.serves(500, card)
    attention.prepare([500], torch.float32, CPU)
    assert attention.serves(bucket_rows(500), card)
    assert not attention.serves(bucket_rows(500) + 1, card)


def runner_with_pool(path: Path, device: str) -> ModelRunner:
    runner = ModelRunner(path, device=device)
    geometry = KvGeometry(runner.facts.num_layers, runner.facts.kv_heads, runner.facts.head_dim, 8)
    runner.attach_pool(torch.zeros(40, geometry.num_layers, 2, geometry.row_elements, device=device), geometry)
    return runner


def test_the_cpu_needs_no_warm_up(tiny_qwen2_path: Path) -> None:
    runner_with_pool(tiny_qwen2_path, "cpu").warm_up([100])
    with pytest.raises(ConfigurationError, match="no pool"):
        ModelRunner(tiny_qwen2_path, device="cpu").warm_up([100])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_prepared_length_gives_the_same_logits(tiny_qwen2_path: Path) -> None:
    runner = runner_with_pool(tiny_qwen2_path, "cuda")
    generator = torch.Generator().manual_seed(0)
    tokens = tuple(torch.randint(0, 256, (131,), generator=generator).tolist())
    piece = SequenceSlice(1, 0, tokens, tuple(range(17)))
    cold = runner.forward([piece], all_rows=True)[0]
    runner.warm_up([131])
    warm = runner.forward([piece], all_rows=True)[0]
    assert ((warm - cold).norm() / cold.norm()).item() <= 1e-5
