"""kv_move against its plain form over odd shapes; targets start as NaN, so a slot that is not written shows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_move import Move, kv_move, naive
from kernels.layout import ContiguousKv, KvGeometry, PagedKv, pool_view
from kernels.rope import RopeRotation, rotate_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCK = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def geometry_of(kv_heads: int = 2, head_dim: int = 8, block_size: int = BLOCK) -> KvGeometry:
    return KvGeometry(num_layers=2, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)


def rotation_of(rotary_dim: int, interleaved: bool = False) -> RopeRotation:
    return RopeRotation(
        tuple(1e4 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)), rotary_dim, interleaved=interleaved
    )


def donor_of(geometry: KvGeometry, tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> ContiguousKv:
    generator = torch.Generator().manual_seed(seed)
    shape = (geometry.num_layers, 2, geometry.kv_heads, tokens, geometry.head_dim)
    return ContiguousKv(torch.randn(shape, generator=generator).to(dtype))


def target_of(
    geometry: KvGeometry, dtype: torch.dtype = torch.float32, blocks: Sequence[int] = (6, 1, 8, 3, 5)
) -> PagedKv:
    pool = torch.full((9, geometry.num_layers, 2, geometry.row_elements), math.nan, dtype=dtype)
    return PagedKv(pool, torch.tensor(blocks), geometry)


def as_paged(donor: ContiguousKv, geometry: KvGeometry) -> PagedKv:
    """The donor's tokens in a shuffled pool; the rest of the pool is NaN."""
    blocks = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    paged = PagedKv(torch.full((12, geometry.num_layers, 2, geometry.row_elements), math.nan), blocks, geometry)
    paged = PagedKv(paged.pool.to(donor.tensor.dtype), blocks, geometry)
    view = pool_view(paged.pool, geometry)
    for token in range(donor.capacity):
        view[blocks[token // geometry.block_size], :, :, :, token % geometry.block_size] = donor.tensor[:, :, :, token]
    return paged


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.isnan(), expected.isnan())
    error = (actual.double() - expected.double()).nan_to_num().norm() / expected.double().nan_to_num().norm()
    assert float(error) <= TOLERANCE[actual.dtype]


def assert_move_matches_naive(
    moves: Sequence[Move], new_target: Callable[[], PagedKv | ContiguousKv], rotation: RopeRotation
) -> torch.Tensor:
    actual, expected = new_target(), new_target()
    kv_move(moves, actual, rotation)
    naive.kv_move(moves, expected, rotation)
    tensors = [kv.pool if isinstance(kv, PagedKv) else kv.tensor for kv in (actual, expected)]
    assert_same(*tensors)
    return tensors[0]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 2])
@pytest.mark.parametrize(("source_start", "target_start"), [(0, 0), (3, 3), (1, 5), (6, 2), (0, 7)])
def test_lengths_and_offsets(length: int, source_start: int, target_start: int) -> None:
    if target_start + length > 5 * BLOCK:
        target_start = 5 * BLOCK - length
    geometry = geometry_of()
    donor = donor_of(geometry, 21, seed=length)
    for source in (donor, as_paged(donor, geometry)):
        move = Move(source, source_start, target_start, length)
        pool = assert_move_matches_naive([move], lambda: target_of(geometry), rotation_of(8))
        written = ~pool_view(pool, geometry).isnan()
        assert int(written.sum()) == length * geometry.num_layers * 2 * geometry.kv_heads * geometry.head_dim


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (64, 64), (80, 80), (80, 32)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_widths_and_dtypes(
    kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype, interleaved: bool
) -> None:
    geometry = geometry_of(kv_heads, head_dim)
    move = Move(donor_of(geometry, 9, seed=1, dtype=dtype), 2, 5, 6)
    assert_move_matches_naive([move], lambda: target_of(geometry, dtype), rotation_of(rotary_dim, interleaved))


def test_three_spans_from_three_donors_with_their_own_shifts() -> None:
    geometry = geometry_of()
    donors = [donor_of(geometry, 10, seed) for seed in range(3)]
    moves = [Move(donors[0], 4, 11, 5), Move(as_paged(donors[1], geometry), 8, 0, 2), Move(donors[2], 3, 3, 7)]
    assert_move_matches_naive(moves, lambda: target_of(geometry), rotation_of(8))


