"""Pools whose rows are one latent (MLA), in one tensor and layer by layer as vLLM has them: it is moved, compared and
written as K without V.

Every test that takes `device` runs twice: through torch on the CPU, and through Triton, compiled where there is a CUDA
device and interpreted where there is none.
"""

from __future__ import annotations

import math

import pytest
import torch

from kernels.deviation import FreshRows, deviation, relative, row_squares
from kernels.deviation import naive as naive_deviation
from kernels.kv_move import LayerMoves, Move, kv_move, naive
from kernels.kv_move.move import lie_alike, planes_of
from kernels.layout import ContiguousKv, KvGeometry, LayeredPool, PagedKv, Pool, PoolLayer, check_pool, layer_view
from kernels.rope import saturated
from kernels.sparse_prefill import naive as naive_prefill
from kernels.sparse_prefill import sparse_prefill, write_rows
from tests.kernels.builders import (
    FP8,
    assert_same,
    assert_stored,
    donor_of,
    geometry_of,
    on,
    rotation_of,
    rows_at,
    seeded,
    token_rows,
)

BLOCKS, TABLE = 9, torch.tensor([6, 1, 8, 3, 5])
FORMS = ("in_one_tensor", "apart", "padded", "layers_inside")
every_form = pytest.mark.parametrize("form", FORMS)
# Latent channels, those that rotate behind them, tokens of a block, dtype.
WIDTHS = [
    (512, 64, 16, torch.bfloat16),
    (32, 8, 4, torch.float32),
    (24, 6, 5, torch.float16),
    (7, 2, 3, torch.float32),
    (32, 8, 4, FP8),
    (512, 64, 16, FP8),
    (24, 6, 5, FP8),
    (7, 2, 3, FP8),
]
widths = pytest.mark.parametrize(("latent", "rotary", "block", "dtype"), WIDTHS)


def sizes_of(latent: int = 32, rotary: int = 8, block: int = 4) -> KvGeometry:
    return geometry_of(1, latent + rotary, block, kv_factor=1, layers=3)


