"""kv_move against its plain form over shapes that occur and odd ones; a slot that is not written shows as NaN."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import naive
from kernels.kv_move import LayerMoves, Move, kv_move, warm_up
from kernels.layout import ContiguousKv, LayeredPool, PagedKv, pool_view
from tests.kernels import builders
from tests.kernels.builders import assert_same, content, donor_of, geometry_of, on, pool_of, rotation_of, target_of

ROTATION = rotation_of()
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: needs a CUDA device")


def move_on(device, moves, target, rotation):
    """Moves on `device` what lies on the CPU, and brings the target back."""
    placed = on(target, device)
    sources = {id(move.source): on(move.source, device) for move in moves} | {id(target): placed}
    kv_move([replace(move, source=sources[id(move.source)]) for move in moves], placed, rotation)
    target.pool.copy_(placed.pool)


# Heads, channels, those that rotate, whether in neighbouring pairs, tokens of a block, dtype, elements before the pool.
WIDTHS = [
    (4, 128, 128, False, 32, torch.bfloat16, 0),
    (2, 128, 64, False, 64, torch.float16, 0),
    (2, 64, 64, True, 32, torch.float32, 0),
    (3, 80, 32, True, 3, torch.float16, 0),
    (3, 24, 16, False, 5, torch.bfloat16, 1),
    (1, 6, 6, False, 3, torch.float32, 1),
    (2, 80, 8, False, builders.BLOCK, builders.FP8, 0),
]
# Latent channels, those after them that rotate, whether in neighbouring pairs, tokens of a block, dtype.
LATENT_WIDTHS = [
    (512, 64, True, 16, torch.bfloat16),
    (32, 8, False, 4, torch.float32),
    (7, 2, False, 3, torch.float16),
    (512, 64, True, 16, builders.FP8),
    (7, 2, True, 3, builders.FP8),
]


def turned(row, *rotation):
    return builders.rotations_of(2, *rotation) if row % 2 else rotation_of(*rotation)


# Every width in one tensor, and each other layout with some of them; layers turn alike in every other row.
GRID = [
    (layout, geometry_of(heads, dim, block), turned(row, rotary, pairs), dtype, skipped)
    for at, layout in enumerate(("in_one_tensor", *builders.LAYOUTS))
    for row, (heads, dim, rotary, pairs, block, dtype, skipped) in enumerate(WIDTHS[at % 4 :: 4] if at else WIDTHS)
] + [
    (layout, geometry_of(1, latent + rotary, block, 1), turned(row, rotary, pairs, latent), dtype, 0)
    for at, layout in enumerate(("in_one_tensor", *builders.LATENT_LAYOUTS))
    for row, (latent, rotary, pairs, block, dtype) in enumerate(LATENT_WIDTHS[at % 3 :: 3] if at else LATENT_WIDTHS)
]


@pytest.mark.promise(
    "engines", "Each layer's keys move by its own rotation, in one call; a layer without RoPE is copied bit for bit"
)
@pytest.mark.known_defect(26)
@pytest.mark.known_defect(27)
@pytest.mark.parametrize(
    ("layout", "sizes", "rotation", "dtype", "skipped"),
    GRID,
    ids=[f"{layout}-{sizes.kv_heads}x{sizes.head_dim}-{dtype}" for layout, sizes, _, dtype, _ in GRID],
)
def test_moves_into_every_pool_and_out_of_it(layout, sizes, rotation, dtype, skipped, device):
    donor = donor_of(sizes, 12, 1, dtype)
    actual, expected = (pool_of(layout, sizes, each, dtype, skipped) for each in (device, "cpu"))
    kv_move([Move(on(donor, device), 2, 4, 9)], actual, rotation)
    naive.kv_move([Move(donor, 2, 4, 9)], expected, rotation)
    assert_same(content(actual), content(expected), dtype)
    assert int((~content(actual).isnan()).sum()) == donor.tensor[:, :, :, 2:11].numel()
    read, wanted, copied = (ContiguousKv(torch.full_like(donor.tensor.float(), math.nan).to(dtype)) for _ in range(3))
    read, copied = on(read, device), on(copied, device)
    kv_move([Move(actual, 4, 1, 9)], read, rotation)
    naive.kv_move([Move(expected, 4, 1, 9)], wanted, rotation)
    assert_same(read.tensor.float(), wanted.tensor.float(), dtype)
    kv_move([Move(actual, 4, 1, 9, turn=0)], copied, rotation)
    held = builders.token_rows(actual, torch.arange(4, 13)).transpose(2, 3)
    assert torch.equal(copied.tensor[:, :, :, 1:10].float(), held.float())
    assert bool(copied.tensor[:, :, :, [0, 10, 11]].float().isnan().all())
    # What is free of position comes through two moves bit for bit: V, and latent channels.
    free = (slice(None), -1, ..., slice(rotation.kinds[0].first_channel if sizes.kv_factor == 1 else None))
    assert torch.equal(read.tensor[..., 1:10, :][free].float().cpu(), donor.tensor[..., 2:11, :][free].float())


@pytest.mark.parametrize("layout", ["in_one_tensor", *builders.LAYOUTS, *builders.LATENT_LAYOUTS])
@pytest.mark.parametrize("are_alike", [True, False])
def test_some_layers_at_a_time(layout, are_alike, device):
    latent = 32 if layout in builders.LATENT_LAYOUTS else 0
    sizes = geometry_of(1, 40, kv_factor=1, layers=3) if latent else geometry_of(layers=3)
    rotation = rotation_of(8, True, latent) if are_alike else builders.rotations_of(3, 8, True, latent)
    donor, parts, whole = donor_of(sizes, 17, seed=2), pool_of(layout, sizes, device), pool_of(layout, sizes)
    naive.kv_move([Move(donor, 2, 5, 11)], whole, rotation)
    for first, end in ((0, 2), (2, 3)):
        target, own = parts.layers(first, end), rotation.layers(first, end)
        LayerMoves([Move(on(donor, device), 2, 5, 11)], target, own).make(range(first, end))
    assert_same(content(parts), content(whole))
    again, slot = pool_of(layout, sizes, device), torch.full_like(donor.tensor[:2], math.nan).to(device)
    scatter = LayerMoves([Move(ContiguousKv(slot), 2, 5, 11)], again, rotation)
    for first, end in ((2, 3), (0, 2)):
        slot[: end - first] = on(donor, device).tensor[first:end]
        scatter.make(range(end - first), first)
    assert_same(content(again), content(whole))
    staged = slot[:, :, :, :11].clone()
    gather = LayerMoves([Move(parts, 5, 0, 11, turn=0)], ContiguousKv(staged), rotation)
    held = builders.token_rows(parts, torch.arange(5, 16)).transpose(2, 3)
    for layers in (range(2), range(1, 3), range(2, 3)):
        staged.fill_(math.nan)
        gather.make(layers)
        assert torch.equal(staged[: len(layers)], held[layers.start : layers.stop])
        assert bool(staged[len(layers) :].isnan().all())


@pytest.mark.parametrize("layout", ["in_one_tensor", *builders.LAYOUTS])
def test_moves_within_a_pool_may_not_overlap_but_may_share_blocks(layout, device):
    donor = donor_of(geometry_of(layers=3), 6, seed=3)
    actual, expected = builders.filled(layout, device, donor), builders.filled(layout, "cpu", donor)
    before = content(actual)
    for source, start, length, target in ((actual, 3, 4, actual), (actual.layers(1, 3), 6, 6, actual.layers(0, 2))):
        with pytest.raises(ValueError, match=r"moves\[0\].source is written by the same call"):
            kv_move([Move(source, 0, start, length)], target, ROTATION)
    assert torch.equal(content(actual).nan_to_num(), before.nan_to_num())
    kv_move([Move(actual, 0, 6, 6)], actual, ROTATION)
    naive.kv_move([Move(expected, 0, 6, 6)], expected, ROTATION)
    assert_same(content(actual), content(expected))


@pytest.mark.parametrize("position", [(0, 1), (1, 0)])
def test_a_layer_with_strides_of_its_own_is_moved_as_well(position, device):
    sizes, (layer, kind) = geometry_of(layers=3), position
    donor, found = donor_of(sizes, 9, seed=6), []
    for each in (device, "cpu"):
        nhd, hnd = (pool_of(layout, sizes, each).pool.kinds for layout in ("blocks_kinds_nhd", "blocks_kinds_hnd"))
        mixed = [list(planes) for planes in nhd]
        mixed[kind][layer] = hnd[kind][layer]
        found.append(PagedKv(LayeredPool(tuple(mixed[0]), tuple(mixed[1])), builders.TABLE, sizes))
    kv_move([Move(on(donor, device), 1, 2, 7)], found[0], ROTATION)
    naive.kv_move([Move(donor, 1, 2, 7)], found[1], ROTATION)
    assert_same(content(found[0]), content(found[1]))


@pytest.mark.parametrize(("kv_factor", "dim", "latent"), [(2, 8, 0), (1, 40, 32)])
def test_fp8_saturates_where_a_rotation_leaves_its_range(kv_factor, dim, latent, device):
    geometry, rotation = geometry_of(1, dim, kv_factor=kv_factor), rotation_of(8, bool(latent), first_channel=latent)
    target, highest = target_of(geometry, builders.FP8), torch.full((2, kv_factor, 1, 3, dim), 448.0)
    move_on(device, [Move(ContiguousKv(highest.to(builders.FP8)), 0, 6, 3)], target, rotation)
    rows = pool_view(target.pool, geometry)[1, :, 0, :, 2:].float()
    assert float(rows[..., latent:].max()) == 448.0 > float(rows[..., latent:].min())
    assert torch.equal(rows[..., :latent], torch.full_like(rows[..., :latent], 448.0))
    assert not bool(rows.isnan().any())


@needs_cuda
def test_no_plan_compiles_the_kernel_again():
    from kernels.kv_move import triton_move

    geometry, counts = geometry_of(head_dim=64), []
    target = on(target_of(geometry), "cuda")
    one, nine, many = (on(donor_of(geometry, tokens, seed=tokens), "cuda") for tokens in (1, 9, 20))
    paged, staged = on(builders.paged(donor_of(geometry, 20, 1)), "cuda"), ContiguousKv(torch.empty_like(many.tensor))
    warm_up(geometry, torch.float32, torch.device("cuda"), rotation_of(64))
    for moves, into in (
        ([], target),
        ([Move(one, 0, 5, 1)], target),
        ([Move(nine, 1, 0, 8), Move(nine, 0, 9, 3), Move(many, 2, 12, 8), Move(one, 0, 8, 1)], target),
        ([Move(paged, 3, 1, 17)], target),
        ([Move(paged, 3, 1, 17)], staged),
    ):
        kv_move(moves, into, rotation_of(64))
        counts.append(len(triton_move.move_kernel.device_caches[torch.cuda.current_device()][0]))
    assert len(set(counts)) == 1


@needs_cuda
def test_a_donor_in_pinned_host_memory_is_read_in_place():
    from kernels.device import triton_serves

    donor = donor_of(geometry_of(), 12, seed=2)
    pinned = ContiguousKv(donor.tensor.pin_memory())
    actual, expected = on(target_of(geometry_of()), "cuda"), target_of(geometry_of())
    assert triton_serves(actual.pool, (pinned.tensor,))
    assert not triton_serves(actual.pool, (pinned.tensor, donor.tensor))
    kv_move([Move(pinned, 1, 4, 9)], actual, ROTATION)
    naive.kv_move([Move(donor, 1, 4, 9)], expected, ROTATION)
    assert_same(actual.pool, expected.pool)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_disjoint_moves_match_naive(data, device):
    layout = data.draw(st.sampled_from(["in_one_tensor", *builders.LAYOUTS]))
    geometry = geometry_of(kv_heads=data.draw(st.integers(1, 3)), block_size=data.draw(st.integers(1, 5)))
    capacity, position, moves = 5 * geometry.block_size, 0, []
    for seed in range(data.draw(st.integers(1, 3))):
        target_start = position + data.draw(st.integers(0, 3))
        length = data.draw(st.integers(0, 6))
        if target_start + length > capacity:
            break
        source_start = data.draw(st.integers(0, 5))
        moves.append(Move(donor_of(geometry, source_start + length, seed), source_start, target_start, length))
        position = target_start + length
    actual, expected, sources = pool_of(layout, geometry, device), pool_of(layout, geometry), []
    for move in moves:
        kind = data.draw(st.sampled_from(["contiguous", "in_one_tensor", *builders.LAYOUTS]))
        is_paged = kind != "contiguous"
        sources.append(builders.filled(kind, device, move.source) if is_paged else on(move.source, device))
    placed = [replace(move, source=source) for move, source in zip(moves, sources, strict=True)]
    kv_move(placed, actual, ROTATION)
    naive.kv_move(moves, expected, ROTATION)
    if any(move.length for move in moves):
        assert_same(content(actual), content(expected))
    else:
        assert bool(content(actual).isnan().all())


GOOD = {"source": donor_of(geometry_of(), 9, seed=2), "source_start": 2, "target_start": 10, "length": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source_start": -1}, r"moves\[1\].source from source_start -1"),
        ({"length": 8}, r"moves\[1\].source from source_start 2 with length 8 leaves 0\.\.9"),
        ({"target_start": 18}, r"target of moves\[1\] from target_start 18 with length 3 leaves 0\.\.20"),
        ({"target_start": -1}, "target_start -1"),
        ({"length": -1}, "length -1"),
        ({"target_start": 5}, "two moves write target position 5"),
        ({"source": ContiguousKv(torch.zeros(2, 2, 2, 9))}, r"moves\[1\].source.tensor has shape"),
        ({"source": ContiguousKv(torch.zeros(3, 2, 2, 9, 8))}, r"moves\[1\].source has .* \(3, 2, 2, 8\)"),
        ({"source": ContiguousKv(torch.zeros(2, 2, 2, 9, 8).half())}, r"moves\[1\].source is torch.float16"),
        ({"source": ContiguousKv(torch.zeros(2, 2, 2, 9, 8).char())}, "int8; supported are"),
        (
            {"source": PagedKv(torch.zeros(4, 2, 2, 64), torch.tensor([1, 4, 0]), geometry_of())},
            r"moves\[1\].source.block_ids spans 0\.\.4, outside 0\.\.3",
        ),
        (
            {"source": PagedKv(torch.zeros(4, 2, 2, 64, device="meta"), torch.tensor([1, 2, 0]), geometry_of())},
            r"moves\[1\].source.pool is on meta",
        ),
    ],
)
def test_a_bad_move_is_refused_before_anything_is_written(change, message):
    good, target = Move(donor_of(geometry_of(), 9, seed=1), 0, 0, 6), target_of(geometry_of())
    with pytest.raises(ValueError, match=message):
        kv_move([good, Move(**GOOD | change)], target, ROTATION)
    assert bool(target.pool.isnan().all())


@pytest.mark.parametrize(
    ("target", "rotary_dim", "message"),
    [
        (target_of(geometry_of(), blocks=(6, 1, 9)), 8, r"target.block_ids spans 1\.\.9, outside 0\.\.8"),
        (target_of(geometry_of(), blocks=(6, -1)), 8, r"target.block_ids spans -1\.\.6"),
        (target_of(geometry_of(), blocks=(6, 1, 6)), 8, "names a block twice"),
        (PagedKv(torch.zeros(9, 2, 2, 64), torch.tensor([1], dtype=torch.int32), geometry_of()), 8, "int64 vector"),
        (PagedKv(torch.zeros(9, 2, 2, 60), torch.tensor([1]), geometry_of()), 8, r"target.pool has shape"),
        (target_of(geometry_of()), 16, "target has head_dim 8, below the rotary_dim 16"),
    ],
)
def test_a_bad_target_is_refused(target, rotary_dim, message):
    with pytest.raises(ValueError, match=message):
        kv_move([Move(GOOD["source"], 0, 0, 2)], target, rotation_of(rotary_dim))


@pytest.mark.promise("engines", "Each layer's keys move by its...")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, builders.FP8])
@pytest.mark.parametrize("together", [True, False])
def test_a_layer_without_rope_is_copied_bit_for_bit(dtype, together, device):
    geometry = geometry_of(layers=4)
    donor, target = donor_of(geometry, 9, 4, dtype), target_of(geometry, dtype)
    donor.tensor[3, 0, 0, 3, :2] = torch.tensor([math.inf, -0.0]).to(dtype)
    rotation = builders.rotations_of(4) if together else builders.rotations_of(4).of_layer(3)
    move_on(device, [Move(donor, 2, 8, 4)], target, rotation)
    placed = pool_view(target.pool, geometry)[8, 3].view(torch.uint8)
    assert torch.equal(placed, donor.tensor[3, :, :, 2:6].view(torch.uint8))


def test_a_rotation_of_other_layers_is_refused_unless_nothing_turns(device):
    target, donor = on(target_of(geometry_of()), device), on(donor_of(geometry_of(), 9, 1), device)
    for make in (
        lambda: kv_move([Move(donor, 0, 3, 4)], target, builders.rotations_of(3)),
        lambda: LayerMoves([Move(donor, 0, 3, 4)], target, builders.rotations_of(1)),
    ):
        with pytest.raises(ValueError, match=r"target has 2 layers, but the rotation is that of \d; each layer"):
            make()
    assert bool(target.pool.isnan().all())
    kv_move([Move(donor, 0, 3, 4, turn=0)], target, builders.rotations_of(3))
    assert torch.equal(pool_view(target.pool, geometry_of())[6, :, :, :, 3].cpu(), donor.tensor[:, :, :, 0].cpu())


@pytest.mark.parametrize(
    ("layers", "first"), [(range(4, 6), 0), (range(-1, 1), 0), (range(3), 0), (range(2), 1), (range(1), -1)]
)
def test_layers_that_are_not_there_are_refused_before_anything_is_written(layers, first, device):
    target = ContiguousKv(torch.full((2, 2, 3, 11, 8), math.nan, device=device))
    donor = on(donor_of(geometry_of(kv_heads=3, layers=5), 13, 2), device)
    some = LayerMoves([Move(donor, 0, 0, 4)], target, ROTATION)
    message = f"layers {layers.start}..{layers.stop - 1} cannot be moved to layers from {first} on: the sources have 5"
    with pytest.raises(ValueError, match=message):
        some.make(layers, first)
    for moves in ([], [Move(donor, 0, 0, 4)]):
        kv_move([], target, ROTATION)
        LayerMoves(moves, target, ROTATION).make(range(0))
    assert target.tensor.isnan().all()
