"""kv_move against its plain form over shapes that occur and odd ones; targets start as NaN, so a slot that is not
written shows.

Every test that takes `device` runs twice: through torch on the CPU, and through Triton, compiled where there is a CUDA
device and interpreted where there is none.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.deviation import token_rows
from kernels.kv_move import LayerMoves, Move, eager, kv_move, naive, warm_up
from kernels.layout import ContiguousKv, KvGeometry, PagedKv, pool_view
from kernels.rope import Rotation, rotate_keys, saturated
from tests.kernels.builders import (
    BLOCK,
    FP8,
    TOLERANCE,
    assert_same,
    assert_stored,
    donor_of,
    geometry_of,
    memories_of,
    on,
    paged,
    rotation_of,
    rotations_of,
    rounded,
    seeded,
    target_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

ROTATION = rotation_of()
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: needs a CUDA device")


def move_on(device: str, moves: Sequence[Move], target: PagedKv | ContiguousKv, rotation: Rotation) -> None:
    """Moves on `device` what lies on the CPU, and brings the target back."""
    placed = on(target, device)
    sources = {id(move.source): on(move.source, device) for move in moves} | {id(target): placed}
    kv_move([replace(move, source=sources[id(move.source)]) for move in moves], placed, rotation)
    for own, moved in zip(memories_of(target), memories_of(placed), strict=True):
        own.copy_(moved)


def assert_matches_naive(
    device: str, moves: Sequence[Move], target: PagedKv | ContiguousKv, rotation: Rotation = ROTATION
) -> torch.Tensor:
    """Moves into `target`, which holds nothing, and returns its memory, without keys beside it."""
    expected = deepcopy(target)
    move_on(device, moves, target, rotation)
    naive.kv_move(moves, expected, rotation)
    for actual, wanted in zip(memories_of(target), memories_of(expected), strict=True):
        assert_same(actual, wanted)
    return memories_of(target)[0]


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "rotary_dim", "block", "dtype", "interleaved"),
    [
        (4, 128, 128, 32, torch.bfloat16, False),
        (8, 128, 128, 64, torch.float16, False),
        (2, 64, 64, 32, torch.float32, False),
        (2, 64, 64, 64, torch.bfloat16, False),
        (8, 128, 64, 32, torch.bfloat16, False),
        (8, 128, 128, BLOCK, torch.bfloat16, True),
        (2, 256, 256, BLOCK, torch.bfloat16, False),
        (3, 80, 80, 3, torch.float32, True),
        (1, 80, 32, 5, torch.float16, False),
        (1, 80, 32, BLOCK, torch.bfloat16, True),
        (3, 8, 8, 1, torch.float32, False),
    ],
)
def test_heads_widths_blocks_and_dtypes(
    kv_heads: int, head_dim: int, rotary_dim: int, block: int, dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    geometry = geometry_of(kv_heads, head_dim, block)
    move = Move(donor_of(geometry, 9, seed=1, dtype=dtype), 2, min(5, 4 * block), min(6, block))
    assert_matches_naive(device, [move], target_of(geometry, dtype), rotation_of(rotary_dim, interleaved))


@pytest.mark.parametrize(
    ("latent", "rotary", "dtype", "interleaved"),
    [
        *((32, 8, torch.bfloat16, False), (32, 8, FP8, True), (32, 8, FP8, False)),
        *((512, 64, FP8, True), (24, 6, FP8, True), (7, 2, FP8, True)),
    ],
)
def test_of_a_latent_row_only_the_channels_behind_the_latent_rotate(
    latent: int, rotary: int, dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    geometry = geometry_of(kv_heads=1, head_dim=latent + rotary, kv_factor=1)
    donor, rotation = donor_of(geometry, 9, seed=6, dtype=dtype), rotation_of(rotary, interleaved, latent)
    for source in (donor, paged(donor)):
        pool = assert_matches_naive(device, [Move(source, 1, 4, 7)], target_of(geometry, dtype), rotation)
        row = pool_view(pool, geometry)[1, :, 0, 0, 0, :latent]  # position 4
        assert torch.equal(row.float(), donor.tensor[:, 0, 0, 1, :latent].float())


@pytest.mark.known_defect(26)
@pytest.mark.parametrize(("head_dim", "interleaved"), [(8, True), (80, False)])
def test_fp8(head_dim: int, interleaved: bool, device: str) -> None:
    geometry = geometry_of(head_dim=head_dim)
    donor = donor_of(geometry, 12, seed=3, dtype=FP8)
    moves = [Move(paged(donor), 2, 7, 6), Move(donor, 0, 0, 3)]
    pool = assert_matches_naive(device, moves, target_of(geometry, FP8), rotation_of(8, interleaved))
    copied = pool_view(pool, geometry)[6, :, :, :, :3].view(torch.uint8)  # positions 0..2, shift 0
    assert torch.equal(copied, donor.tensor[:, :, :, :3].view(torch.uint8))


def test_a_latent_row_in_fp8_saturates_where_its_rotation_leaves_the_range(device: str) -> None:
    geometry, rotation = geometry_of(1, 40, kv_factor=1), rotation_of(8, interleaved=True, first_channel=32)
    target = target_of(geometry, FP8)
    move_on(device, [Move(ContiguousKv(torch.full((2, 1, 1, 3, 40), 448.0).to(FP8)), 0, 6, 3)], target, rotation)
    rows = pool_view(target.pool, geometry)[1, :, 0, :, 2:].float()
    assert float(rows[..., 32:].max()) == 448.0 > float(rows[..., 32:].min())
    assert torch.equal(rows[..., :32], torch.full_like(rows[..., :32], 448.0))
    assert not bool(rows.isnan().any())


def test_fp8_saturates_where_a_rotation_leaves_its_range(device: str) -> None:
    target = target_of(geometry_of(), FP8)
    move_on(device, [Move(ContiguousKv(torch.full((2, 2, 2, 3, 8), 448.0).to(FP8)), 0, 6, 3)], target, ROTATION)
    keys = pool_view(target.pool, geometry_of())[1, :, 0, :, 2:].float()
    assert float(keys.max()) == 448.0
    assert not bool(keys.isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_is_not_aligned_to_16_bytes(dtype: torch.dtype, device: str) -> None:
    geometry = geometry_of(head_dim=6)
    donor = donor_of(geometry, 13, seed=7, dtype=dtype)
    moves = [Move(ContiguousKv(donor.tensor[:, :, :, 1:]), 0, 5, 7), Move(paged(donor), 11, 13, 2)]
    assert_matches_naive(device, moves, target_of(geometry, dtype), rotation_of(6))


def test_a_tensor_whose_channels_are_apart_takes_the_other_path(device: str) -> None:
    donor, placed, expected = donor_of(geometry_of(), 9, seed=1), target_of(geometry_of()), target_of(geometry_of())
    apart = ContiguousKv(donor.tensor.transpose(3, 4).contiguous().transpose(3, 4))
    kv_move([Move(apart, 0, 2, 5), Move(donor, 1, 9, 4)], placed, ROTATION)
    naive.kv_move([Move(donor, 0, 2, 5), Move(donor, 1, 9, 4)], expected, ROTATION)
    assert_same(placed.pool, expected.pool)


@pytest.mark.parametrize(
    ("heads", "tokens_first", "tile_bytes"),
    [(1, False, 64), (1, True, 16384), (2, True, 64), (2, False, 16384), (4, False, 64), (4, True, 64)],
)
def test_tilings(heads: int, tokens_first: bool, tile_bytes: int, triton_device: str) -> None:
    from kernels.kv_move import triton_move
    from kernels.span_table import Tiling

    geometry = geometry_of(kv_heads=3)
    moves = [Move(donor_of(geometry, 12, seed), 1, 11 * seed, 6) for seed in range(2)]
    actual, expected = on(target_of(geometry), triton_device), target_of(geometry)
    placed = [replace(move, source=on(move.source, triton_device)) for move in moves]
    tiling = Tiling(tile_bytes, heads=heads, tokens_first=tokens_first)
    triton_move.prepared(placed, actual, ROTATION, tiling)(range(2), 0)
    naive.kv_move(moves, expected, ROTATION)
    assert_same(actual.pool, expected.pool)


@needs_cuda
def test_no_plan_compiles_the_kernel_again() -> None:
    from kernels.kv_move import triton_move

    geometry = geometry_of(head_dim=64)
    target = on(target_of(geometry), "cuda")
    donors = [on(donor_of(geometry, tokens, seed=tokens), "cuda") for tokens in (1, 9, 16, 20)]

    def variants() -> int:
        return len(triton_move.move_kernel.device_caches[torch.cuda.current_device()][0])

    kv_move([Move(donors[3], 0, 0, 16)], target, rotation_of(64))
    compiled = variants()
    for moves in (
        [Move(donors[0], 0, 5, 1)],
        [Move(donors[3], 7, 0, 13)],
        [Move(donors[1], 0, 0, 9), Move(donors[2], 0, 9, 1)],
        [Move(donors[1], 1, 0, 8), Move(donors[2], 0, 9, 3), Move(donors[3], 2, 12, 8), Move(donors[0], 0, 8, 1)],
        [Move(on(paged(donor_of(geometry, 20, 1)), "cuda"), 3, 1, 17)],
    ):
        kv_move(moves, target, rotation_of(64))
    assert variants() == compiled


@needs_cuda
def test_a_donor_in_pinned_host_memory_is_read_in_place() -> None:
    from kernels.dispatch import triton_serves

    donor = donor_of(geometry_of(), 12, seed=2)
    pinned = ContiguousKv(donor.tensor.pin_memory())
    actual, expected = on(target_of(geometry_of()), "cuda"), target_of(geometry_of())
    assert triton_serves(actual.pool, (pinned.tensor,))
    kv_move([Move(pinned, 1, 4, 9)], actual, ROTATION)
    naive.kv_move([Move(donor, 1, 4, 9)], expected, ROTATION)
    assert_same(actual.pool, expected.pool)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shift_zero_copies_bit_for_bit_and_v_is_never_touched(dtype: torch.dtype, device: str) -> None:
    donor, target = donor_of(geometry_of(), 12, seed=4, dtype=dtype), target_of(geometry_of(), dtype)
    copied, shifted = (ContiguousKv(torch.full_like(donor.tensor, math.nan)) for _ in range(2))
    move_on(device, [Move(donor, 3, 3, 9)], target, ROTATION)
    move_on(device, [Move(target, 3, 3, 9)], copied, ROTATION)
    assert torch.equal(copied.tensor[:, :, :, 3:], donor.tensor[:, :, :, 3:])
    move_on(device, [Move(donor, 3, 0, 9)], shifted, ROTATION)
    assert torch.equal(shifted.tensor[:, 1, :, :9], donor.tensor[:, 1, :, 3:])
    assert_same(shifted.tensor[:, 0, :, :9], rotate_keys(donor.tensor[:, 0, :, 3:], -3, ROTATION))


@pytest.mark.parametrize("turn", [0, 5, -3])
def test_a_turn_replaces_the_difference_of_the_indices(turn: int, device: str) -> None:
    """A staged copy begins anywhere: what its keys rotate by is said, not read off the indices."""
    source = seeded(3, 2, 2, 9, 8, seed=2).to(device)
    target = torch.full_like(source, math.nan)
    kv_move([Move(ContiguousKv(source), 4, 1, 5, turn=turn)], ContiguousKv(target), ROTATION)
    expected = rotate_keys(source[:, 0, :, 4:9], turn, ROTATION)
    torch.testing.assert_close(target[:, 0, :, 1:6], expected, atol=1e-5, rtol=0 if turn == 0 else 1e-5)
    assert torch.equal(target[:, 1, :, 1:6], source[:, 1, :, 4:9])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_disjoint_moves_match_naive(data: st.DataObject, device: str) -> None:
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
    target = target_of(geometry)
    if any(move.length for move in moves):
        assert_matches_naive(device, moves, target)
        return
    move_on(device, moves, target, ROTATION)
    assert bool(target.pool.isnan().all())


GOOD = {"source": donor_of(geometry_of(), 9, seed=2), "source_start": 2, "target_start": 10, "length": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source_start": -1}, r"moves\[1\].source from source_start -1"),
        ({"length": 8}, r"moves\[1\].source from source_start 2 with length 8 leaves 0\.\.9"),
        ({"target_start": 18}, r"target of moves\[1\] from target_start 18 with length 3 leaves 0\.\.20"),
        ({"target_start": -1}, "target_start -1"),
        ({"length": -1}, "length -1"),
        ({"target_start": 4}, "two moves write target position 4"),
        ({"source": ContiguousKv(torch.zeros(2, 2, 3, 9, 8))}, r"moves\[1\].source has .* \(2, 2, 3, 8\)"),
        ({"source": ContiguousKv(torch.zeros(2, 3, 2, 9, 8))}, r"moves\[1\].source.tensor has shape"),
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
def test_a_bad_move_is_refused_before_anything_is_written(change: dict[str, object], message: str) -> None:
    good, target = Move(donor_of(geometry_of(), 9, seed=1), 0, 0, 6), target_of(geometry_of())
    with pytest.raises(ValueError, match=message):
        kv_move([good, Move(**GOOD | change)], target, ROTATION)  # type: ignore[arg-type]
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
def test_a_bad_target_is_refused(target: PagedKv, rotary_dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_move([Move(GOOD["source"], 0, 0, 2)], target, rotation_of(rotary_dim))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "rotary_dim", "block", "dtype", "interleaved"),
    [
        (5, 4, 128, 128, 16, torch.bfloat16, False),
        (1, 2, 64, 64, 32, torch.float16, False),
        (7, 3, 80, 32, 3, torch.float32, True),
        (4, 1, 24, 6, 5, torch.float32, False),
        (2, 2, 40, 8, BLOCK, FP8, False),
    ],
)
def test_each_layer_turns_by_its_own_rotation(
    layers: int, kv_heads: int, head_dim: int, rotary_dim: int, block: int, dtype: torch.dtype, interleaved: bool,
    device: str,
) -> None:  # fmt: skip
    geometry = geometry_of(kv_heads, head_dim, block, layers=layers)
    rotation = rotations_of(layers, rotary_dim, interleaved)
    donor, other = (donor_of(geometry, 9, seed, dtype) for seed in (1, 2))
    first = min(5, block)
    moves = [
        Move(donor, 1, 3 * block, min(5, block)),
        Move(paged(other, block), 0, 0, 1),
        Move(other, 3, first + 1, min(3, block)),
    ]
    pool = assert_matches_naive(device, moves, target_of(geometry, dtype), rotation)
    for layer in range(layers):
        own = target_of(replace(geometry, num_layers=1), dtype)
        alone = [replace(move, source=move.source.layers(layer, layer + 1)) for move in moves]
        naive.kv_move(alone, own, rotation.of_layer(layer))
        assert_same(pool[:, layer : layer + 1], own.pool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("together", [True, False])
def test_a_layer_without_rope_is_copied_bit_for_bit(dtype: torch.dtype, together: bool, device: str) -> None:
    geometry = geometry_of(layers=4)
    donor, target = donor_of(geometry, 9, 4, dtype), target_of(geometry, dtype)
    donor.tensor[3, 0, 0, 3, :2] = torch.tensor([math.inf, -0.0]).to(dtype)
    rotation = rotations_of(4) if together else rotations_of(4).of_layer(3)
    move_on(device, [Move(donor, 2, 8, 4)], target, rotation)
    placed = pool_view(target.pool, geometry)[8, 3].view(torch.uint8)
    assert torch.equal(placed, donor.tensor[3, :, :, 2:6].view(torch.uint8))


def test_a_rotation_of_other_layers_is_refused_unless_nothing_turns(device: str) -> None:
    target, donor = on(target_of(geometry_of()), device), on(donor_of(geometry_of(), 9, 1), device)
    for make in (
        lambda: kv_move([Move(donor, 0, 3, 4)], target, rotations_of(3)),
        lambda: LayerMoves([Move(donor, 0, 3, 4)], target, rotations_of(1)),
    ):
        with pytest.raises(ValueError, match=r"target has 2 layers, but the rotation is that of \d; each layer"):
            make()
    assert bool(target.pool.isnan().all())
    kv_move([Move(donor, 0, 3, 4, turn=0)], target, rotations_of(3))
    assert torch.equal(pool_view(target.pool, geometry_of())[6, :, :, :, 3].cpu(), donor.tensor[:, :, :, 0].cpu())


# Moves of a few layers at a time.
LAYERS, TOKENS = 5, 11
DEEP = geometry_of(kv_heads=3, layers=LAYERS)


def staged(dtype: torch.dtype, device: str, layers: int) -> ContiguousKv:
    return ContiguousKv(torch.full((layers, 2, 3, TOKENS, 8), math.nan, dtype=dtype, device=device))


@pytest.mark.parametrize(
    ("layers", "first"), [(range(4, 6), 0), (range(-1, 1), 0), (range(3), 0), (range(2), 1), (range(1), -1)]
)
def test_layers_that_are_not_there_are_refused_before_anything_is_written(
    layers: range, first: int, device: str
) -> None:
    target = staged(torch.float32, device, 2)
    some = LayerMoves([Move(on(donor_of(DEEP, 13, 2), device), 0, 0, 4)], target, ROTATION)
    told = f"layers {layers.start}..{layers.stop - 1} cannot be moved to layers from {first} on: the sources have 5"
    with pytest.raises(ValueError, match=told):
        some.make(layers, first)
    assert target.tensor.isnan().all()


def test_a_source_of_fewer_layers_moves_those_that_it_has() -> None:
    donor, target = donor_of(DEEP, 13, 2), staged(torch.float32, "cpu", 3)
    for source in (donor.layers(0, 2), paged(donor).layers(0, 2)):
        some = LayerMoves([Move(source, 0, 0, 4)], target, ROTATION)
        with pytest.raises(ValueError, match="the sources have 2"):
            some.make(range(3))
        assert target.tensor.isnan().all()


def test_no_moves_and_no_layers_write_nothing(device: str) -> None:
    target = staged(torch.float32, device, 2)
    kv_move([], target, ROTATION)
    LayerMoves([], target, ROTATION).make(range(0))
    LayerMoves([Move(on(donor_of(DEEP, 13, 2), device), 0, 0, 4)], target, ROTATION).make(range(0))
    assert target.tensor.isnan().all()


# Donors in 16 or 32 bits, and pools in fp8, by themselves or with keys in the donors' dtype beside them.
by_dtype = pytest.mark.parametrize("wide", TOLERANCE)
by_pool = pytest.mark.parametrize("beside", [True, False])


def pool_of(geometry: KvGeometry, wide: torch.dtype, beside: bool = True) -> PagedKv:
    return target_of(geometry, FP8, keys=wide if beside else None)


def shifted_in_memory(donor: ContiguousKv) -> ContiguousKv:
    """The donor one element behind the beginning of its memory."""
    memory = torch.cat([donor.tensor.new_zeros(1), donor.tensor.flatten()])
    return ContiguousKv(memory[1:].view(donor.tensor.shape))


@by_pool
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "rotary_dim", "block", "wide", "interleaved"),
    [
        (2, 16, 16, BLOCK, torch.float32, False),
        (4, 128, 128, 32, torch.bfloat16, False),
        (3, 80, 80, 3, torch.float16, True),
        (1, 80, 32, 5, torch.bfloat16, False),
        (2, 64, 32, BLOCK, torch.float16, True),
        (2, 6, 6, BLOCK, torch.bfloat16, False),
        (3, 6, 4, BLOCK, torch.float32, True),
    ],
)
@pytest.mark.parametrize("layered", [False, True])
def test_a_pool_in_fp8_takes_wider_donors(
    kv_heads: int, head_dim: int, rotary_dim: int, block: int, wide: torch.dtype, interleaved: bool, layered: bool,
    beside: bool, device: str,
) -> None:  # fmt: skip
    geometry = geometry_of(kv_heads, head_dim, block, layers=4)
    rotation = rotations_of(4, rotary_dim, interleaved) if layered else rotation_of(rotary_dim, interleaved)
    first, second, third = (donor_of(geometry, 9, seed, wide) for seed in (1, 2, 3))
    moves = [
        *(Move(first, 2, 0, 3), Move(paged(second, 2), 3, 3, 4), Move(paged(third), 1, 8, 5)),
        Move(shifted_in_memory(third), 8, 14, 1),
    ]
    assert_matches_naive(device, moves, pool_of(geometry, wide, beside), rotation)


@pytest.mark.parametrize(("head_dim", "by_torch"), [(16, 0), (6, 2)])
def test_triton_converts_rows_that_are_aligned(
    head_dim: int, by_torch: int, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of the donor's dtype it moves in any case: the torch path is left K in fp8, and V."""
    geometry = geometry_of(head_dim=head_dim)
    donor, target = donor_of(geometry, 9, 1, torch.bfloat16), pool_of(geometry, torch.bfloat16)
    served: list[object] = []
    monkeypatch.setattr(eager, "kv_move", lambda *call: served.append(call))
    kv_move([Move(on(donor, triton_device), 0, 2, 9)], on(target, triton_device), rotation_of(6))
    assert len(served) == by_torch


