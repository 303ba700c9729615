"""sparse_prefill and write_rows, in torch and in Triton, against their plain forms.

Slots that no query may read are NaN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.layout import KvGeometry, pool_view
from kernels.sparse_prefill import SequenceRows, eager, naive, sparse_prefill, write_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def geometry_of(kv_heads: int = 2, head_dim: int = 8, block_size: int = BLOCK) -> KvGeometry:
    return KvGeometry(num_layers=2, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)


def sequences_at(geometry: KvGeometry, positions: Sequence[Sequence[int]]) -> list[SequenceRows]:
    """One sequence for each list of positions, in blocks of their own, in shuffled order."""
    blocks = torch.randperm(200, generator=torch.Generator().manual_seed(9))
    sequences, rows = [], 0
    for own in positions:
        needed = geometry.blocks_for(own[-1] + 1)
        sequences.append(SequenceRows(rows, torch.tensor(own), blocks[:needed]))
        blocks, rows = blocks[needed:], rows + len(own)
    return sequences


def pool_for(geometry: KvGeometry, sequences: Sequence[SequenceRows], dtype: torch.dtype) -> torch.Tensor:
    """A pool with KV at every position up to each sequence's last, and NaN everywhere else."""
    pool = torch.full((200, geometry.num_layers, 2, geometry.row_elements), math.nan, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    view = pool_view(pool, geometry)
    for sequence in sequences:
        for position in range(sequence.last_position + 1):
            slot = view[sequence.block_ids[position // geometry.block_size], :, :, :, position % geometry.block_size]
            slot.copy_(torch.randn(slot.shape, generator=generator))
    return pool


def assert_matches_naive(
    device: str,
    geometry: KvGeometry,
    heads: int,
    positions: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
) -> None:
    sequences = sequences_at(geometry, positions)
    pool = pool_for(geometry, sequences, dtype)
    rows = sum(len(own) for own in positions)
    q = torch.randn(rows, heads, geometry.head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = naive.sparse_prefill(q, pool, 1, sequences, geometry, 0.3).double()
    moved = pool.to(device, copy=True)
    actual = sparse_prefill(q.to(device), moved, 1, [sequence.to(device) for sequence in sequences], geometry, 0.3)
    assert actual.dtype == dtype
    assert float((actual.cpu().double() - expected).norm() / expected.norm()) <= TOLERANCE[dtype]
    assert torch.equal(moved.cpu().isnan(), pool.isnan())
    assert torch.equal(moved.cpu().nan_to_num(), pool.nan_to_num())


@pytest.mark.parametrize(
    "positions",
    [
        [[0]],
        [[BLOCK - 1]],
        [[BLOCK]],
        [[BLOCK + 1]],
        [list(range(BLOCK - 1))],
        [list(range(BLOCK + 1))],
        [list(range(13))],
        [list(range(5, 13))],
        [list(range(2, 13))],
        [list(range(1, 6)), list(range(3, 17))],
        [[0, 3, 4, 9, 10, 18]],
        [[2], list(range(9)), [1, 7, 8], [16]],
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1), (6, 3)])
def test_positions_and_groups(device: str, positions: list[list[int]], heads: int, kv_heads: int) -> None:
    assert_matches_naive(device, geometry_of(kv_heads), heads, positions)


@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_widths_and_dtypes(device: str, head_dim: int, dtype: torch.dtype) -> None:
    assert_matches_naive(device, geometry_of(head_dim=head_dim), 4, [[0, 1, 6, 11], [9], list(range(7))], dtype)


@pytest.mark.parametrize("device", ["torch"], indirect=True)
@pytest.mark.parametrize("count", [eager.CHUNK_ROWS - 1, eager.CHUNK_ROWS, eager.CHUNK_ROWS + 1])
def test_chunks_join(device: str, count: int) -> None:
    geometry = geometry_of(1)
    assert_matches_naive(device, geometry, 1, [[*list(range(2, 2 * count, 2))[: count - 1], 2 * count]])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    positions=st.lists(st.sets(st.integers(0, 40), min_size=1, max_size=9).map(sorted), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    block_size=st.integers(1, 5),
)
def test_any_positions_match_naive(device: str, positions: list[list[int]], kv_heads: int, block_size: int) -> None:
    assert_matches_naive(device, geometry_of(kv_heads, block_size=block_size), 2 * kv_heads, positions)


def test_a_batch_equals_its_sequences_run_alone(device: str) -> None:
    geometry = geometry_of()
    host_sequences = sequences_at(geometry, [[3, 4, 9], [12], list(range(6))])
    pool = pool_for(geometry, host_sequences, torch.float32).to(device)
    sequences = [sequence.to(device) for sequence in host_sequences]
    q = torch.randn(10, 4, 8, generator=torch.Generator().manual_seed(4)).to(device)
    together = sparse_prefill(q, pool, 0, sequences, geometry, 0.5)
    for sequence in sequences:
        rows = slice(sequence.first_row, sequence.first_row + sequence.count)
        alone = SequenceRows(0, sequence.positions, sequence.block_ids)
        torch.testing.assert_close(sparse_prefill(q[rows], pool, 0, [alone], geometry, 0.5), together[rows])


def test_a_later_key_never_reaches_an_earlier_query(device: str) -> None:
    geometry = geometry_of()
    host_sequences = sequences_at(geometry, [[2, 5, 9]])
    pool = pool_for(geometry, host_sequences, torch.float32).to(device)
    sequences = [sequence.to(device) for sequence in host_sequences]
    q = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(4)).to(device)
    before = sparse_prefill(q, pool, 0, sequences, geometry, 0.5)
    pool_view(pool, geometry)[sequences[0].block_ids[1], 0, :, :, 2:] += 10
    after = sparse_prefill(q, pool, 0, sequences, geometry, 0.5)
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_write_rows_fills_the_positions_and_nothing_else(device: str, dtype: torch.dtype) -> None:
    geometry = geometry_of(3)
    sequences = sequences_at(geometry, [[0, 5, 6], [BLOCK], list(range(9))])
    generator = torch.Generator().manual_seed(6)
    k, v = torch.randn(2, 13, 3, 8, generator=generator).to(dtype)
    expected = torch.full((200, 2, 2, geometry.row_elements), math.nan, dtype=dtype)
    moved = expected.to(device, copy=True)
    write_rows(k.to(device), v.to(device), moved, 1, [sequence.to(device) for sequence in sequences], geometry)
    naive.write_rows(k, v, expected, 1, sequences, geometry)
    actual = moved.cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
    assert int((~actual.isnan()).sum()) == 2 * k.numel()


def test_no_rows_return_at_once() -> None:
    geometry = geometry_of()
    pool = torch.full((3, 2, 2, geometry.row_elements), math.nan)
    nothing = torch.empty(0, 2, 8)
    write_rows(nothing, nothing, pool, 0, [], geometry)
    assert bool(pool.isnan().all())
    assert sparse_prefill(torch.empty(0, 4, 8), pool, 0, [], geometry, 1.0).shape == (0, 4, 8)


def test_rows_moved_to_a_device_keep_their_bounds() -> None:
    rows = SequenceRows(3, torch.tensor([1, 2, 7]), torch.tensor([5, 2]))
    moved = rows.to("cpu")
    assert (moved.first_row, moved.count, moved.first_position, moved.last_position) == (3, 3, 1, 7)
    assert (moved.highest_block, moved.contiguous) == (5, False)
    assert rows.to("meta").highest_block == 5


@pytest.mark.parametrize(
    ("first_row", "positions", "block_ids", "message"),
    [
        (-1, [0], [0], "first_row is -1"),
        (0, [1, 1], [0], "rise strictly"),
        (0, [2, 1], [0], "rise strictly"),
        (0, [-1, 1], [0], "positions start at -1"),
        (0, [0], [3, -2], "block_ids at -2"),
        (0, [], [0], "positions is .* at least one"),
        (0, [0], [], "block_ids is .* at least one"),
        (0, [0.5], [0], "positions is torch.float32"),
    ],
)
def test_bad_rows_are_refused(first_row: int, positions: list[int], block_ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceRows(first_row, torch.tensor(positions), torch.tensor(block_ids))


def rows_at(first_row: int, positions: list[int], block_ids: list[int]) -> SequenceRows:
    return SequenceRows(first_row, torch.tensor(positions), torch.tensor(block_ids))


@pytest.mark.parametrize(
    ("layer", "sequences", "shape", "dtype", "message"),
    [
        (2, [rows_at(0, [0, 1], [0])], (2, 2, 8), torch.float32, r"layer is 2, outside 0\.\.1"),
        (-1, [rows_at(0, [0, 1], [0])], (2, 2, 8), torch.float32, "layer is -1"),
        (0, [rows_at(0, [0, 4], [0])], (2, 2, 8), torch.float32, r"positions reach 4; its blocks hold 0\.\.3"),
        (0, [rows_at(0, [0, 1], [3])], (2, 2, 8), torch.float32, r"block_ids reach 3, outside 0\.\.2"),
        (0, [rows_at(1, [0, 1], [0])], (2, 2, 8), torch.float32, r"first_row is 1; 0 is the next free row"),
        (0, [rows_at(0, [0, 1], [0])], (3, 2, 8), torch.float32, r"\[2, 2, 8\] is needed"),
        (0, [rows_at(0, [0, 1], [0])], (2, 2, 6), torch.float32, r"\[2, 2, 8\] is needed"),
        (0, [rows_at(0, [0, 1], [0])], (2, 2, 8), torch.float16, "the pool is torch.float32"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    layer: int, sequences: list[SequenceRows], shape: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    geometry = geometry_of()
    pool = torch.full((3, 2, 2, geometry.row_elements), math.nan)
    rows = torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        write_rows(rows, rows, pool, layer, sequences, geometry)
    assert bool(pool.isnan().all())
    with pytest.raises(ValueError, match=message):
        sparse_prefill(rows, pool, layer, sequences, geometry, 1.0)


def test_query_heads_are_a_multiple_of_kv_heads() -> None:
    geometry = geometry_of()
    pool = torch.zeros(3, 2, 2, geometry.row_elements)
    with pytest.raises(ValueError, match="a multiple of 2 heads"):
        sparse_prefill(torch.zeros(1, 3, 8), pool, 0, [rows_at(0, [0], [0])], geometry, 1.0)


@pytest.mark.parametrize("scale", [0.0, -0.1, math.inf, math.nan])
def test_the_scale_is_finite_and_positive(scale: float) -> None:
    geometry = geometry_of()
    pool = torch.zeros(3, 2, 2, geometry.row_elements)
    with pytest.raises(ValueError, match=r"scale is .*; it must be finite and above 0"):
        sparse_prefill(torch.zeros(1, 2, 8), pool, 0, [rows_at(0, [0], [0])], geometry, scale)


def test_latent_pools_are_refused() -> None:
    geometry = KvGeometry(num_layers=2, kv_heads=1, head_dim=8, block_size=BLOCK, kv_factor=1)
    pool = torch.zeros(3, 2, 1, geometry.row_elements)
    with pytest.raises(ValueError, match="kv_factor is 1"):
        sparse_prefill(torch.zeros(1, 2, 8), pool, 0, [rows_at(0, [0], [0])], geometry, 1.0)


def test_rows_are_checked_once_for_a_pool() -> None:
    geometry = geometry_of()
    pool = torch.zeros(3, 2, 2, geometry.row_elements)
    sequences = (rows_at(0, [0, 1], [2]), rows_at(2, [4], [0, 1]))
    for layer in range(2):
        sparse_prefill(torch.ones(3, 2, 8), pool, layer, sequences, geometry, 1.0)
    checked = [key for key in sequences[0].memo if isinstance(key, tuple) and key[0] == "checked"]
    assert len(checked) == 1
    with pytest.raises(ValueError, match=r"block_ids reach 2, outside 0\.\.1"):
        sparse_prefill(torch.ones(3, 2, 8), pool[:2], 0, sequences, geometry, 1.0)
    with pytest.raises(ValueError, match="first_row is 2; 0 is the next free row"):
        sparse_prefill(torch.ones(1, 2, 8), pool, 0, sequences[1:], geometry, 1.0)
