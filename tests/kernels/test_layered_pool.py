"""A pool in one tensor and pools whose layers lie apart, in every layout that vLLM has: values go where the plain form
puts them.

Every test that takes `device` runs twice: through torch on the CPU, and through Triton, compiled where there is a CUDA
device and interpreted where there is none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.deviation import (
    FreshRows,
    deviation,
    relative,
    row_squares,
    squares,
)
from kernels.deviation import eager as eager_deviation
from kernels.deviation import naive as naive_deviation
from kernels.kv_move import LayerMoves, Move, kv_move, naive
from kernels.kv_move import eager as eager_move
from kernels.kv_move.move import planes_of
from kernels.layout import ContiguousKv, KvGeometry, LayeredPool, PagedKv, Pool, PoolLayer, check_pool, layer_view
from kernels.sparse_prefill import eager as eager_prefill
from kernels.sparse_prefill import naive as naive_prefill
from kernels.sparse_prefill import sparse_prefill, write_rows
from tests.kernels.builders import (
    BLOCK,
    FP8,
    Batch,
    assert_same,
    donor_of,
    geometry_of,
    on,
    paged,
    rotation_of,
    rotations_of,
    rows_at,
    seeded,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.rope import Rotation

BLOCKS, TABLE = 9, torch.tensor([6, 1, 8, 3, 5])
GEOMETRY = geometry_of(layers=3)
LAYERS, HEADS, DIM = GEOMETRY.num_layers, GEOMETRY.kv_heads, GEOMETRY.head_dim
ROTATION = rotation_of()
# A cache's axes in memory, the channels innermost; in the last layout channels and tokens of K have changed places.
TRITON_LAYOUTS = {
    "blocks_kinds_nhd": ("blocks", "kinds", "tokens", "heads"),
    "blocks_kinds_hnd": ("blocks", "kinds", "heads", "tokens"),
    "kinds_blocks_nhd": ("kinds", "blocks", "tokens", "heads"),
    "blocks_heads_channels": ("blocks", "heads", "tokens", "kinds"),
}
LAYOUTS = [*TRITON_LAYOUTS, "transposed_keys"]
every_layout = pytest.mark.parametrize("layout", ["in_one_tensor", *LAYOUTS])


def nan(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", skipped: int = 0) -> torch.Tensor:
    """NaN that begins `skipped` elements into its memory."""
    return torch.full((skipped + math.prod(shape),), math.nan, device=device).to(dtype)[skipped:].view(shape)


def layered(
    layout: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    sizes: KvGeometry = GEOMETRY,
    skipped: int = 0,
) -> Pool:
    if layout == "in_one_tensor":
        return nan(BLOCKS, sizes.num_layers, 2, sizes.row_elements, dtype=dtype, device=device)
    axes = TRITON_LAYOUTS.get(layout, ("blocks", "heads", "kinds", "tokens"))
    lengths = {"blocks": BLOCKS, "kinds": 2, "heads": sizes.kv_heads, "tokens": sizes.block_size}
    shape = [*(lengths[axis] for axis in axes), sizes.head_dim]
    order = [*(axes.index(axis) for axis in ("kinds", "blocks", "heads", "tokens")), 4]
    caches = [nan(*shape, dtype=dtype, device=device, skipped=skipped).permute(order) for _ in range(sizes.num_layers)]
    keys, values = zip(*caches, strict=True)
    if layout not in TRITON_LAYOUTS:
        keys = tuple(torch.as_strided(k, k.shape, (*k.stride()[:2], 1, sizes.block_size)) for k in keys)
    return LayeredPool(keys, values)


def in_blocks(pool: Pool, sizes: KvGeometry = GEOMETRY) -> PagedKv:
    return PagedKv(pool, TABLE, sizes)


def filled(layout: str, device: str, donor: ContiguousKv, sizes: KvGeometry = GEOMETRY) -> PagedKv:
    """The donor's tokens in a pool whose other rows are NaN."""
    plain, pool = (layered(layout, each, donor.tensor.dtype, sizes) for each in ("cpu", device))
    naive.kv_move([Move(donor, 0, 0, donor.capacity)], in_blocks(plain, sizes), ROTATION)
    for actual, expected in zip(planes_of(in_blocks(pool)), planes_of(in_blocks(plain)), strict=True):
        actual.copy_(expected)
    return in_blocks(pool, sizes)


