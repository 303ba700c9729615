"""Pools of layers that lie apart and of latent rows: KV is compared, attended to and written as in one tensor."""

import math
from dataclasses import replace

import pytest
import torch

from kernels import naive
from kernels.deviation import deviation, relative, row_squares, squares
from kernels.kv_move import Move, kv_move
from kernels.layout import ContiguousKv, LayeredPool, PoolLayer, check_pool, layer_view
from kernels.sparse_prefill import sparse_prefill, write_rows
from tests.kernels import builders
from tests.kernels.builders import BLOCK, FP8, LAYOUTS, assert_same, donor_of, filled, geometry_of, on, pool_of, rows_at

GEOMETRY, LATENT = geometry_of(layers=3), geometry_of(1, 40, kv_factor=1, layers=3)
ROTATION, LATENT_ROTATION = builders.rotation_of(), builders.rotation_of(8, True, first_channel=32)
every_pool = pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        *((layout, GEOMETRY) for layout in ("in_one_tensor", *LAYOUTS)),
        *((layout, LATENT) for layout in ("in_one_tensor", *builders.LATENT_LAYOUTS)),
    ],
    ids=lambda each: each if isinstance(each, str) else f"kv_factor-{each.kv_factor}",
)


@every_pool
@pytest.mark.parametrize(
    ("dtype", "source_start", "target_start", "length"),
    [(torch.float32, 3, 3, 1), (torch.float32, 1, 5, BLOCK + 1), (FP8, 6, 2, 13)],
)
def test_deviation_from_it(layout, sizes, dtype, source_start, target_start, length, device):
    """e4m3 is compared in float32 as it is stored, so that no tolerance is needed for its rounding."""
    donor, fresh = donor_of(sizes, 20, 4, dtype), builders.fresh_rows(donor_of(sizes, 20, 5, dtype), 1)
    rotation = ROTATION if sizes.kv_factor == 2 else LATENT_ROTATION
    place = (source_start, target_start, length)
    expected = naive.deviation([Move(donor, *place)], fresh, 1, rotation)
    spans, rows = [Move(filled(layout, device, donor), *place)], on(fresh, device)
    assert_same(deviation(spans, rows, 1, rotation), expected)
    assert_same(relative(squares(spans, rows, 1, rotation)), expected)


@every_pool
@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_single_rows_are_compared_as_spans_of_one_token(layout, sizes, dtype, device):
    donor = donor_of(sizes, 17, seed=3, dtype=dtype)
    held, changed = filled(layout, device, donor), ContiguousKv(donor.tensor[:, :, :, 4:13].clone())
    changed.tensor[1, 0, :, 2], changed.tensor[1, -1, :, 5] = (torch.tensor(each).to(dtype) for each in (3.0, -1.0))
    fresh = on(builders.fresh_rows(changed, 1), device)
    rows, positions = torch.tensor([7, 2, 5]), torch.tensor([11, 6, 9])
    actual = row_squares(fresh, rows, held, positions, 1)
    spans = [Move(held, at, row, 1, turn=0) for row, at in zip(rows.tolist(), positions.tolist(), strict=True)]
    torch.testing.assert_close(actual, squares(spans, fresh, 1, ROTATION))
    assert actual[0, :, 0].tolist() == [0.0] * sizes.kv_factor
    assert bool((actual[0, [0, -1], [1, 2]] > 0).all())
    assert (relative(actual).shape, actual.dtype) == ((sizes.kv_factor, 3), torch.float32)


@pytest.mark.promise("engines", "In vLLM a check's sample finds...")
@pytest.mark.promise("engines", "In the embedded engine KV in...")
@pytest.mark.parametrize("layout", ["in_one_tensor", *LAYOUTS])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "dtype", "kv_dtype"),
    [
        (4, 2, 8, BLOCK, torch.float32, torch.float32),
        (7, 1, 128, 16, torch.bfloat16, torch.bfloat16),
        (6, 3, 24, 5, torch.float16, torch.float16),
        (3, 3, 16, BLOCK, torch.float16, FP8),
    ],
)
def test_rows_attend_to_it(layout, heads, kv_heads, dim, block, dtype, kv_dtype, device):
    positions = [[0, block - 1, block, 3 * block, 4 * block - 2], list(range(2, block + 1))]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "block_size": block}
    batch = builders.Batch(positions, dtype=dtype, kv_dtype=kv_dtype, **sizes)
    pool, (q, in_one, sequences) = pool_of(layout, batch.geometry, device, kv_dtype).pool, batch.on(device)
    for kind in (0, 1):
        layer_view(pool, batch.geometry, 1, kind).copy_(layer_view(in_one, batch.geometry, 1, kind))
    attended = sparse_prefill(q, PoolLayer(pool, 1, batch.geometry), sequences, 0.3)
    expected = naive.sparse_prefill(batch.q, PoolLayer(batch.pool, 1, batch.geometry), batch.sequences, 0.3)
    assert_same(attended, expected)


