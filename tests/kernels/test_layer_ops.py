"""The operations between a layer's matrix products equal plain torch, through the kernels and without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from kernels.layer_ops import HeadNorms, add_rms_norm, rotate_rows, silu_mul, slots_of
from kernels.layout import KvGeometry, pool_view
from kernels.sparse_prefill import SequenceRows

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
EPS = 1e-6

Random = Callable[..., torch.Tensor]


@pytest.fixture(params=["kernel", "torch"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test through the kernels (interpreted without a card) and through torch."""
    if request.param == "kernel":
        return str(request.getfixturevalue("triton_device"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return "cpu"


@pytest.fixture
def random(device: str) -> Random:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return draw


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    difference = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert difference.item() <= TOLERANCE[actual.dtype]  # NaN fails as well


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 96), (17, 33)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm(random: Random, dtype: torch.dtype, rows: int, hidden: int, with_residual: bool) -> None:
    values, residual = random(rows, hidden, dtype=dtype), random(rows, hidden, dtype=dtype)
    reference = Qwen3RMSNorm(hidden, EPS).to(values.device, dtype)
    reference.weight.data = random(hidden, dtype=dtype)
    total = values + residual if with_residual else values.clone()
    actual = add_rms_norm(values, residual if with_residual else None, reference.weight.data, EPS)
    assert_close(actual, reference(total).detach())
    if with_residual:
        assert_close(residual, total)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "inner"), [(1, 16), (3, 2049), (7, 40)])
def test_swiglu(random: Random, dtype: torch.dtype, rows: int, inner: int) -> None:
    gate_up = random(rows, 2 * inner, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=1)
    assert_close(silu_mul(gate_up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rotation_and_write(random: Random, device: str, dtype: torch.dtype, normed: bool, head_dim: int) -> None:
    geometry, heads, rows = KvGeometry(2, 2, head_dim, 8), 6, 19
    qkv = random(rows, (heads + 4) * head_dim, dtype=dtype)
    pool = torch.full((5, 2, 2, geometry.row_elements), float("nan"), dtype=dtype, device=device)
    positions = torch.tensor([*range(3), *range(10, 26)])
    sequence = SequenceRows(0, positions, torch.tensor([4, 0, 2, 1])).to(device)
    slots = slots_of([sequence], geometry.block_size)
    slots[7] = -1
    angles = positions[:, None] * torch.logspace(0, -3, head_dim // 2)
    cos, sin = (table.float().to(device).contiguous() for table in (angles.cos(), angles.sin()))
    norms = HeadNorms(random(head_dim, dtype=dtype), random(head_dim, dtype=dtype), EPS) if normed else None

    query, key, value = qkv.view(rows, -1, head_dim).split([heads, 2, 2], 1)
    if norms is not None:
        for weight in (norms.query, norms.key):
            norm = Qwen3RMSNorm(head_dim, EPS).to(device, dtype)
            norm.weight.data = weight
            query, key = (norm(query).detach(), key) if weight is norms.query else (query, norm(key).detach())
    whole = [torch.cat([table, table], -1)[None] for table in (cos, sin)]
    wanted = apply_rotary_pos_emb(query.float()[None], key.float()[None], *whole, unsqueeze_dim=2)
    wanted_query, wanted_key = (part[0].to(dtype) for part in wanted)
    wanted_value = value.clone()

    rotate_rows(qkv, cos, sin, slots, pool, 1, geometry, norms)
    query, key, value = qkv.view(rows, -1, head_dim).split([heads, 2, 2], 1)
    assert_close(query, wanted_query)
    assert_close(key, wanted_key)
    assert torch.equal(value, wanted_value)
    paged = pool_view(pool, geometry)
    assert paged[:, 0].isnan().all()
    assert int((~paged[:, 1].isnan()).sum()) == (rows - 1) * 4 * head_dim
    for row, position in enumerate(positions.tolist()):
        if row != 7:
            block = int(sequence.block_ids[position // geometry.block_size])
            held = paged[block, 1, :, :, position % geometry.block_size]
            assert torch.equal(held[0], key[row])
            assert torch.equal(held[1], value[row])


def test_refusals() -> None:
    geometry = KvGeometry(1, 2, 16, 8)
    pool = torch.zeros(2, 1, 2, geometry.row_elements)
    tables = torch.zeros(3, 8), torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="qkv has shape"):
        rotate_rows(torch.zeros(3, 4 * 16), *tables, pool, 0, geometry)
    with pytest.raises(ValueError, match="cos is"):
        rotate_rows(torch.zeros(2, 8 * 16), *tables, pool, 0, geometry)
    with pytest.raises(ValueError, match="layer is 1"):
        rotate_rows(torch.zeros(3, 8 * 16), *tables, pool, 1, geometry)
    with pytest.raises(ValueError, match="gate_up has shape"):
        silu_mul(torch.zeros(3, 7))
    with pytest.raises(ValueError, match="rows has shape"):
        add_rms_norm(torch.zeros(3, 8), torch.zeros(2, 8), torch.ones(8), EPS)