def content(pool: Pool) -> torch.Tensor:
    return torch.stack([plane.float() for plane in planes_of(in_blocks(pool))]).cpu()


def as_rows(kv: ContiguousKv, layer: int, first_position: int) -> FreshRows:
    """The rows from a position on, as a fused projection makes them: K's strides are not V's."""
    k, v = (kv.tensor[layer, kind].transpose(0, 1)[first_position:] for kind in (0, 1))
    return FreshRows(k, torch.cat([v, v], dim=1)[:, :HEADS], first_position)


@pytest.mark.known_defect(27)
@every_layout
@pytest.mark.parametrize(
    ("source_start", "target_start", "length"),
    [(0, 0, 1), (3, 3, BLOCK - 1), (1, 6, BLOCK), (6, 2, BLOCK + 1), (3, 3, 9), (7, 2, 13), (0, 19, 1)],
)
def test_moves_into_it_and_out_of_it(
    layout: str, source_start: int, target_start: int, length: int, device: str
) -> None:
    actual, expected, donor = layered(layout, device), layered(layout), donor_of(GEOMETRY, 20, seed=length)
    kv_move([Move(on(donor, device), source_start, target_start, length)], in_blocks(actual), ROTATION)
    naive.kv_move([Move(donor, source_start, target_start, length)], in_blocks(expected), ROTATION)
    assert_same(content(actual), content(expected))
    assert int((~content(actual).isnan()).sum()) == 2 * LAYERS * length * HEADS * DIM
    wanted = ContiguousKv(torch.full_like(donor.tensor, math.nan))
    read = on(ContiguousKv(wanted.tensor.clone()), device)
    kv_move([Move(in_blocks(actual), target_start, source_start, length)], read, ROTATION)
    naive.kv_move([Move(in_blocks(expected), target_start, source_start, length)], wanted, ROTATION)
    assert_same(read.tensor, wanted.tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "dim", "rotary", "block", "skipped", "dtype"),
    [
        (4, 128, 128, 16, 0, torch.bfloat16),
        (8, 128, 64, 16, 0, torch.bfloat16),
        (2, 64, 64, 32, 0, torch.float16),
        (3, 24, 16, 5, 1, torch.float32),
        (3, 24, 16, 5, 1, torch.bfloat16),
        (1, 8, 8, 3, 0, torch.float16),
        (2, 64, 64, 16, 0, FP8),
    ],
)
def test_widths_dtypes_and_addresses(
    layout: str, heads: int, dim: int, rotary: int, block: int, skipped: int, dtype: torch.dtype, device: str
) -> None:
    sizes = geometry_of(heads, dim, block)
    donor, rotation = donor_of(sizes, 12, 1, dtype), rotation_of(rotary, interleaved=heads == 2)
    actual, expected = (layered(layout, each, dtype, sizes, skipped) for each in (device, "cpu"))
    kv_move([Move(on(donor, device), 2, 4, 9)], in_blocks(actual, sizes), rotation)
    naive.kv_move([Move(donor, 2, 4, 9)], in_blocks(expected, sizes), rotation)
    assert_same(content(actual), content(expected), dtype)
    copied = ContiguousKv(nan(*donor.tensor.shape, dtype=dtype, device=device))
    kv_move([Move(in_blocks(actual, sizes), 4, 1, 9, turn=0)], copied, rotation)
    held = [view.float().transpose(1, 2).flatten(0, 1) for view in planes_of(in_blocks(actual))]
    slots = [int(TABLE[position // block]) * block + position % block for position in range(4, 13)]
    rows = torch.stack([each[slots].transpose(0, 1) for each in held]).unflatten(0, (2, 2)).transpose(0, 1)
    assert torch.equal(copied.tensor[:, :, :, 1:10].float(), rows)
    assert bool(copied.tensor[:, :, :, [0, 10, 11]].float().isnan().all())


@every_layout
@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_single_rows_are_compared_as_spans_of_one_token(layout: str, device: str, dtype: torch.dtype) -> None:
    donor, pool = donor_of(GEOMETRY, 17, seed=3, dtype=dtype), layered(layout, device, dtype)
    kv_move([Move(on(donor, device), 0, 0, 17)], in_blocks(pool), ROTATION)
    rows_of = (donor.tensor[1, kind, :, 4:13].transpose(0, 1) for kind in (0, 1))
    k, v = (nan(9, HEADS, DIM, device=device).copy_(each).to(dtype) for each in rows_of)
    k[2], v[5] = torch.tensor(3.0).to(dtype), torch.tensor(-1.0).to(dtype)
    rows, positions = torch.tensor([7, 2, 5, 0]), torch.tensor([11, 6, 9, 16])
    fresh = FreshRows(k, v)
    actual = row_squares(fresh, rows, in_blocks(pool), positions, 1)
    spans = [
        Move(in_blocks(pool), at, row, 1, turn=0) for row, at in zip(rows.tolist(), positions.tolist(), strict=True)
    ]
    torch.testing.assert_close(actual, squares(spans, fresh, 1, ROTATION))
    assert actual[0, :, 0].tolist() == [0.0, 0.0]
    assert bool((actual[0, [0, 1, 0], [1, 2, 3]] > 0).all())
    assert (relative(actual).shape, actual.dtype) == ((2, 4), torch.float32)


@every_layout
@pytest.mark.parametrize("rotation", [ROTATION, rotations_of(LAYERS)], ids=["alike", "by_layer"])
def test_some_layers_at_a_time(layout: str, rotation: Rotation, device: str) -> None:
    donor, parts, whole = donor_of(GEOMETRY, 17, seed=2), layered(layout, device), layered(layout)
    naive.kv_move([Move(donor, 2, 5, 11)], in_blocks(whole), rotation)
    for first, end in ((0, 2), (2, 3)):
        target, own = in_blocks(parts).layers(first, end), rotation.layers(first, end)
        LayerMoves([Move(on(donor, device), 2, 5, 11)], target, own).make(range(first, end))
    assert_same(content(parts), content(whole))
    again, slot = layered(layout, device), nan(2, 2, HEADS, 17, DIM, device=device)
    scatter = LayerMoves([Move(ContiguousKv(slot), 2, 5, 11)], in_blocks(again), rotation)
    for first, end in ((2, 3), (0, 2)):
        slot[: end - first] = on(donor, device).tensor[first:end]
        scatter.make(range(end - first), first)
    assert_same(content(again), content(whole))
    staged = nan(2, 2, HEADS, 11, DIM, device=device)
    turn = -3 if rotation is ROTATION else 0
    gather = LayerMoves([Move(in_blocks(parts), 5, 0, 11, turn=turn)], ContiguousKv(staged), rotation)
    held = donor if turn else ContiguousKv(nan(*donor.tensor.shape))
    if not turn:
        naive.kv_move([Move(in_blocks(whole), 5, 2, 11, turn=0)], held, rotation)
    for layers in (range(2), range(1, 3), range(2, 3)):
        staged.fill_(math.nan)
        gather.make(layers)
        assert_same(staged[: len(layers)], held.tensor[layers.start : layers.stop, :, :, 2:13])
        assert bool(staged[len(layers) :].isnan().all())


@every_layout
def test_sources_of_every_kind_in_one_call(layout: str, device: str) -> None:
    donors = [donor_of(GEOMETRY, 9, seed) for seed in range(4)]
    sources = [
        on(donors[0], device),
        filled(layout, device, donors[1], geometry_of(block_size=3, layers=LAYERS)),
        on(paged(donors[2], block_size=2), device),
        filled("blocks_heads_channels", device, donors[3]),
    ]
    spans = [(0, 1, 0, 4), (1, 2, 6, 7), (2, 3, 4, 2), (3, 0, 14, 5)]
    actual, expected = layered(layout, device), layered(layout)
    kv_move([Move(sources[index], *rest) for index, *rest in spans], in_blocks(actual), ROTATION)
    naive.kv_move([Move(donors[index], *rest) for index, *rest in spans], in_blocks(expected), ROTATION)
    assert_same(content(actual), content(expected))


@every_layout
def test_moves_within_it_may_not_overlap_but_may_share_blocks(layout: str, device: str) -> None:
    donor = donor_of(GEOMETRY, 6, seed=3)
    actual, expected = filled(layout, device, donor), filled(layout, "cpu", donor)
    before = content(actual.pool)
    for source, start, length, target in ((actual, 3, 4, actual), (actual.layers(1, 3), 6, 6, actual.layers(0, 2))):
        with pytest.raises(ValueError, match=r"moves\[0\].source is written by the same call"):
            kv_move([Move(source, 0, start, length)], target, ROTATION)
    assert torch.equal(content(actual.pool).nan_to_num(), before.nan_to_num())
    kv_move([Move(actual, 0, 6, 6)], actual, ROTATION)
    naive.kv_move([Move(expected, 0, 6, 6)], expected, ROTATION)
    assert_same(content(actual.pool), content(expected.pool))


@every_layout
@pytest.mark.parametrize(
    ("source_start", "target_start", "length"), [(3, 3, 1), (6, 2, BLOCK), (1, 5, BLOCK + 1), (6, 2, 13)]
)
def test_deviation_from_it_and_of_it(
    layout: str, source_start: int, target_start: int, length: int, device: str
) -> None:
    donor, fresh = donor_of(GEOMETRY, 20, seed=4), donor_of(GEOMETRY, 20, seed=5)
    place = (source_start, target_start, length)
    expected = naive_deviation.deviation([Move(donor, *place)], fresh, 1, ROTATION)
    spans = [Move(filled(layout, device, donor), *place)]
    rows = as_rows(on(fresh, device), 1, target_start)
    for each in (on(fresh, device), rows, filled(layout, device, fresh)):
        assert_same(deviation(spans, each, 1, ROTATION), expected)
    sums = squares(spans, rows, 1, ROTATION)
    assert_same((sums[0] / sums[1]).sqrt(), expected)


@every_layout
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "dtype"),
    [
        (4, 2, 8, BLOCK, torch.float32),
        (7, 1, 128, 16, torch.bfloat16),
        (6, 3, 24, 5, torch.float16),
        (4, 4, 64, 32, torch.bfloat16),
    ],
)
def test_rows_attend_to_it_and_are_written_into_it(
    layout: str, heads: int, kv_heads: int, dim: int, block: int, dtype: torch.dtype, device: str
) -> None:
    positions = [[0, block - 1, block, 3 * block, 4 * block - 2], list(range(2, block + 1))]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "block_size": block}
    batch = Batch(positions, dtype=dtype, **sizes)
    pool, (q, in_one, sequences) = layered(layout, device, dtype, batch.geometry), batch.on(device)
    expected = PoolLayer(batch.pool, 1, batch.geometry)
    planes = [(layer, kind) for layer in (0, 1) for kind in (0, 1)]
    for plane in planes:
        layer_view(pool, batch.geometry, *plane).copy_(layer_view(in_one, batch.geometry, *plane))
    attended = sparse_prefill(q, PoolLayer(pool, 1, batch.geometry), sequences, 0.3)
    assert_same(attended, naive_prefill.sparse_prefill(batch.q, expected, batch.sequences, 0.3))
    k, v = seeded(2, len(q), kv_heads, dim, seed=6, dtype=dtype)
    write_rows(k.to(device), v.to(device), PoolLayer(pool, 1, batch.geometry), sequences)
    naive_prefill.write_rows(k, v, expected, batch.sequences)
    for plane in planes:
        actual, wanted = (layer_view(each, batch.geometry, *plane).cpu() for each in (pool, batch.pool))
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