@pytest.mark.parametrize("paged_source", [False, True])
def test_a_contiguous_target(paged_source: bool) -> None:
    geometry = geometry_of(kv_heads=3)
    donor = donor_of(geometry, 19, seed=5)
    source = as_paged(donor, geometry) if paged_source else donor
    moves = [Move(source, 2, 0, 9), Move(source, 12, 12, 3)]
    assert_move_matches_naive(
        moves, lambda: ContiguousKv(torch.full_like(donor.tensor[:, :, :, :16], math.nan)), rotation_of(8)
    )


def test_a_source_pool_may_have_another_block_size() -> None:
    geometry, other = geometry_of(), geometry_of(block_size=3)
    move = Move(as_paged(donor_of(other, 17, seed=2), other), 2, 4, 13)
    assert_move_matches_naive([move], lambda: target_of(geometry), rotation_of(8))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shift_zero_copies_bit_for_bit_and_v_is_never_touched(dtype: torch.dtype) -> None:
    geometry = geometry_of()
    donor = donor_of(geometry, 12, seed=4, dtype=dtype)
    copied = ContiguousKv(torch.full_like(donor.tensor, math.nan))
    target = target_of(geometry, dtype)
    kv_move([Move(donor, 3, 3, 9)], target, rotation_of(8))
    kv_move([Move(target, 3, 3, 9)], copied, rotation_of(8))
    assert torch.equal(copied.tensor[:, :, :, 3:], donor.tensor[:, :, :, 3:])
    shifted = ContiguousKv(torch.full_like(donor.tensor, math.nan))
    kv_move([Move(donor, 3, 0, 9)], shifted, rotation_of(8))
    assert torch.equal(shifted.tensor[:, 1, :, :9], donor.tensor[:, 1, :, 3:])
    assert torch.equal(shifted.tensor[:, 0, :, :9], rotate_keys(donor.tensor[:, 0, :, 3:], -3, rotation_of(8)))


def test_untouched_slots_stay_bitwise() -> None:
    geometry = geometry_of()
    target = target_of(geometry)
    target.pool.copy_(torch.randn(target.pool.shape, generator=torch.Generator().manual_seed(0)))
    before = target.pool.clone()
    kv_move([Move(donor_of(geometry, 9, seed=8), 0, 6, 9)], target, rotation_of(8))
    changed = (target.pool != before).view(9, 2, 2, 2, BLOCK, 8).any(-1).all(1).all(1).all(1)
    assert {(int(block), int(slot)) for block, slot in changed.nonzero()} == {
        (int(target.block_ids[position // BLOCK]), position % BLOCK) for position in range(6, 15)
    }
    assert torch.equal(target.pool[[0, 2, 4, 7, 6]], before[[0, 2, 4, 7, 6]])


def test_moves_within_one_pool_may_not_overlap_but_may_share_blocks() -> None:
    geometry = geometry_of()
    target = target_of(geometry)
    target.pool.copy_(torch.randn(target.pool.shape))
    before = target.pool.clone()
    with pytest.raises(ValueError, match=r"moves\[0\].source is written by the same call"):
        kv_move([Move(target, 0, 3, 4)], target, rotation_of(8))
    assert torch.equal(target.pool, before)
    kv_move([Move(target, 0, 6, 6)], target, rotation_of(8))
    view, original = pool_view(target.pool, geometry), pool_view(before, geometry)
    assert torch.equal(view[1, :, 1, :, 2], original[6, :, 1, :, 0])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_disjoint_moves_match_naive(data: st.DataObject) -> None:
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
    assert_move_matches_naive_or_untouched(moves, geometry)


def assert_move_matches_naive_or_untouched(moves: Sequence[Move], geometry: KvGeometry) -> None:
    if any(move.length for move in moves):
        assert_move_matches_naive(moves, lambda: target_of(geometry), rotation_of(8))
        return
    target = target_of(geometry)
    kv_move(moves, target, rotation_of(8))
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
