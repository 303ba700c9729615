"""The pool is HND as in TensorRT-LLM, geometry errors name the tensor and its bound, and rows see their own chunk."""

import math

import pytest
import torch

from kernels import naive
from kernels.layout import KvGeometry, PoolLayer, pool_view
from kernels.sparse_prefill import SequenceRows, in_chunks, sparse_prefill, write_rows
from tests.kernels.builders import BLOCK, Batch, assert_same, rows_at, seeded


@pytest.mark.known_defect(27)
def test_pool_view_follows_the_offset_formula_of_tensorrt_llm():
    geometry = KvGeometry(num_layers=2, kv_heads=3, head_dim=4, block_size=5)
    pool = torch.arange(7 * 2 * 2 * geometry.row_elements, dtype=torch.float32).view(7, 2, 2, -1)
    view = pool_view(pool, geometry)
    for block, layer, kind, head, slot, channel in [(0, 0, 0, 0, 0, 0), (6, 1, 1, 2, 4, 3), (3, 0, 1, 1, 2, 2)]:
        offset = (head * geometry.block_size + slot) * geometry.head_dim + channel
        assert view[block, layer, kind, head, slot, channel] == pool[block, layer, kind, offset]
    assert view.data_ptr() == pool.data_ptr()


@pytest.mark.parametrize("name", ["num_layers", "kv_heads", "head_dim", "block_size"])
def test_sizes_below_one_are_refused(name):
    sizes = {"num_layers": 1, "kv_heads": 1, "head_dim": 1, "block_size": 1, name: 0}
    with pytest.raises(ValueError, match=rf"{name} is 0"):
        KvGeometry(**sizes)
    with pytest.raises(ValueError, match="kv_factor is 3"):
        KvGeometry(1, 1, 1, 1, kv_factor=3)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (torch.empty(4, 2, 2, 63), r"pool has shape \[4, 2, 2, 63\]"),
        (torch.empty(4, 3, 2, 64), r"\[blocks, 2, 2, 64\]"),
        (torch.empty(4, 2, 2, 64, dtype=torch.int8), "int8"),
        (torch.empty(4, 2, 2, 128)[..., ::2], "stride 2"),
    ],
)
def test_a_pool_of_another_layout_is_refused(pool, message):
    with pytest.raises(ValueError, match=message):
        pool_view(pool, KvGeometry(num_layers=2, kv_heads=2, head_dim=8, block_size=4))


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


@pytest.mark.promise("engines", "With chunks a moved run from...")
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


def test_blocks_that_do_not_divide_a_chunk_are_refused():
    with pytest.raises(ValueError, match="chunk is 6; it must be a multiple of the block size 4"):
        in_chunks([rows_at(0, [5, 6], [0, 1])], 6, BLOCK)