@by_dtype
@by_pool
@pytest.mark.parametrize("shift", [5, 0])
def test_keys_are_rounded_once_behind_their_rotation(wide: torch.dtype, beside: bool, shift: int, device: str) -> None:
    geometry, rotation = geometry_of(kv_heads=4, head_dim=32, block_size=16), rotation_of(32)
    donor, target = donor_of(geometry, 12, 4, wide), pool_of(geometry, wide, beside)
    donor.tensor[:, 0] *= 200  # so that some leave the range of fp8
    donor.tensor[:, 1] = donor.tensor[:, 1].to(FP8).to(wide)
    move_on(device, [Move(donor, 2, 2 + shift, 9)], target, rotation)
    k, v = token_rows(target, torch.arange(2 + shift, 11 + shift)).transpose(2, 3).unbind(1)
    turned = rotate_keys(donor.tensor[:, 0, :, 2:11].float(), shift, rotation)
    once, twice = saturated(turned, FP8), saturated(turned.to(wide), FP8)
    assert torch.equal(twice.float(), once.float()) == (shift == 0 or wide == torch.float32)
    if device == "cuda":  # a sum in float32 may end in another bit there
        assert int((k.float() != once.float()).sum()) <= 2
    else:
        assert_stored(k, once)
    assert float(k.float().abs().max()) == 448.0 < float(turned.abs().max())
    assert torch.equal(v.to(wide), donor.tensor[:, 1, :, 2:11])
    back = ContiguousKv(torch.full_like(donor.tensor, math.nan))
    move_on(device, [Move(target, 2 + shift, 2, 9, turn=0)], back, rotation)
    assert torch.equal(back.tensor[:, 1, :, 2:11], donor.tensor[:, 1, :, 2:11])
    assert bool(back.tensor[:, :, :, [0, 1, 11]].isnan().all())


