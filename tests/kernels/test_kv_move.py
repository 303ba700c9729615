"""kv_move against its plain form over odd shapes; targets start as NaN, so a slot that is not written shows.

Every test that takes `device` runs twice: through torch on the CPU, and through Triton, compiled where there is a CUDA
device and interpreted where there is none.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.kv_move import Move, kv_move, naive
from kernels.layout import ContiguousKv, KvGeometry, PagedKv, pool_view
from kernels.rope import RopeRotation, rotate_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCK = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
FP8 = torch.float8_e4m3fn
FP8_TOLERANCE = 0.1  # three bits of mantissa, and the interpreter truncates


def on(kv: PagedKv | ContiguousKv, device: str) -> PagedKv | ContiguousKv:
    if isinstance(kv, PagedKv):
        return PagedKv(kv.pool.to(device), kv.block_ids, kv.geometry)
    return ContiguousKv(kv.tensor.to(device))


def move_on(device: str, moves: Sequence[Move], target: PagedKv | ContiguousKv, rotation: RopeRotation) -> None:
    """Moves on `device` what lies on the CPU, and brings the target back."""
    placed = on(target, device)
    sources = {id(move.source): on(move.source, device) for move in moves}
    sources[id(target)] = placed
    moved = [replace(move, source=sources[id(move.source)]) for move in moves]
    kv_move(moved, placed, rotation)
    memory_of(target).copy_(memory_of(placed))


def memory_of(kv: PagedKv | ContiguousKv) -> torch.Tensor:
    return kv.pool if isinstance(kv, PagedKv) else kv.tensor


def geometry_of(kv_heads: int = 2, head_dim: int = 8, block_size: int = BLOCK, kv_factor: int = 2) -> KvGeometry:
    return KvGeometry(2, kv_heads, head_dim, block_size, kv_factor)


def rotation_of(rotary_dim: int, interleaved: bool = False, first_channel: int = 0) -> RopeRotation:
    frequencies = tuple(1e4 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2))
    return RopeRotation(frequencies, rotary_dim, interleaved, first_channel)


def donor_of(geometry: KvGeometry, tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> ContiguousKv:
    generator = torch.Generator().manual_seed(seed)
    shape = (geometry.num_layers, geometry.kv_factor, geometry.kv_heads, tokens, geometry.head_dim)
    return ContiguousKv(torch.randn(shape, generator=generator).to(dtype))


def target_of(
    geometry: KvGeometry, dtype: torch.dtype = torch.float32, blocks: Sequence[int] = (6, 1, 8, 3, 5)
) -> PagedKv:
    pool = torch.full((9, geometry.num_layers, geometry.kv_factor, geometry.row_elements), math.nan).to(dtype)
    return PagedKv(pool, torch.tensor(blocks), geometry)


def as_paged(donor: ContiguousKv, geometry: KvGeometry) -> PagedKv:
    """The donor's tokens in a shuffled pool; the rest of the pool is NaN."""
    blocks = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    pool = torch.full((12, geometry.num_layers, geometry.kv_factor, geometry.row_elements), math.nan)
    paged = PagedKv(pool.to(donor.tensor.dtype), blocks, geometry)
    view = pool_view(paged.pool, geometry)
    for token in range(donor.capacity):
        view[blocks[token // geometry.block_size], :, :, :, token % geometry.block_size] = donor.tensor[:, :, :, token]
    return paged


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE.get(actual.dtype, FP8_TOLERANCE)
    actual, expected = actual.double(), expected.double()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert float((actual - expected).nan_to_num().norm() / expected.nan_to_num().norm()) <= tolerance


def assert_move_matches_naive(
    moves: Sequence[Move], new_target: Callable[[], PagedKv | ContiguousKv], rotation: RopeRotation, device: str
) -> torch.Tensor:
    actual, expected = new_target(), new_target()
    move_on(device, moves, actual, rotation)
    naive.kv_move(moves, expected, rotation)
    assert_same(memory_of(actual), memory_of(expected))
    return memory_of(actual)


@pytest.mark.known_defect(27)
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 2])
@pytest.mark.parametrize(("source_start", "target_start"), [(0, 0), (3, 3), (1, 5), (6, 2), (0, 7)])
def test_lengths_and_offsets(length: int, source_start: int, target_start: int, device: str) -> None:
    if target_start + length > 5 * BLOCK:
        target_start = 5 * BLOCK - length
    geometry = geometry_of()
    donor = donor_of(geometry, 21, seed=length)
    for source in (donor, as_paged(donor, geometry)):
        move = Move(source, source_start, target_start, length)
        pool = assert_move_matches_naive([move], lambda: target_of(geometry), rotation_of(8), device)
        written = ~pool_view(pool, geometry).isnan()
        assert int(written.sum()) == length * geometry.num_layers * 2 * geometry.kv_heads * geometry.head_dim


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (64, 64), (80, 80), (80, 32)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_widths_and_dtypes(
    kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    geometry = geometry_of(kv_heads, head_dim)
    move = Move(donor_of(geometry, 9, seed=1, dtype=dtype), 2, 5, 6)
    assert_move_matches_naive([move], lambda: target_of(geometry, dtype), rotation_of(rotary_dim, interleaved), device)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 128), (2, 256)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_large_heads(kv_heads: int, head_dim: int, interleaved: bool, device: str) -> None:
    geometry = geometry_of(kv_heads, head_dim)
    move = Move(donor_of(geometry, 4, seed=1, dtype=torch.bfloat16), 1, 6, 3)
    new_target = partial(target_of, geometry, torch.bfloat16)
    assert_move_matches_naive([move], new_target, rotation_of(head_dim, interleaved), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_of_a_latent_row_only_the_channels_behind_the_latent_rotate(
    dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    geometry = geometry_of(kv_heads=1, head_dim=40, kv_factor=1)
    donor = donor_of(geometry, 9, seed=6, dtype=dtype)
    rotation = rotation_of(8, interleaved, first_channel=32)
    for source in (donor, as_paged(donor, geometry)):
        pool = assert_move_matches_naive([Move(source, 1, 4, 7)], lambda: target_of(geometry, dtype), rotation, device)
        row = pool_view(pool, geometry)[1, :, 0, 0, 0, :32]  # position 4
        assert torch.equal(row.float(), donor.tensor[:, 0, 0, 1, :32].float())


@pytest.mark.known_defect(26)
@pytest.mark.parametrize("head_dim", [8, 80])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fp8(head_dim: int, interleaved: bool, device: str) -> None:
    geometry = geometry_of(head_dim=head_dim)
    donor = donor_of(geometry, 12, seed=3, dtype=FP8)
    moves = [Move(as_paged(donor, geometry), 2, 7, 6), Move(donor, 0, 0, 3)]
    pool = assert_move_matches_naive(moves, lambda: target_of(geometry, FP8), rotation_of(8, interleaved), device)
    copied = pool_view(pool, geometry)[6, :, :, :, :3].view(torch.uint8)  # positions 0..2, shift 0
    assert torch.equal(copied, donor.tensor[:, :, :, :3].view(torch.uint8))


def test_fp8_saturates_where_a_rotation_leaves_its_range(device: str) -> None:
    geometry = geometry_of(head_dim=8)
    donor = ContiguousKv(torch.full((2, 2, 2, 3, 8), 448.0).to(FP8))
    target = target_of(geometry, FP8)
    move_on(device, [Move(donor, 0, 6, 3)], target, rotation_of(8))
    keys = pool_view(target.pool, geometry)[1, :, 0, :, 2:].float()
    assert float(keys.max()) == 448.0
    assert not bool(keys.isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_is_not_aligned_to_16_bytes(dtype: torch.dtype, device: str) -> None:
    geometry = geometry_of(head_dim=6)
    donor = donor_of(geometry, 13, seed=7, dtype=dtype)
    shifted = ContiguousKv(donor.tensor[:, :, :, 1:])
    moves = [Move(shifted, 0, 5, 7), Move(as_paged(donor, geometry), 11, 11 + 2, 2)]
    assert_move_matches_naive(moves, lambda: target_of(geometry, dtype), rotation_of(6), device)


def test_a_tensor_whose_channels_are_apart_takes_the_other_path(device: str) -> None:
    geometry = geometry_of()
    donor = donor_of(geometry, 9, seed=1)
    apart = ContiguousKv(donor.tensor.transpose(3, 4).contiguous().transpose(3, 4))
    placed = target_of(geometry)
    kv_move([Move(apart, 0, 2, 5), Move(donor, 1, 9, 4)], placed, rotation_of(8))
    expected = target_of(geometry)
    naive.kv_move([Move(donor, 0, 2, 5), Move(donor, 1, 9, 4)], expected, rotation_of(8))
    assert_same(placed.pool, expected.pool)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("tile_bytes", [64, 16384])
def test_tilings(heads: int, tokens_first: bool, tile_bytes: int, triton_device: str) -> None:
    from kernels.kv_move import triton_move
    from kernels.span_table import Tiling

    geometry = geometry_of(kv_heads=3)
    moves = [Move(donor_of(geometry, 12, seed, torch.float32), 1, 11 * seed, 6) for seed in range(2)]
    actual, expected = on(target_of(geometry), triton_device), target_of(geometry)
    placed = [Move(on(move.source, triton_device), 1, move.target_start, 6) for move in moves]
    tiling = Tiling(tile_bytes, heads=heads, tokens_first=tokens_first)
    triton_move.prepared(placed, actual, rotation_of(8), tiling)(range(2))
    naive.kv_move(moves, expected, rotation_of(8))
    assert_same(memory_of(actual).cpu(), expected.pool)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: only a CUDA device compiles")
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
        [Move(on(as_paged(donor_of(geometry, 20, 1), geometry), "cuda"), 3, 1, 17)],
    ):
        kv_move(moves, target, rotation_of(64))
    assert variants() == compiled


@pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: pinned memory needs a CUDA device")
def test_a_donor_in_pinned_host_memory_is_read_in_place() -> None:
    from kernels.dispatch import triton_serves

    geometry = geometry_of()
    donor = donor_of(geometry, 12, seed=2)
    pinned = ContiguousKv(donor.tensor.pin_memory())
    actual, expected = on(target_of(geometry), "cuda"), target_of(geometry)
    assert triton_serves(memory_of(actual), (pinned.tensor,))
    kv_move([Move(pinned, 1, 4, 9)], actual, rotation_of(8))
    naive.kv_move([Move(donor, 1, 4, 9)], expected, rotation_of(8))
    assert_same(memory_of(actual).cpu(), expected.pool)


def test_three_spans_from_three_donors_with_their_own_shifts(device: str) -> None:
    geometry = geometry_of()
    donors = [donor_of(geometry, 10, seed) for seed in range(3)]
    moves = [Move(donors[0], 4, 11, 5), Move(as_paged(donors[1], geometry), 8, 0, 2), Move(donors[2], 3, 3, 7)]
    assert_move_matches_naive(moves, lambda: target_of(geometry), rotation_of(8), device)


@pytest.mark.parametrize("paged_source", [False, True])
def test_a_contiguous_target(paged_source: bool, device: str) -> None:
    geometry = geometry_of(kv_heads=3)
    donor = donor_of(geometry, 19, seed=5)
    source = as_paged(donor, geometry) if paged_source else donor
    moves = [Move(source, 2, 0, 9), Move(source, 12, 12, 3)]
    assert_move_matches_naive(
        moves, lambda: ContiguousKv(torch.full_like(donor.tensor[:, :, :, :16], math.nan)), rotation_of(8), device
    )


def test_a_source_pool_may_have_another_block_size(device: str) -> None:
    geometry, other = geometry_of(), geometry_of(block_size=3)
    move = Move(as_paged(donor_of(other, 17, seed=2), other), 2, 4, 13)
    assert_move_matches_naive([move], lambda: target_of(geometry), rotation_of(8), device)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shift_zero_copies_bit_for_bit_and_v_is_never_touched(dtype: torch.dtype, device: str) -> None:
    geometry = geometry_of()
    donor = donor_of(geometry, 12, seed=4, dtype=dtype)
    copied = ContiguousKv(torch.full_like(donor.tensor, math.nan))
    target = target_of(geometry, dtype)
    move_on(device, [Move(donor, 3, 3, 9)], target, rotation_of(8))
    move_on(device, [Move(target, 3, 3, 9)], copied, rotation_of(8))
    assert torch.equal(copied.tensor[:, :, :, 3:], donor.tensor[:, :, :, 3:])
    shifted = ContiguousKv(torch.full_like(donor.tensor, math.nan))
    move_on(device, [Move(donor, 3, 0, 9)], shifted, rotation_of(8))
    assert torch.equal(shifted.tensor[:, 1, :, :9], donor.tensor[:, 1, :, 3:])
    assert_same(shifted.tensor[:, 0, :, :9], rotate_keys(donor.tensor[:, 0, :, 3:], -3, rotation_of(8)))


def test_untouched_slots_stay_bitwise(device: str) -> None:
    geometry = geometry_of()
    target = target_of(geometry)
    target.pool.copy_(torch.randn(target.pool.shape, generator=torch.Generator().manual_seed(0)))
    before = target.pool.clone()
    move_on(device, [Move(donor_of(geometry, 9, seed=8), 0, 6, 9)], target, rotation_of(8))
    changed = (target.pool != before).view(9, 2, 2, 2, BLOCK, 8).any(-1).all(1).all(1).all(1)
    assert {(int(block), int(slot)) for block, slot in changed.nonzero()} == {
        (int(target.block_ids[position // BLOCK]), position % BLOCK) for position in range(6, 15)
    }
    assert torch.equal(target.pool[[0, 2, 4, 7, 6]], before[[0, 2, 4, 7, 6]])


def test_moves_within_one_pool_may_not_overlap_but_may_share_blocks(device: str) -> None:
    geometry = geometry_of()
    target = target_of(geometry)
    target.pool.copy_(torch.randn(target.pool.shape))
    before = target.pool.clone()
    with pytest.raises(ValueError, match=r"moves\[0\].source is written by the same call"):
        move_on(device, [Move(target, 0, 3, 4)], target, rotation_of(8))
    assert torch.equal(target.pool, before)
    move_on(device, [Move(target, 0, 6, 6)], target, rotation_of(8))
    view, original = pool_view(target.pool, geometry), pool_view(before, geometry)
    assert torch.equal(view[1, :, 1, :, 2], original[6, :, 1, :, 0])


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
        donor = donor_of(geometry, source_start + length, seed)
        moves.append(Move(donor, source_start, target_start, length))
        position = target_start + length
    if any(move.length for move in moves):
        assert_move_matches_naive(moves, lambda: target_of(geometry), rotation_of(8), device)
        return
    target = target_of(geometry)
    move_on(device, moves, target, rotation_of(8))
    assert bool(target.pool.isnan().all())


def test_no_moves_return_at_once() -> None:
    target = target_of(geometry_of())
    kv_move([], target, rotation_of(8))
    assert bool(target.pool.isnan().all())


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
    geometry = geometry_of()
    good = Move(donor_of(geometry, 9, seed=1), 0, 0, 6)
    fields = {"source": donor_of(geometry, 9, seed=2), "source_start": 2, "target_start": 10, "length": 3, **change}
    target = target_of(geometry)
    with pytest.raises(ValueError, match=message):
        kv_move([good, Move(**fields)], target, rotation_of(8))  # type: ignore[arg-type]
    assert bool(target.pool.isnan().all())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (target_of(geometry_of(), blocks=(6, 1, 9)), r"target.block_ids spans 1\.\.9, outside 0\.\.8"),
        (target_of(geometry_of(), blocks=(6, -1)), r"target.block_ids spans -1\.\.6"),
        (target_of(geometry_of(), blocks=(6, 1, 6)), "names a block twice"),
        (PagedKv(torch.zeros(9, 2, 2, 64), torch.tensor([1], dtype=torch.int32), geometry_of()), "int64 vector"),
        (PagedKv(torch.zeros(9, 2, 2, 60), torch.tensor([1]), geometry_of()), r"target.pool has shape"),
    ],
)
def test_a_bad_target_is_refused(target: PagedKv, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_move([Move(donor_of(geometry_of(), 9, seed=1), 0, 0, 2)], target, rotation_of(8))


def test_a_rotation_wider_than_the_head_is_refused() -> None:
    geometry = geometry_of()
    with pytest.raises(ValueError, match="target has head_dim 8, below the rotary_dim 16"):
        kv_move([Move(donor_of(geometry, 9, seed=1), 0, 0, 2)], target_of(geometry), rotation_of(16))


@pytest.mark.parametrize("turn", [0, 5, -3])
def test_a_turn_replaces_the_difference_of_the_indices(turn: int, device: str) -> None:
    """A staged copy begins anywhere: what its keys rotate by is said, not read off the indices."""
    rotation = RopeRotation((1.0, 0.1, 0.01, 0.001), 8)
    source = torch.randn(3, 2, 2, 9, 8, generator=torch.Generator().manual_seed(2)).to(device)
    target = torch.full_like(source, math.nan)
    kv_move([Move(ContiguousKv(source), 4, 1, 5, turn=turn)], ContiguousKv(target), rotation)
    expected = rotate_keys(source[:, 0, :, 4:9], turn, rotation)
    torch.testing.assert_close(target[:, 0, :, 1:6], expected, atol=1e-5, rtol=0 if turn == 0 else 1e-5)
    assert torch.equal(target[:, 1, :, 1:6], source[:, 1, :, 4:9])
