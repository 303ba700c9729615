"""Fused layers equal the model's own; the joined weights cost no memory and leave the model as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_wrapper.fused_layers import fuse
from engine_wrapper.layer_schedule import build_schedule
from engine_wrapper.sequence_work import SequenceSlice
from engine_wrapper.sparse_forward import SparseForward
from kernels.layout import KvGeometry

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
BLOCK_SIZE = 8
NUM_LAYERS = 3
TOLERANCE = 1e-5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


def load(path: Path, device: str = "cpu") -> tuple[Any, KvGeometry, torch.Tensor]:
    """A tiny model with a pool whose unwritten KV is NaN."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    geometry = KvGeometry(NUM_LAYERS, config.num_key_value_heads, head_dim, BLOCK_SIZE)
    pool = torch.full((32, NUM_LAYERS, 2, geometry.row_elements), float("nan"), device=device)
    return model, geometry, pool


def tokens_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 256, (length,), generator=generator).tolist())


@torch.inference_mode()
def reference(path: Path, tokens: tuple[int, ...], device: str) -> torch.Tensor:
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").to(device)
    logits: torch.Tensor = plain(torch.tensor([tokens], device=device)).logits[0]
    return logits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_chunks_equal_the_plain_forward(
    tiny_model_paths: dict[str, Path], family: str, device: str
) -> None:
    path = tiny_model_paths[family]
    model, geometry, pool = load(path, device)
    forward = SparseForward(model, pool, geometry, fused=True)
    assert forward.fused is not None

    def run(*slices: SequenceSlice) -> list[torch.Tensor]:
        hidden = forward(build_schedule(slices, NUM_LAYERS, device))
        return list(forward.logits(hidden).split([len(piece.token_ids) for piece in slices]))

    first, second = tokens_of(43, 1), tokens_of(21, 2)
    blocks = (7, 3, 12, 5, 0, 9), (20, 21, 22)
    wanted = [reference(path, tokens, device) for tokens in (first, second)]
    scale = wanted[0].abs().max()
    together = run(SequenceSlice(1, 0, first, blocks[0]), SequenceSlice(2, 0, second, blocks[1]))
    pool.fill_(float("nan"))
    chunks = [
        run(SequenceSlice(1, begin, first[begin:end], blocks[0]))[0] for begin, end in ((0, 11), (11, 42), (42, 43))
    ]
    for actual, expected in ((together[0], wanted[0]), (together[1], wanted[1]), (torch.cat(chunks), wanted[0])):
        assert ((actual - expected).abs().max() / scale).item() <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_weights_are_the_models_own(tiny_model_paths: dict[str, Path], family: str) -> None:
    model, geometry, pool = load(tiny_model_paths[family])
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    first = fuse(model, pool, geometry)
    second = fuse(model, pool, geometry)
    assert first is not None
    assert second is not None
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    attention = model.model.layers[1].self_attn
    joined = second._layers[1].qkv.weight
    assert joined.data_ptr() == attention.q_proj.weight.data_ptr() == first._layers[1].qkv.weight.data_ptr()
    assert torch.equal(
        joined, torch.cat([each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj)])
    )
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    assert sum(storages.values()) == sum(weight.nbytes for weight in model.parameters())


def test_an_unknown_layer_keeps_the_models_own_layers(tiny_qwen2_path: Path) -> None:
    model, geometry, pool = load(tiny_qwen2_path)

    class Adapted(torch.nn.Linear):
        """A product that does more than its weights say."""

    projection = model.model.layers[2].mlp.up_proj
    model.model.layers[2].mlp.up_proj = Adapted(projection.in_features, projection.out_features, bias=False)
    forward = SparseForward(model, pool, geometry, fused=True)
    assert forward.fused is None
    schedule = build_schedule([SequenceSlice(1, 0, tokens_of(9), (1, 2))], NUM_LAYERS)
    assert forward(schedule).isfinite().all()


def test_the_cpu_keeps_the_models_own_layers(tiny_qwen2_path: Path) -> None:
    model, geometry, pool = load(tiny_qwen2_path)
    assert SparseForward(model, pool, geometry).fused is None
