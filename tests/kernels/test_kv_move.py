"""kv_move against its plain form over shapes that occur and odd ones; targets start as NaN, so a slot that is not
written shows.

Every test that takes `device` runs twice: through torch on the CPU, and through Triton, compiled where there is a CUDA
device and interpreted where there is none.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.kv_move import LayerMoves, Move, kv_move, naive
from kernels.layout import ContiguousKv, PagedKv, pool_view
from kernels.rope import Rotation, rotate_keys
from tests.kernels.builders import (
    BLOCK,
    FP8,
    TOLERANCE,
    assert_same,
    donor_of,
    geometry_of,
    memory_of,
    on,
    paged,
    rotation_of,
    rotations_of,
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
    memory_of(target).copy_(memory_of(placed))


def assert_matches_naive(
    device: str, moves: Sequence[Move], target: PagedKv | ContiguousKv, rotation: Rotation = ROTATION
) -> torch.Tensor:
    """Moves into `target`, which holds nothing, and returns its memory."""
    expected = on(target, "cpu")
    expected = replace(expected, **{"pool" if isinstance(target, PagedKv) else "tensor": memory_of(target).clone()})
    move_on(device, moves, target, rotation)
    naive.kv_move(moves, expected, rotation)
    assert_same(memory_of(target), memory_of(expected))
    return memory_of(target)


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