def pool_of(form: str, sizes: KvGeometry, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Pool:
    """A pool of NaN. In the last form the layers of a block lie behind one another, as vLLM has them on request."""
    rows = (sizes.block_size, sizes.head_dim)
    shape = {
        "in_one_tensor": (BLOCKS, sizes.num_layers, 1, sizes.row_elements),
        "apart": (sizes.num_layers, BLOCKS, *rows),
        "padded": (sizes.num_layers, BLOCKS, rows[0] + 1, rows[1] + 16),
        "layers_inside": (BLOCKS, sizes.num_layers, *rows),
    }[form]
    memory = torch.full(shape, math.nan, device=device).to(dtype)
    if form == "in_one_tensor":
        return memory
    layers = memory.transpose(0, 1) if form == "layers_inside" else memory
    return LayeredPool(tuple(layer[:, None, : rows[0], : rows[1]] for layer in layers))


def held(pool: Pool, sizes: KvGeometry) -> PagedKv:
    return PagedKv(pool, TABLE, sizes)


def content(pool: Pool, sizes: KvGeometry) -> torch.Tensor:
    layers = [layer_view(pool, sizes, layer, 0).float() for layer in range(sizes.num_layers)]
    return torch.stack(layers).cpu()


@every_form
@widths
@pytest.mark.parametrize("interleaved", [True, False])
def test_moves_into_it_and_out_of_it(
    form: str, latent: int, rotary: int, block: int, dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    sizes, rotation = sizes_of(latent, rotary, block), rotation_of(rotary, interleaved, first_channel=latent)
    donor = donor_of(sizes, 12, 1, dtype)
    actual, expected = (held(pool_of(form, sizes, each, dtype), sizes) for each in (device, "cpu"))
    kv_move([Move(on(donor, device), 2, 4, 9)], actual, rotation)
    naive.kv_move([Move(donor, 2, 4, 9)], expected, rotation)
    assert_same(content(actual.pool, sizes), content(expected.pool, sizes), dtype)
    assert int((~content(actual.pool, sizes).isnan()).sum()) == 3 * 9 * sizes.head_dim
    read, wanted = (ContiguousKv(torch.full_like(donor.tensor.float(), math.nan).to(dtype)) for _ in range(2))
    read = on(read, device)
    kv_move([Move(actual, 4, 1, 9)], read, rotation)
    naive.kv_move([Move(expected, 4, 1, 9)], wanted, rotation)
    assert_same(read.tensor.float(), wanted.tensor.float(), dtype)
    # What is free of position came through two moves bit for bit.
    assert torch.equal(read.tensor[..., 1:10, :latent].float().cpu(), donor.tensor[..., 2:11, :latent].float())


@every_form
def test_some_layers_at_a_time(form: str, device: str) -> None:
    sizes, rotation = sizes_of(), rotation_of(8, interleaved=True, first_channel=32)
    donor, whole = donor_of(sizes, 17, seed=2), pool_of(form, sizes)
    naive.kv_move([Move(donor, 2, 5, 11)], held(whole, sizes), rotation)
    parts = held(pool_of(form, sizes, device), sizes)
    for first, end in ((0, 2), (2, 3)):
        move = Move(on(donor, device), 2, 5, 11)
        LayerMoves([move], parts.layers(first, end), rotation).make(range(first, end))
    assert_same(content(parts.pool, sizes), content(whole, sizes))


@every_form
@widths
def test_it_is_compared_as_one_row(
    form: str, latent: int, rotary: int, block: int, dtype: torch.dtype, device: str
) -> None:
    """e4m3 is compared in float32 as it is stored, so that no tolerance is needed for its rounding."""
    tolerance = torch.float32 if dtype is FP8 else dtype
    sizes, rotation = sizes_of(latent, rotary, block), rotation_of(rotary, interleaved=True, first_channel=latent)
    donor, fresh = donor_of(sizes, 12, 1, dtype), donor_of(sizes, 12, 2, dtype)
    paged = held(pool_of(form, sizes, device, dtype), sizes)
    kv_move([Move(on(donor, device), 0, 0, 12)], paged, rotation)
    rows = FreshRows(fresh.tensor[1, 0].transpose(0, 1)[2:], None, 2)
    expected = naive_deviation.deviation([Move(donor, 3, 4, 7)], rows, 1, rotation)
    actual = deviation([Move(paged, 3, 4, 7)], on(rows, device), 1, rotation)
    assert actual.shape == (1, 7)
    assert_same(actual, expected, tolerance)
    single = row_squares(on(rows, device), torch.tensor([0, 5]), paged, torch.tensor([2, 7]), 1)
    spans = [Move(donor, 2, 2, 1), Move(donor, 7, 7, 1)]
    assert_same(relative(single), naive_deviation.deviation(spans, rows, 1, rotation), tolerance)
    same = FreshRows(donor.tensor[1, 0].transpose(0, 1), None, 0)
    assert torch.equal(deviation([Move(paged, 3, 3, 7)], on(same, device), 1, rotation).cpu(), torch.zeros(1, 7))


@every_form
@widths
def test_rows_are_written_into_it(
    form: str, latent: int, rotary: int, block: int, dtype: torch.dtype, device: str
) -> None:
    """Those of a model in float16 into a pool in e4m3, where they saturate."""
    sizes = sizes_of(latent, rotary, block)
    actual, expected = (pool_of(form, sizes, each, dtype) for each in (device, "cpu"))
    own = [[0, block - 1, block, 2 * block], [1, 3]]
    sequences = [rows_at(0, own[0], [4, 0, 7]), rows_at(4, own[1], [2, 8])]
    rows = seeded(6, 1, sizes.head_dim + 3, seed=6, dtype=torch.float16 if dtype is FP8 else dtype)
    rows = rows[..., : sizes.head_dim]
    if dtype is FP8:
        rows[0, 0, 0], rows[1, 0, -1], rows[2, 0, -2] = math.inf, -448.5, 3e4
    write_rows(rows.to(device), None, PoolLayer(actual, 1, sizes), [each.to(device) for each in sequences])
    naive_prefill.write_rows(rows, None, PoolLayer(expected, 1, sizes), sequences)
    written, wanted = content(actual, sizes), content(expected, sizes)
    assert int((~written.isnan()).sum()) == rows.numel()
    paged = PagedKv(actual, torch.tensor([4, 0, 7]), sizes)
    taken = token_rows(paged, torch.tensor(own[0]))[1, 0].cpu()
    if dtype is FP8:
        assert_stored(written.to(FP8), wanted.to(FP8))
        assert_stored(taken, saturated(rows[:4], FP8))
        assert written[1].nan_to_num().abs().max() == 448
        return
    torch.testing.assert_close(written, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(taken, rows[:4])


def test_it_is_told_as_the_pool_in_one_tensor_is() -> None:
    sizes = sizes_of()
    pool = pool_of("layers_inside", sizes)
    assert isinstance(pool, LayeredPool)
    assert pool.shape == (BLOCKS, 3, 1, 4 * 40)
    assert pool.layers(1, 3).kinds == (pool.keys[1:],)
    assert planes_of(held(pool, sizes)) == pool.keys
    assert lie_alike(held(pool, sizes))


def test_what_does_not_fit_is_refused() -> None:
    sizes = sizes_of()
    pool = pool_of("apart", sizes)
    assert isinstance(pool, LayeredPool)
    check_pool(pool, sizes)
    both, one = geometry_of(1, 40, 4, layers=3), LayeredPool(pool.keys, pool.keys)
    check_pool(one, both)
    for unfit, geometry in ((pool, both), (one, sizes), (pool.layers(0, 2), sizes)):
        with pytest.raises(ValueError, match="all of one dtype on one device, are needed"):
            check_pool(unfit, geometry)
    rows, sequences = torch.zeros(1, 1, 40), [rows_at(0, [0], [0])]
    with pytest.raises(ValueError, match=r"k and v given; KvGeometry.kv_factor is 1"):
        write_rows(rows, rows, PoolLayer(pool, 0, sizes), sequences)
    with pytest.raises(ValueError, match=r"k given; KvGeometry.kv_factor is 2"):
        write_rows(rows, None, PoolLayer(one, 0, both), sequences)
    with pytest.raises(ValueError, match="kv_factor is 1; rows attend to K and V, 2"):
        sparse_prefill(rows, PoolLayer(pool, 0, sizes), sequences, 1.0)