@by_dtype
@pytest.mark.parametrize("head_dim", [16, 6])
@pytest.mark.parametrize("shift", [3, 0])
def test_keys_beside_a_pool_are_those_that_are_read(wide: torch.dtype, head_dim: int, shift: int, device: str) -> None:
    geometry, rotation = geometry_of(head_dim=head_dim), rotation_of(6)
    donor = donor_of(geometry, 12, 5, wide)
    moves = [Move(rounded(donor), 2, 4, 7, turn=shift), Move(rounded(donor_of(geometry, 12, 6, wide)), 0, 0, 3)]
    targets = (donor_of(geometry, 14, 0, wide), target_of(geometry, wide), pool_of(geometry, wide))
    targets[0].tensor.fill_(math.nan)
    for target in targets:
        assert_matches_naive(device, moves, target, rotation)
    arena = token_rows(targets[1], torch.arange(4, 11)).transpose(2, 3)
    held = token_rows(targets[2].kind(1), torch.arange(4, 11)).transpose(2, 3)[:, 0]
    keys, values = donor.tensor.flip(3)[:, 0, :, 2:9], donor.tensor[:, 1, :, 2:9].to(FP8)
    for k, v in (targets[0].tensor[:, :, :, 4:11].unbind(1), arena.unbind(1)):
        assert torch.equal(k, keys) == (shift == 0)
        assert torch.equal(v, values.to(wide))
    assert torch.equal(held.float(), values.float())


