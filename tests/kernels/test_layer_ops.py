"""The operations between a layer's matrix products equal naive, through the kernels and through torch.

Tolerances are relative errors in the 2-norm: 1e-5 in float32, 1e-2 in bfloat16 and float16.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from kernels.layer_ops import HeadNorms, add_rms_norm, naive, rotate_rows, silu_mul, slots_of
from kernels.layout import KvGeometry, PoolLayer, pool_view
from tests.kernels.builders import FP8, TOLERANCE, assert_same, assert_stored, rows_at

EPS = 1e-6
UNWRITTEN = -1

Random = Callable[..., torch.Tensor]


@pytest.fixture
def random(device: str) -> Random:
    return seeded(device)


def seeded(device: str) -> Random:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return draw


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert not actual.isnan().any()
    assert_same(actual, expected)


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def truncates(dtype: torch.dtype) -> bool:
    """True where Triton's interpreter runs: it cuts float32 to bfloat16, which a card rounds to the nearest."""
    return dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize(
    ("rows", "hidden", "dtype"),
    [
        (2, 3584, torch.bfloat16),
        (5, 896, torch.float16),
        (17, 33, torch.float32),
        (1, 1, torch.bfloat16),
        (3, 1023, torch.bfloat16),
        (130, 8, torch.float16),
    ],
)
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm(random: Random, dtype: torch.dtype, rows: int, hidden: int, with_residual: bool) -> None:
    values, around = random(rows, hidden, dtype=dtype), random(rows + 2, hidden, dtype=dtype)
    weight, before, given = random(hidden, dtype=dtype), around.clone(), values.clone()
    residual, expected_residual = around[1:-1], around[1:-1].clone()
    expected = naive.add_rms_norm(values, expected_residual if with_residual else None, weight, EPS)
    assert_close(add_rms_norm(values, residual if with_residual else None, weight, EPS), expected)
    assert same_bits(values, given)
    if not with_residual or not truncates(dtype):
        assert same_bits(residual, expected_residual)
    assert_close(residual, expected_residual)
    assert same_bits(around[[0, -1]], before[[0, -1]])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norm_of_rows_without_values_is_zero(random: Random, dtype: torch.dtype) -> None:
    values, weight = torch.zeros_like(random(3, 40, dtype=dtype)), random(40, dtype=dtype)
    assert not add_rms_norm(values, None, weight, EPS).any()


