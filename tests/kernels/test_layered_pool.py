"""Pools of layers that lie apart and of latent rows: KV is compared, attended to and written as in one tensor."""

import math

import pytest
import torch

from kernels.deviation import deviation, relative, row_squares, squares
from kernels.kv_move import Move, kv_move
from kernels.layout import ContiguousKv, LayeredPool, PagedKv, PoolLayer, check_pool, layer_view
from kernels.rope import saturated
from kernels.sparse_prefill import sparse_prefill, write_rows
from tests.kernels import builders, naive
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
        (3, 3, 16, BLOCK, torch.float32, FP8),
        (3, 3, 16, BLOCK, torch.float16, FP8),
    ],
)
def test_rows_attend_to_it_and_are_written_into_it(layout, heads, kv_heads, dim, block, dtype, kv_dtype, device):
    """In fp8 they are rounded and saturate."""
    positions = [[0, block - 1, block, 3 * block, 4 * block - 2], list(range(2, block + 1))]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "block_size": block}
    batch = builders.Batch(positions, dtype=dtype, kv_dtype=kv_dtype, **sizes)
    pool, (q, in_one, sequences) = pool_of(layout, batch.geometry, device, kv_dtype).pool, batch.on(device)
    expected = PoolLayer(batch.pool, 1, batch.geometry)
    planes = [(layer, kind) for layer in (0, 1) for kind in (0, 1)]
    for plane in planes:
        layer_view(pool, batch.geometry, *plane).copy_(layer_view(in_one, batch.geometry, *plane))
    attended = sparse_prefill(q, PoolLayer(pool, 1, batch.geometry), sequences, 0.3)
    assert_same(attended, naive.sparse_prefill(batch.q, expected, batch.sequences, 0.3))
    k, v = 100 * builders.seeded(2, len(q), kv_heads, dim, seed=6, dtype=dtype)
    if kv_dtype is FP8:
        k[0], v[1], v[2] = 448.5, -3e4, math.inf
    write_rows(k.to(device), v.to(device), PoolLayer(pool, 1, batch.geometry), sequences)
    naive.write_rows(k, v, expected, batch.sequences)
    for plane in planes:
        actual, wanted = (layer_view(each, batch.geometry, *plane).cpu() for each in (pool, batch.pool))
        if kv_dtype is FP8:
            builders.assert_stored(actual, wanted)
        else:
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.promise("engines", "In the embedded engine KV in...")
@pytest.mark.parametrize("layout", ["in_one_tensor", *builders.LATENT_LAYOUTS])
@pytest.mark.parametrize(
    ("channels", "block", "dtype"), [(576, 16, torch.bfloat16), (30, 5, torch.float16), (576, 16, FP8), (9, 3, FP8)]
)
def test_latent_rows_are_written_into_it(layout, channels, block, dtype, device):
    """Those of a model in float16 into a pool in e4m3, where they saturate."""
    sizes = geometry_of(1, channels, block, kv_factor=1, layers=3)
    actual, expected = (pool_of(layout, sizes, each, dtype) for each in (device, "cpu"))
    own = [[0, block - 1, block, 2 * block], [1, 3]]
    sequences = [rows_at(0, own[0], [4, 0, 7]), rows_at(4, own[1], [2, 8])]
    rows = builders.seeded(6, 1, channels + 3, seed=6, dtype=torch.float16 if dtype is FP8 else dtype)[..., :channels]
    if dtype is FP8:
        rows[0, 0, 0], rows[1, 0, -1], rows[2, 0, -2] = math.inf, -448.5, 3e4
    write_rows(rows.to(device), None, PoolLayer(actual.pool, 1, sizes), [each.to(device) for each in sequences])
    naive.write_rows(rows, None, PoolLayer(expected.pool, 1, sizes), sequences)
    written, wanted = builders.content(actual), builders.content(expected)
    assert int((~written.isnan()).sum()) == rows.numel()
    taken = builders.token_rows(PagedKv(actual.pool, torch.tensor([4, 0, 7]), sizes), torch.tensor(own[0]))[1, 0].cpu()
    if dtype is FP8:
        builders.assert_stored(written.to(FP8), wanted.to(FP8))
        builders.assert_stored(taken, saturated(rows[:4], FP8))
        assert written[1].nan_to_num().abs().max() == 448
        return
    torch.testing.assert_close(written, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(taken, rows[:4])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_serves_it_where_k_and_v_lie_alike(layout, triton_device, monkeypatch):
    donor = donor_of(GEOMETRY, 6, seed=1)
    held, near = filled(layout, triton_device, donor), on(donor, triton_device)
    written = PoolLayer(held.pool, 1, GEOMETRY), [rows_at(0, range(6), builders.TABLE.tolist()).to(triton_device)]
    rows, served_by_torch = builders.fresh_rows(near, 1), []
    by_torch = ["kv_move.kv_move_by_torch", "deviation.squares_by_torch"]
    by_torch += ["sparse_prefill.by_torch.write_rows", "sparse_prefill.by_torch.sparse_prefill"]
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