@by_dtype
def test_keys_beside_a_pool_move_within_it_unless_they_overlap(wide: torch.dtype, device: str) -> None:
    geometry = geometry_of(head_dim=16)
    held = on(rounded(donor_of(geometry, 9, 7, wide)), device)
    other = replace(held, pool=held.pool.clone())
    before = [memory.clone() for memory in memories_of(held)]
    expected = replace(on(held, "cpu"), pool=before[0].cpu(), keys=before[1].cpu())
    for source in (held, other):
        with pytest.raises(ValueError, match=r"moves\[0\].source is written by the same call"):
            kv_move([Move(source, 0, 3, 4)], held, ROTATION)
    for memory, own in zip(before, memories_of(held), strict=True):
        assert torch.equal(memory.view(torch.uint8), own.view(torch.uint8))
    naive.kv_move([Move(expected, 0, 10, 9)], expected, ROTATION)
    kv_move([Move(held, 0, 10, 9)], held, ROTATION)
    for actual, wanted in zip(memories_of(held), memories_of(expected), strict=True):
        assert_same(actual, wanted)


SIZES = geometry_of(head_dim=16)
BF16, HALF, EIGHT = (donor_of(SIZES, 9, 1, dtype) for dtype in (torch.bfloat16, torch.float16, FP8))
BESIDE = pool_of(SIZES, torch.bfloat16)


