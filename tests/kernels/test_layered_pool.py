"""Pools whose layers lie apart, in every layout that vLLM has: the same values go where the plain form puts them.

Every test that takes `device` runs twice: through torch on the CPU, and through Triton, compiled where there is a CUDA
device and interpreted where there is none.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.deviation import FreshRows, deviation, squares
from kernels.deviation import eager as eager_deviation
from kernels.deviation import naive as naive_deviation
from kernels.kv_move import LayerMoves, Move, kv_move, naive
from kernels.kv_move import eager as eager_move
from kernels.layout import ContiguousKv, KvGeometry, LayeredPool, PagedKv, check_pool, layer_view
from kernels.rope import RopeRotation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Views = tuple[torch.Tensor, torch.Tensor]
    Layout = Callable[[Callable[..., torch.Tensor], KvGeometry], Views]

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 3, 2, 8, 4, 9
GEOMETRY = KvGeometry(LAYERS, HEADS, DIM, BLOCK)
TABLE = torch.tensor([6, 1, 8, 3, 5])
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2, FP8: 0.1}


def rotation_of(rotary_dim: int = DIM, interleaved: bool = False) -> RopeRotation:
    frequencies = tuple(1e4 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2))
    return RopeRotation(frequencies, rotary_dim, interleaved)


ROTATION = rotation_of()


def blocks_kinds_nhd(new: Callable[..., torch.Tensor], sizes: KvGeometry) -> Views:
    cache = new(BLOCKS, 2, sizes.block_size, sizes.kv_heads, sizes.head_dim)
    return cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)


def blocks_kinds_hnd(new: Callable[..., torch.Tensor], sizes: KvGeometry) -> Views:
    cache = new(BLOCKS, 2, sizes.kv_heads, sizes.block_size, sizes.head_dim)
    return cache[:, 0], cache[:, 1]


def kinds_blocks_nhd(new: Callable[..., torch.Tensor], sizes: KvGeometry) -> Views:
    cache = new(2, BLOCKS, sizes.block_size, sizes.kv_heads, sizes.head_dim)
    return cache[0].transpose(1, 2), cache[1].transpose(1, 2)


def blocks_heads_channels(new: Callable[..., torch.Tensor], sizes: KvGeometry) -> Views:
    cache = new(BLOCKS, sizes.kv_heads, sizes.block_size, 2 * sizes.head_dim)
    return cache[..., : sizes.head_dim], cache[..., sizes.head_dim :]


def transposed_keys(new: Callable[..., torch.Tensor], sizes: KvGeometry) -> Views:
    cache = new(BLOCKS, sizes.kv_heads, 2 * sizes.block_size, sizes.head_dim)
    keys = cache[:, :, : sizes.block_size]
    block, head, _, _ = keys.stride()
    return torch.as_strided(keys, keys.shape, (block, head, 1, sizes.block_size)), cache[:, :, sizes.block_size :]


TRITON_LAYOUTS = [blocks_kinds_nhd, blocks_kinds_hnd, kinds_blocks_nhd, blocks_heads_channels]
LAYOUTS = [*TRITON_LAYOUTS, transposed_keys]


def nan(*shape: int, dtype: torch.dtype, device: str, skipped: int = 0) -> torch.Tensor:
    """NaN that begins `skipped` elements into its memory."""
    return torch.full((skipped + math.prod(shape),), math.nan, device=device).to(dtype)[skipped:].view(shape)


def layered(
    layout: Layout,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    sizes: KvGeometry = GEOMETRY,
    skipped: int = 0,
) -> LayeredPool:
    new = partial(nan, dtype=dtype, device=device, skipped=skipped)
    keys, values = zip(*(layout(new, sizes) for _ in range(sizes.num_layers)), strict=True)
    return LayeredPool(keys, values)


def donor_of(tokens: int, seed: int, dtype: torch.dtype = torch.float32, sizes: KvGeometry = GEOMETRY) -> ContiguousKv:
    shape = (sizes.num_layers, 2, sizes.kv_heads, tokens, sizes.head_dim)
    return ContiguousKv(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def on(kv: ContiguousKv, device: str) -> ContiguousKv:
    return ContiguousKv(kv.tensor.to(device))


def paged(pool: LayeredPool, sizes: KvGeometry = GEOMETRY) -> PagedKv:
    return PagedKv(pool, TABLE, sizes)


def filled(layout: Layout, device: str, donor: ContiguousKv, sizes: KvGeometry = GEOMETRY) -> PagedKv:
    """The donor's tokens in a pool whose other rows are NaN."""
    plain, pool = (layered(layout, each, donor.tensor.dtype, sizes) for each in ("cpu", device))
    naive.kv_move([Move(donor, 0, 0, donor.capacity)], paged(plain, sizes), ROTATION)
    for actual, expected in zip((*pool.keys, *pool.values), (*plain.keys, *plain.values), strict=True):
        actual.copy_(expected)
    return paged(pool, sizes)