@pytest.mark.parametrize(
    ("rows", "inner", "scale", "dtype"),
    [
        (2, 18944, 1, torch.bfloat16),
        (33, 2048, 40, torch.bfloat16),
        (3, 2049, 1, torch.float16),
        (7, 40, 40, torch.float32),
        (1, 1, 1, torch.float32),
        (130, 5, 40, torch.float16),
    ],
)
def test_swiglu(random: Random, dtype: torch.dtype, rows: int, inner: int, scale: int) -> None:
    gate_up = scale * random(rows, 2 * inner, dtype=dtype)
    given = gate_up.clone()
    assert_close(silu_mul(gate_up), naive.silu_mul(gate_up))
    assert same_bits(gate_up, given)


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "block_size", "normed", "dtype"),
    [
        (2, 28, 4, 128, 32, False, torch.bfloat16),
        (19, 6, 2, 128, 64, True, torch.bfloat16),
        (19, 6, 2, 64, 32, False, torch.float16),
        (19, 6, 2, 64, 8, True, torch.float32),
        (19, 6, 2, 80, 8, True, torch.float16),
        (1, 4, 1, 16, 32, False, torch.float32),
        (16, 7, 1, 6, 1, True, torch.bfloat16),
        (33, 3, 3, 96, 5, False, torch.float32),
    ],
)
@pytest.mark.parametrize("held", [float("nan"), 3.25])  # NaN shows what was not written, a number what should not be
def test_rotation_and_write(
    random: Random,
    device: str,
    dtype: torch.dtype,
    normed: bool,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    held: float,
) -> None:
    geometry = KvGeometry(2, kv_heads, head_dim, block_size)
    slots, positions = scattered_slots(rows, geometry)
    slots = slots.to(device)
    angles = positions[:, None] * torch.logspace(0, -3, head_dim // 2)
    cos, sin = (table.float().to(device).contiguous() for table in (angles.cos(), angles.sin()))
    norms = HeadNorms(random(head_dim, dtype=dtype), random(head_dim, dtype=dtype), EPS) if normed else None
    around = random(rows + 2, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    # Every other block of a pool twice as large: the kernels have to follow the strides.
    blocks = 2 * (rows // block_size + 3)
    pool = torch.full((blocks, 2, 2, geometry.row_elements), held, dtype=dtype, device=device)
    expected_around, expected_pool = around.clone(), pool.clone()
    before, around_before = pool.clone(), around.clone()

    naive.rotate_rows(expected_around[1:-1], cos, sin, slots, PoolLayer(expected_pool[::2], 1, geometry), norms)
    rotate_rows(around[1:-1], cos, sin, slots, PoolLayer(pool[::2], 1, geometry), norms)
    assert same_bits(around[[0, -1]], around_before[[0, -1]])
    parts = [
        whole[1:-1].view(rows, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
        for whole in (around, expected_around)
    ]
    (query, key, value), (wanted_query, wanted_key, wanted_value) = parts
    assert_close(query, wanted_query)
    assert_close(key, wanted_key)
    assert same_bits(value, wanted_value)

    paged = pool_view(pool, geometry)
    untouched = torch.ones(paged.shape[:5], dtype=torch.bool, device=device)
    for row, slot in enumerate(slots.tolist()):
        if slot != UNWRITTEN:
            block, offset = 2 * (slot // block_size), slot % block_size
            untouched[block, 1, :, :, offset] = False
            assert same_bits(paged[block, 1, 0, :, offset], key[row])
            assert same_bits(paged[block, 1, 1, :, offset], value[row])
    assert int((~untouched).sum()) == 2 * kv_heads * int((slots >= 0).sum())
    assert same_bits(paged[untouched], pool_view(before, geometry)[untouched])
    wanted_paged = pool_view(expected_pool, geometry)
    assert same_bits(paged[untouched], wanted_paged[untouched])
    assert_close(paged[~untouched], wanted_paged[~untouched])


@pytest.mark.parametrize(("normed", "dtype"), [(False, torch.float32), (True, torch.bfloat16), (True, torch.float16)])
def test_what_is_written_in_fp8_is_what_the_rows_hold(
    random: Random, device: str, normed: bool, dtype: torch.dtype
) -> None:
    rows, heads, kv_heads, head_dim, block_size = 19, 6, 2, 80, 8
    geometry = KvGeometry(2, kv_heads, head_dim, block_size)
    slots, positions = (each.to(device) for each in scattered_slots(rows, geometry))
    angles = positions[:, None] * torch.logspace(0, -3, head_dim // 2, device=device)
    norms = HeadNorms(random(head_dim, dtype=dtype), random(head_dim, dtype=dtype), EPS) if normed else None
    qkv = 200 * random(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    pool = torch.full((rows // block_size + 3, 2, 2, geometry.row_elements), math.nan, device=device).to(FP8)
    wanted = pool.clone()
    rotate_rows(qkv, angles.cos(), angles.sin(), slots, PoolLayer(pool, 1, geometry), norms)
    whole = qkv.view(rows, -1, head_dim).clamp(-448, 448).to(FP8)
    view = pool_view(wanted, geometry).view(torch.uint8)
    for row, slot in enumerate(slots.tolist()):
        if slot != UNWRITTEN:
            held = whole.view(torch.uint8)[row, heads:].unflatten(0, (2, kv_heads))
            view[slot // block_size, 1, :, :, slot % block_size] = held
    assert_stored(pool, wanted)


def scattered_slots(rows: int, geometry: KvGeometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and positions of rows with a hole between them, in shuffled blocks; every eighth row writes nothing."""
    positions = torch.arange(rows) + (torch.arange(rows) >= rows // 2) * geometry.block_size
    generator = torch.Generator().manual_seed(5)
    block_ids = torch.randperm(rows // geometry.block_size + 3, generator=generator)
    slots = slots_of([rows_at(0, positions.tolist(), block_ids.tolist())], geometry.block_size)
    slots[7::8] = UNWRITTEN
    return slots, positions


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hidden", [33, 96])
def test_naive_means_what_transformers_norm_and_swiglu_mean(dtype: torch.dtype, hidden: int) -> None:
    random = seeded("cpu")
    values, residual = random(5, hidden, dtype=dtype), random(5, hidden, dtype=dtype)
    reference = Qwen3RMSNorm(hidden, EPS).to(dtype)
    reference.weight.data = random(hidden, dtype=dtype)
    total = values + residual
    assert_close(naive.add_rms_norm(values, None, reference.weight.data, EPS), reference(values).detach())
    assert_close(naive.add_rms_norm(values, residual, reference.weight.data, EPS), reference(total).detach())
    assert same_bits(residual, total)
    gate_up = torch.cat([values, residual], 1)
    assert_close(naive.silu_mul(gate_up), torch.nn.functional.silu(values) * residual)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_naive_means_what_transformers_rotation_means(dtype: torch.dtype, normed: bool, head_dim: int) -> None:
    random, geometry, heads, rows = seeded("cpu"), KvGeometry(1, 2, head_dim, 8), 6, 5
    qkv = random(rows, (heads + 4) * head_dim, dtype=dtype)
    query, key, _ = qkv.clone().view(rows, -1, head_dim).split([heads, 2, 2], 1)
    angles = torch.arange(rows)[:, None] * torch.logspace(0, -3, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    norms = HeadNorms(random(head_dim, dtype=dtype), random(head_dim, dtype=dtype), EPS) if normed else None
    if norms is not None:
        norm = Qwen3RMSNorm(head_dim, EPS).to(dtype)
        norm.weight.data = norms.query
        query = norm(query).detach()
        norm.weight.data = norms.key
        key = norm(key).detach()
    whole = [torch.cat([table, table], -1)[None] for table in (cos, sin)]
    wanted = apply_rotary_pos_emb(query.float()[None], key.float()[None], *whole, unsqueeze_dim=2)
    pool = torch.full((1, 1, 2, geometry.row_elements), float("nan"), dtype=dtype)
    naive.rotate_rows(qkv, cos, sin, torch.arange(rows), PoolLayer(pool, 0, geometry), norms)
    turned = qkv.view(rows, -1, head_dim)
    assert_close(turned[:, :heads], wanted[0][0].to(dtype))
    assert_close(turned[:, heads : heads + 2], wanted[1][0].to(dtype))


def test_refusals() -> None:
    geometry = KvGeometry(1, 2, 16, 8)
    pool = torch.zeros(2, 1, 2, geometry.row_elements)
    tables = torch.zeros(3, 8), torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="qkv has shape"):
        rotate_rows(torch.zeros(3, 4 * 16), *tables, PoolLayer(pool, 0, geometry))
    with pytest.raises(ValueError, match="cos is"):
        rotate_rows(torch.zeros(2, 8 * 16), *tables, PoolLayer(pool, 0, geometry))
    with pytest.raises(ValueError, match="layer is 1"):
        rotate_rows(torch.zeros(3, 8 * 16), *tables, PoolLayer(pool, 1, geometry))
    with pytest.raises(ValueError, match="gate_up has shape"):
        silu_mul(torch.zeros(3, 7))
    with pytest.raises(ValueError, match="rows has shape"):
        add_rms_norm(torch.zeros(3, 16)[:, ::2], None, torch.ones(8), EPS)
    for residual in (torch.zeros(2, 8), torch.zeros(8, 3).T):
        with pytest.raises(ValueError, match=r"residual has shape .*; contiguous \[3, 8\]"):
            add_rms_norm(torch.zeros(3, 8), residual, torch.ones(8), EPS)
    with pytest.raises(ValueError, match=r"weight has shape \[7\]; \[8\]"):
        add_rms_norm(torch.zeros(3, 8), None, torch.ones(7), EPS)