@pytest.mark.parametrize(
    ("sources", "target", "message"),
    [
        (
            (BF16, HALF),
            target_of(SIZES, FP8),
            r"moves\[1\].source is torch.float16; the first source is torch.bfloat16",
        ),
        ((EIGHT, BF16), target_of(SIZES, torch.bfloat16), r"moves\[1\].source is torch.bfloat16"),
        ((BF16, EIGHT), BESIDE, r"moves\[1\].source is torch.float8_e4m3fn"),
        ((rounded(BF16), BF16), BESIDE, r"moves\[1\].source is torch.bfloat16; the first source is torch.float8"),
        ((BF16,), target_of(SIZES, torch.float16), r"source is torch.bfloat16; the target is torch.float16"),
        ((HALF,), BESIDE, r"moves\[0\].source is torch.float16; the target is torch.bfloat16"),
        ((BF16,), replace(BESIDE, keys=BESIDE.keys[:, :1]), r"has shape \[9, 1, 1, 128\]; \[blocks, 2, 1, 128\]"),
        ((BF16,), replace(BESIDE, keys=BESIDE.keys[:8]), r"block_ids spans 1\.\.8, outside 0\.\.7"),
        ((replace(rounded(BF16), keys=BESIDE.keys),), BESIDE, r"source.block_ids spans 0\.\.11, outside 0\.\.8"),
        ((ContiguousKv(BF16.tensor[:, [0, 0, 1]]),), BESIDE, r"source.tensor has shape \[2, 3, 2, 9, 16\]"),
        (
            (BF16,),
            pool_of(geometry_of(head_dim=16, kv_factor=1), torch.bfloat16),
            r"\(2, 2, 2, 16\); .* \(2, 1, 2, 16\)",
        ),
        ((BF16,), replace(BESIDE, geometry=replace(SIZES, kv_factor=1)), r"target.pool has shape \[9, 2, 2, 128\]"),
    ],
)
def test_what_cannot_be_converted_is_refused_before_anything_is_written(
    sources: Sequence[PagedKv | ContiguousKv], target: PagedKv, message: str
) -> None:
    held = deepcopy(target)
    with pytest.raises(ValueError, match=message):
        kv_move([Move(source, 0, 5 * index, 4) for index, source in enumerate(sources)], held, ROTATION)
    assert all(bool(memory.float().isnan().all()) for memory in memories_of(held))


@needs_cuda
def test_nothing_is_compiled_for_keys_beside_a_pool_after_the_warm_up() -> None:
    from kernels.kv_move import triton_move

    rotation, cuda = rotation_of(16, interleaved=True), torch.device("cuda")
    warm_up(SIZES, FP8, cuda, rotation, torch.bfloat16)
    compiled = len(triton_move.move_kernel.device_caches[torch.cuda.current_device()][0])
    held, donor = on(deepcopy(BESIDE), "cuda"), on(BF16, "cuda")
    kv_move([Move(donor, 1, 3, 6)], held, rotation)
    kv_move([Move(held, 3, 0, 6)], donor, rotation)
    assert len(triton_move.move_kernel.device_caches[torch.cuda.current_device()][0]) == compiled
