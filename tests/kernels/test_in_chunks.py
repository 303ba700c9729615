"""Rows that see their own chunk alone: as sequences of their own they attend and are written as they should."""

import math

import pytest
import torch

from kernels.layout import PoolLayer
from kernels.sparse_prefill import SequenceRows, in_chunks, naive, sparse_prefill, write_rows
from tests.kernels.builders import BLOCK, Batch, assert_same, rows_at, seeded

SCALE = 0.3
POSITIONS = [
    [[0]],
    [list(range(40))],
    [list(range(7, 8)), list(range(30))],
    [[0, 3, 7, 8, 9, 23, 24, 40], [5], list(range(15, 18))],
]


def by_windows(batch, chunk):
    """Each row by itself: of its chunk it sees what a window of so many tokens shows."""
    kv, rows = PoolLayer(batch.pool, 1, batch.geometry), []
    for each in batch.sequences:
        for row, position in enumerate(each.positions.tolist(), each.first_row):
            alone = SequenceRows(0, torch.tensor([position]), each.block_ids)
            rows.append(naive.sparse_prefill(batch.q[row : row + 1], kv, [alone], SCALE, position % chunk + 1))
    return torch.cat(rows)


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
@pytest.mark.parametrize("chunk", [BLOCK, 2 * BLOCK, 6 * BLOCK, 256])
def test_a_row_sees_its_own_chunk_up_to_itself(device, positions, chunk):
    batch = Batch(positions, block_size=BLOCK)
    q, pool, sequences = batch.on(device)
    seen = in_chunks(sequences, chunk, BLOCK)
    assert {str(each.positions.device) for each in seen} == {str(sequences[0].positions.device)}
    actual = sparse_prefill(q, PoolLayer(pool, 1, batch.geometry), seen, SCALE)
    expected = by_windows(batch, chunk)
    assert not expected.isnan().any()
    assert_same(actual, expected)


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_rows_are_written_to_the_same_slots(device, positions):
    batch = Batch(positions, block_size=BLOCK)
    _, pool, sequences = batch.on(device)
    rows, size = sum(each.count for each in sequences), (batch.geometry.kv_heads, batch.geometry.head_dim)
    k, v = (seeded(rows, *size, seed=seed).to(device) for seed in (1, 2))
    pools = [torch.full_like(pool, math.nan) for _ in range(2)]
    for own, each in zip(pools, (sequences, in_chunks(sequences, 2 * BLOCK, BLOCK)), strict=True):
        write_rows(k, v, PoolLayer(own, 1, batch.geometry), each)
    assert torch.equal(pools[0].cpu().nan_to_num(), pools[1].cpu().nan_to_num())
    assert torch.equal(pools[0].cpu().isnan(), pools[1].cpu().isnan())


def test_sequences_within_the_first_chunk_are_left_as_they_are():
    first = rows_at(0, [0, 7], [3, 4])
    assert in_chunks([first], 8, BLOCK) == (first,)
    assert in_chunks([first], 9, BLOCK) == (first,)  # no end of a chunk is reached
    assert in_chunks([], 8, BLOCK) == ()


def test_blocks_that_do_not_divide_a_chunk_are_refused():
    with pytest.raises(ValueError, match="chunk is 6; it must be a multiple of the block size 4"):
        in_chunks([rows_at(0, [5, 6], [0, 1])], 6, BLOCK)