def content(pool: LayeredPool) -> torch.Tensor:
    return torch.stack([plane.float() for plane in (*pool.keys, *pool.values)]).cpu()


def assert_same(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    actual, expected = actual.cpu().double(), expected.double()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert float((actual - expected).nan_to_num().norm() / expected.nan_to_num().norm()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("source_start", "target_start", "length"), [(0, 0, 1), (3, 3, 9), (1, 6, BLOCK), (7, 2, 13), (0, 19, 1)]
)
def test_moves_into_it_and_out_of_it(
    layout: Layout, source_start: int, target_start: int, length: int, device: str
) -> None:
    actual, expected = layered(layout, device), layered(layout)
    donor = donor_of(20, seed=length)
    kv_move([Move(on(donor, device), source_start, target_start, length)], paged(actual), ROTATION)
    naive.kv_move([Move(donor, source_start, target_start, length)], paged(expected), ROTATION)
    assert_same(content(actual), content(expected))
    assert int((~content(actual).isnan()).sum()) == 2 * LAYERS * length * HEADS * DIM
    read, wanted = (ContiguousKv(torch.full_like(donor.tensor, math.nan)) for _ in range(2))
    read = on(read, device)
    kv_move([Move(paged(actual), target_start, source_start, length)], read, ROTATION)
    naive.kv_move([Move(paged(expected), target_start, source_start, length)], wanted, ROTATION)
    assert_same(read.tensor, wanted.tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "dim", "rotary", "block", "skipped"), [(1, 8, 8, 3, 0), (3, 24, 16, 5, 1), (2, 64, 64, 16, 0)]
)
def test_widths_dtypes_and_addresses(
    layout: Layout, dtype: torch.dtype, heads: int, dim: int, rotary: int, block: int, skipped: int, device: str
) -> None:
    sizes = KvGeometry(2, heads, dim, block)
    donor, rotation = donor_of(12, 1, dtype, sizes), rotation_of(rotary, interleaved=heads == 2)
    actual, expected = (layered(layout, each, dtype, sizes, skipped) for each in (device, "cpu"))
    kv_move([Move(on(donor, device), 2, 4, 9)], paged(actual, sizes), rotation)
    naive.kv_move([Move(donor, 2, 4, 9)], paged(expected, sizes), rotation)
    assert_same(content(actual), content(expected), dtype)
    copied = ContiguousKv(nan(*donor.tensor.shape, dtype=dtype, device=device))
    kv_move([Move(paged(actual, sizes), 4, 1, 9, turn=0)], copied, rotation)
    held = [view.float().transpose(1, 2).flatten(0, 1) for view in (*actual.keys, *actual.values)]
    slots = [int(TABLE[position // block]) * block + position % block for position in range(4, 13)]
    rows = torch.stack([each[slots].transpose(0, 1) for each in held]).unflatten(0, (2, 2)).transpose(0, 1)
    assert torch.equal(copied.tensor[:, :, :, 1:10].float(), rows)
    assert bool(copied.tensor[:, :, :, [0, 10, 11]].float().isnan().all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_some_layers_at_a_time(layout: Layout, device: str) -> None:
    donor, parts, whole = donor_of(17, seed=2), layered(layout, device), layered(layout)
    naive.kv_move([Move(donor, 2, 5, 11)], paged(whole), ROTATION)
    for first, end in ((0, 2), (2, 3)):
        target = paged(parts).layers(first, end)
        LayerMoves([Move(on(donor, device), 2, 5, 11)], target, ROTATION).make(range(first, end))
    assert_same(content(parts), content(whole))
    staged = nan(2, 2, HEADS, 11, DIM, dtype=torch.float32, device=device)
    gather = LayerMoves([Move(paged(parts), 5, 0, 11, turn=-3)], ContiguousKv(staged), ROTATION)
    for layers in (range(2), range(1, 3), range(2, 3)):
        staged.fill_(math.nan)
        gather.make(layers)
        assert_same(staged[: len(layers)], donor.tensor[layers.start : layers.stop, :, :, 2:13])
        assert bool(staged[len(layers) :].isnan().all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sources_of_every_kind_in_one_call(layout: Layout, device: str) -> None:
    other, third = KvGeometry(LAYERS, HEADS, DIM, 3), KvGeometry(LAYERS, HEADS, DIM, 2)
    donors = [donor_of(9, seed) for seed in range(4)]
    in_one = PagedKv(torch.full((BLOCKS, LAYERS, 2, third.row_elements), math.nan, device=device), TABLE, third)
    kv_move([Move(on(donors[2], device), 0, 0, 9)], in_one, ROTATION)
    sources = [
        on(donors[0], device),
        filled(layout, device, donors[1], other),
        in_one,
        filled(blocks_heads_channels, device, donors[3]),
    ]
    spans = [(0, 1, 0, 4), (1, 2, 6, 7), (2, 3, 4, 2), (3, 0, 14, 5)]
    actual, expected = layered(layout, device), layered(layout)
    kv_move([Move(sources[index], *rest) for index, *rest in spans], paged(actual), ROTATION)
    naive.kv_move([Move(donors[index], *rest) for index, *rest in spans], paged(expected), ROTATION)
    assert_same(content(actual), content(expected))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves_within_it_may_not_overlap_but_may_share_blocks(layout: Layout, device: str) -> None:
    donor = donor_of(6, seed=3)
    actual, expected = filled(layout, device, donor), filled(layout, "cpu", donor)
    before = content(actual.pool)
    with pytest.raises(ValueError, match=r"moves\[0\].source is written by the same call"):
        kv_move([Move(actual, 0, 3, 4)], actual, ROTATION)
    with pytest.raises(ValueError, match=r"moves\[0\].source is written by the same call"):
        kv_move([Move(actual.layers(1, 3), 0, 6, 6)], actual.layers(0, 2), ROTATION)
    assert torch.equal(content(actual.pool).nan_to_num(), before.nan_to_num())
    kv_move([Move(actual, 0, 6, 6)], actual, ROTATION)
    naive.kv_move([Move(expected, 0, 6, 6)], expected, ROTATION)
    assert_same(content(actual.pool), content(expected.pool))


def as_rows(kv: ContiguousKv, layer: int, first_position: int) -> FreshRows:
    """The rows from a position on, as a fused projection makes them: K's strides are not V's."""
    k, v = (kv.tensor[layer, kind].transpose(0, 1)[first_position:] for kind in (0, 1))
    return FreshRows(k, torch.cat([v, v], dim=1)[:, :HEADS], first_position)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("source_start", "target_start", "length"), [(3, 3, 1), (1, 5, BLOCK + 1), (6, 2, 13)])
def test_deviation_from_it_and_of_it(
    layout: Layout, source_start: int, target_start: int, length: int, device: str
) -> None:
    donor, fresh = donor_of(20, seed=4), donor_of(20, seed=5)
    place = (source_start, target_start, length)
    expected = naive_deviation.deviation([Move(donor, *place)], fresh, 1, ROTATION)
    spans = [Move(filled(layout, device, donor), *place)]
    rows = as_rows(on(fresh, device), 1, target_start)
    for each in (on(fresh, device), rows, filled(layout, device, fresh)):
        assert_same(deviation(spans, each, 1, ROTATION), expected)
    sums = squares(spans, rows, 1, ROTATION).cpu()
    assert_same((sums[0] / sums[1]).sqrt(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_a_donor_moved_into_it_hardly_deviates(layout: Layout, dtype: torch.dtype, device: str) -> None:
    donor, pool = on(donor_of(15, 4, dtype), device), layered(layout, device, dtype)
    kv_move([Move(donor, 0, 2, 15)], paged(pool), ROTATION)
    found = deviation([Move(donor, 0, 2, 15)], paged(pool), 2, ROTATION).cpu()
    assert float(found[0].mean()) <= TOLERANCE[dtype]
    assert torch.equal(found[1], torch.zeros(15))


def uses_of_it(layout: Layout, device: str) -> Sequence[Callable[[], object]]:
    """What is served of a pool: it is placed into, saved from, copied within, moved by layers, and compared."""
    donor = donor_of(6, seed=1)
    held, near = filled(layout, device, donor), on(donor, device)
    rows, space = as_rows(near, 1, 0), on(ContiguousKv(torch.zeros_like(donor.tensor)), device)
    return [
        lambda: kv_move([Move(near, 0, 8, 6)], held, ROTATION),
        lambda: kv_move([Move(held, 0, 0, 6)], space, ROTATION),
        lambda: kv_move([Move(held, 0, 14, 6)], held, ROTATION),
        lambda: LayerMoves([Move(held, 0, 0, 6)], space, ROTATION).make(range(LAYERS)),
        lambda: deviation([Move(held, 0, 0, 6)], rows, 1, ROTATION),
        lambda: squares([Move(near, 0, 0, 6)], held, 1, ROTATION),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_serves_it_where_k_and_v_lie_alike(
    layout: Layout, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_by_torch: list[str] = []
    for module, name in ((eager_move, "kv_move"), (eager_deviation, "deviation"), (eager_deviation, "squares")):
        monkeypatch.setattr(module, name, lambda *_, name=name: served_by_torch.append(name))
    for use in uses_of_it(layout, triton_device):
        use()
    expected = [] if layout in TRITON_LAYOUTS else ["kv_move"] * 4 + ["deviation", "squares"]
    assert served_by_torch == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: only a CUDA device compiles")
def test_what_is_compiled_for_the_pool_in_one_tensor_serves_it() -> None:
    from kernels.kv_move import triton_move

    sizes, rotation = KvGeometry(LAYERS, HEADS, 64, 16), rotation_of(64)
    donor = on(donor_of(20, 1, torch.bfloat16, sizes), "cuda")
    in_one = torch.zeros(BLOCKS, LAYERS, 2, sizes.row_elements, dtype=torch.bfloat16, device="cuda")
    found = []
    for pool in (in_one, *(layered(layout, "cuda", torch.bfloat16, sizes) for layout in TRITON_LAYOUTS)):
        kv_move([Move(donor, 1, 3, 17)], PagedKv(pool, TABLE, sizes), rotation)
        kv_move([Move(PagedKv(pool, TABLE, sizes), 3, 0, 17)], donor, rotation)
        found.append(len(triton_move.move_kernel.device_caches[torch.cuda.current_device()][0]))
    assert len(set(found)) == 1


@pytest.mark.parametrize("position", [(0, 1), (1, 0)])
def test_a_layer_with_strides_of_its_own_is_moved_as_well(position: tuple[int, int], device: str) -> None:
    donor, kind = donor_of(9, seed=6), position[1]
    found = []
    for each in (device, "cpu"):
        nhd, hnd = layered(blocks_kinds_nhd, each), layered(blocks_kinds_hnd, each)
        planes = [list(nhd.keys), list(nhd.values)]
        planes[kind][position[0]] = (hnd.keys, hnd.values)[kind][position[0]]
        found.append(LayeredPool(tuple(planes[0]), tuple(planes[1])))
    kv_move([Move(on(donor, device), 1, 2, 7)], paged(found[0]), ROTATION)
    naive.kv_move([Move(donor, 1, 2, 7)], paged(found[1]), ROTATION)
    assert_same(content(found[0]), content(found[1]))


def test_it_is_told_as_the_pool_in_one_tensor_is() -> None:
    pool = layered(transposed_keys)
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
    pool = layered(blocks_heads_channels)
    check_pool(pool, GEOMETRY)
    with pytest.raises(ValueError, match="all of one dtype on one device, are needed"):
        check_pool(broken(pool), GEOMETRY)