@pytest.mark.promise("engines", "In the embedded engine KV in...")
@every_pool
@pytest.mark.parametrize("block", [3, 16])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, FP8), (torch.float32, FP8)],
)
def test_rows_are_written_into_it(layout, sizes, block, dtype, kv_dtype, device):
    """Into a pool in e4m3 they are rounded, and saturate."""
    sizes = replace(sizes, block_size=block)
    actual, expected = (pool_of(layout, sizes, each, kv_dtype) for each in (device, "cpu"))
    sequences = [rows_at(0, [0, block - 1, block, 2 * block], [4, 0, 7]), rows_at(4, [1, 2], [2, 8])]
    k, *v = 100 * builders.seeded(sizes.kv_factor, 6, sizes.kv_heads, sizes.head_dim + 3, seed=6, dtype=dtype)[..., 3:]
    k[0, 0, 0], k[1, 0, -1], k[2, 0, -2] = (math.inf, -448.5, 3e4) if kv_dtype is FP8 else (1, 2, 3)
    kv = PoolLayer(actual.pool, 1, sizes), [each.to(device) for each in sequences]
    write_rows(k.to(device), v[0].to(device) if v else None, *kv)
    naive.write_rows(k, v[0] if v else None, PoolLayer(expected.pool, 1, sizes), sequences)
    written, wanted = builders.content(actual), builders.content(expected)
    assert int((~written.isnan()).sum()) == k.numel() * sizes.kv_factor
    if kv_dtype is FP8:
        builders.assert_stored(written.to(FP8), wanted.to(FP8))
        assert written.nan_to_num().abs().max() == 448
    else:
        torch.testing.assert_close(written, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_serves_it_where_k_and_v_lie_alike(layout, triton_device, monkeypatch):
    donor = donor_of(GEOMETRY, 6, seed=1)
    held, near = filled(layout, triton_device, donor), on(donor, triton_device)
    written = PoolLayer(held.pool, 1, GEOMETRY), [rows_at(0, range(6), builders.TABLE.tolist()).to(triton_device)]
    rows, served_by_torch = builders.fresh_rows(near, 1), []
    by_torch = ["kv_move.kv_move_by_torch", "deviation.squares_by_torch"]
    by_torch += ["sparse_prefill.write_rows_by_torch", "sparse_prefill.sparse_prefill_by_torch"]
    for name in by_torch:
        monkeypatch.setattr(f"kernels.{name}", lambda *_, name=name: served_by_torch.append(name))
    kv_move([Move(near, 0, 8, 6)], held, ROTATION)
    squares([Move(held, 0, 0, 6)], rows, 1, ROTATION)
    write_rows(rows.k, rows.k, *written)
    sparse_prefill(rows.k, *written, 0.3)
    assert served_by_torch == ([] if layout in builders.CACHES else by_torch)


@pytest.mark.parametrize(
    "broken",
    [
        lambda pool: LayeredPool(pool.keys[1:], pool.values),
        lambda pool: LayeredPool(pool.keys),
        lambda pool: pool.layers(0, 2),
        lambda pool: LayeredPool(pool.keys, (*pool.values[1:], pool.values[0][:, :1])),
        lambda pool: LayeredPool(pool.keys, (*pool.values[1:], pool.values[0].half())),
        lambda _: pool_of("apart", LATENT).pool,
    ],
)
def test_layers_that_do_not_fit_are_refused(broken):
    pool = pool_of("blocks_heads_channels", GEOMETRY).pool
    check_pool(pool, GEOMETRY)
    with pytest.raises(ValueError, match="all of one dtype on one device, are needed"):
        check_pool(broken(pool), GEOMETRY)


def test_latent_rows_that_do_not_fit_are_refused():
    pool = pool_of("apart", LATENT).pool
    check_pool(pool, LATENT)
    both, one = geometry_of(1, 40, layers=3), LayeredPool(pool.keys, pool.keys)
    with pytest.raises(ValueError, match="all of one dtype on one device, are needed"):
        check_pool(one, LATENT)
    rows, sequences = torch.zeros(1, 1, 40), [rows_at(0, [0], [0])]
    with pytest.raises(ValueError, match=r"k and v given; KvGeometry.kv_factor is 1"):
        write_rows(rows, rows, PoolLayer(pool, 0, LATENT), sequences)
    with pytest.raises(ValueError, match=r"k given; KvGeometry.kv_factor is 2"):
        write_rows(rows, None, PoolLayer(one, 0, both), sequences)
    with pytest.raises(ValueError, match="kv_factor is 1; rows attend to K and V, 2"):
        sparse_prefill(rows, PoolLayer(pool, 0, LATENT), sequences, 1.0)