def uses_of_it(layout: str, device: str) -> Sequence[Callable[[], object]]:
    """What is served of a pool: it is placed into, saved from, copied within, moved by layers, compared, and rows are
    written into it and attend to it."""
    donor = donor_of(GEOMETRY, 6, seed=1)
    held, near = filled(layout, device, donor), on(donor, device)
    written = PoolLayer(held.pool, 1, GEOMETRY), [rows_at(0, range(6), TABLE.tolist()).to(device)]
    rows, space = as_rows(near, 1, 0), on(ContiguousKv(torch.zeros_like(donor.tensor)), device)
    return [
        lambda: kv_move([Move(near, 0, 8, 6)], held, ROTATION),
        lambda: kv_move([Move(held, 0, 0, 6)], space, ROTATION),
        lambda: kv_move([Move(held, 0, 14, 6)], held, ROTATION),
        lambda: LayerMoves([Move(held, 0, 0, 6)], space, ROTATION).make(range(LAYERS)),
        lambda: deviation([Move(held, 0, 0, 6)], rows, 1, ROTATION),
        lambda: squares([Move(near, 0, 0, 6)], held, 1, ROTATION),
        lambda: write_rows(rows.k, rows.k, *written),
        lambda: sparse_prefill(rows.k, *written, 0.3),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_serves_it_where_k_and_v_lie_alike(
    layout: str, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_by_torch: list[str] = []
    by_torch = {
        eager_move: ("kv_move",),
        eager_deviation: ("deviation", "squares"),
        eager_prefill: ("write_rows", "sparse_prefill"),
    }
    for module, name in ((module, name) for module, names in by_torch.items() for name in names):
        monkeypatch.setattr(module, name, lambda *_, name=name: served_by_torch.append(name))
    for use in uses_of_it(layout, triton_device):
        use()
    served = ["kv_move"] * 4 + ["deviation", "squares", "write_rows", "sparse_prefill"]
    assert served_by_torch == ([] if layout in TRITON_LAYOUTS else served)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: only a CUDA device compiles")
def test_what_is_compiled_for_the_pool_in_one_tensor_serves_it() -> None:
    from kernels.kv_move import triton_move

    sizes, rotation = geometry_of(HEADS, 64, 16, layers=LAYERS), rotation_of(64)
    donor = on(donor_of(sizes, 20, 1, torch.bfloat16), "cuda")
    in_one = torch.zeros(BLOCKS, LAYERS, 2, sizes.row_elements, dtype=torch.bfloat16, device="cuda")
    found = []
    for pool in (in_one, *(layered(layout, "cuda", torch.bfloat16, sizes) for layout in TRITON_LAYOUTS)):
        kv_move([Move(donor, 1, 3, 17)], PagedKv(pool, TABLE, sizes), rotation)
        kv_move([Move(PagedKv(pool, TABLE, sizes), 3, 0, 17)], donor, rotation)
        found.append(len(triton_move.move_kernel.device_caches[torch.cuda.current_device()][0]))
    assert len(set(found)) == 1


@pytest.mark.parametrize("position", [(0, 1), (1, 0)])
def test_a_layer_with_strides_of_its_own_is_moved_as_well(position: tuple[int, int], device: str) -> None:
    donor, (layer, kind) = donor_of(GEOMETRY, 9, seed=6), position
    found = []
    for each in (device, "cpu"):
        nhd, hnd = layered("blocks_kinds_nhd", each), layered("blocks_kinds_hnd", each)
        mixed = [list(nhd.keys), list(nhd.values)]
        mixed[kind][layer] = (hnd.keys, hnd.values)[kind][layer]
        found.append(LayeredPool(tuple(mixed[0]), tuple(mixed[1])))
    kv_move([Move(on(donor, device), 1, 2, 7)], in_blocks(found[0]), ROTATION)
    naive.kv_move([Move(donor, 1, 2, 7)], in_blocks(found[1]), ROTATION)
    assert_same(content(found[0]), content(found[1]))


def test_it_is_told_as_the_pool_in_one_tensor_is() -> None:
    pool = layered("transposed_keys")
    assert pool.shape == (BLOCKS, LAYERS, 2, HEADS * BLOCK * DIM)
    assert (pool.dtype, pool.device, pool.is_cuda) == (torch.float32, torch.device("cpu"), False)
    assert layer_view(pool, GEOMETRY, 1, 0) is pool.keys[1]
    assert layer_view(pool, GEOMETRY, 2, 1) is pool.values[2]


@pytest.mark.parametrize(
    "broken",
    [
        lambda pool: LayeredPool(pool.keys[1:], pool.values),
        lambda pool: pool.layers(0, 2),
        lambda pool: LayeredPool(pool.keys, (*pool.values[1:], pool.values[0][:, :1])),
        lambda pool: LayeredPool(pool.keys, (*pool.values[1:], pool.values[0].half())),
    ],
)
def test_layers_that_do_not_fit_are_refused(broken: Callable[[LayeredPool], LayeredPool]) -> None:
    pool = layered("blocks_heads_channels")
    check_pool(pool, GEOMETRY)
    with pytest.raises(ValueError, match="all of one dtype on one device, are needed"):
        check_pool(broken(pool), GEOMETRY)
