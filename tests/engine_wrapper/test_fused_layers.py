"""Joined weights cost no memory and leave the model as it was; buckets of whole prompts are few, and padding changes
nothing. That fused layers equal the model's own is shown in test_sparse_forward.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from engine_wrapper.embedded.model_runner import ModelRunner
from engine_wrapper.fused_layers import SMALLEST_BUCKET, WholeAttention, bucket_rows, fuse
from engine_wrapper.layer_schedule import build_schedule
from engine_wrapper.sequence_work import SequenceSlice
from engine_wrapper.sparse_forward import SparseForward
from semblend_trt.errors import ConfigurationError
from tests.conftest import FAMILIES
from tests.engine_wrapper.forward_bench import (
    DEVICE,
    FUSED,
    NUM_LAYERS,
    Bench,
    attach_pool,
    close_by_norm,
    load,
    tokens_of,
)

if TYPE_CHECKING:
    from pathlib import Path

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FUSED)
def test_joined_weights_are_the_models_own(tiny_model_paths: dict[str, Path], family: str) -> None:
    model = load(tiny_model_paths[family])
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    bench = Bench(model, fused=True)
    first, second = bench.decoder, fuse(model, bench.pool, bench.geometry)
    assert second is not None
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    attention = model.model.layers[1].self_attn
    joined = second._layers[1].qkv.weight
    assert joined.data_ptr() == attention.q_proj.weight.data_ptr() == first._layers[1].qkv.weight.data_ptr()
    parts = [each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert torch.equal(joined, torch.cat(parts))
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    assert sum(storages.values()) == sum(weight.nbytes for weight in model.parameters())


def test_an_unknown_layer_keeps_the_models_own_layers(tiny_qwen2_path: Path) -> None:
    class Adapted(torch.nn.Linear):
        """A product that does more than its weights say."""

    model = load(tiny_qwen2_path)
    projection = model.model.layers[2].mlp.up_proj
    adapted = Adapted(projection.in_features, projection.out_features, bias=False, device=DEVICE)
    model.model.layers[2].mlp.up_proj = adapted
    bench = Bench(model, fused=False)
    forward = SparseForward(model, bench.pool, bench.geometry, fused=True)
    assert forward.fused is None
    assert forward(build_schedule([bench.slice(1, tokens_of(9))], NUM_LAYERS).to(DEVICE)).isfinite().all()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in FUSED])
def test_a_family_that_is_not_known_keeps_the_models_own_layers(tiny_model_paths: dict[str, Path], family: str) -> None:
    bench = Bench(load(tiny_model_paths[family]), fused=False)
    assert SparseForward(bench.model, bench.pool, bench.geometry, fused=True).fused is None


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a CPU")
def test_the_cpu_keeps_the_models_own_layers(tiny_qwen2_path: Path) -> None:
    bench = Bench(load(tiny_qwen2_path), fused=False)
    assert SparseForward(bench.model, bench.pool, bench.geometry).fused is None


# -- whole prompts ----------------------------------------------------------------------------------------------------


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
    heads = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(rows))
    padded = attention(pad(heads, (0, 0, 0, 0, 0, 19)))[:rows]
    torch.testing.assert_close(padded, attention(heads), atol=1e-6, rtol=0)
    assert attention(heads).shape == (rows, HEADS, HEAD_DIM)


def test_only_prepared_buckets_are_served_on_a_card() -> None:
    attention, card = WholeAttention(HEADS, KV_HEADS, HEAD_DIM, 0.2), torch.device("cuda")
    assert attention.serves(500, CPU)
    assert not attention.serves(500, card)
    attention.prepare([500], torch.float32, CPU)
    assert attention.serves(bucket_rows(500), card)
    assert not attention.serves(bucket_rows(500) + 1, card)


def test_the_cpu_needs_no_warm_up(tiny_qwen2_path: Path) -> None:
    runner = ModelRunner(tiny_qwen2_path, device="cpu")
    with pytest.raises(ConfigurationError, match="no pool"):
        runner.warm_up([100])
    attach_pool(runner)
    runner.warm_up([100])


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_a_prepared_length_gives_the_same_logits(tiny_qwen2_path: Path) -> None:
    runner = ModelRunner(tiny_qwen2_path, device="cuda")
    attach_pool(runner)
    slice_ = SequenceSlice(1, 0, tokens_of(131), tuple(range(17)))
    cold = runner.forward([slice_], all_rows=True)[0]
    runner.warm_up([131])
    assert close_by_norm(runner.forward([slice_], all_rows=True)[0], cold)
