"""Tables of a captured launch: they cover every batch that fits, one that does not is refused, and all words arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.layout import PoolLayer
from kernels.sparse_prefill import naive
from kernels.sparse_prefill.tiles import TileConfig
from tests.kernels.builders import FP8, Batch, assert_same, rows_at

if TYPE_CHECKING:
    from kernels.sparse_prefill import SequenceRows
    from kernels.sparse_prefill.captured import LaunchShape

GROUP, HEADS = 3, 6
SCALE = 0.3
POSITIONS = st.lists(st.sets(st.integers(0, 400), min_size=1, max_size=12).map(sorted), min_size=1, max_size=3)


@pytest.fixture(autouse=True)
def only_with_triton(triton_device: str) -> None:
    """The tables belong to the Triton kernels."""


def filled(shape: LaunchShape, sequences: list[SequenceRows]) -> tuple[np.ndarray, np.ndarray]:
    from kernels.sparse_prefill.captured import ITEM_FIELDS, TILE_FIELDS, fill_tables

    items = np.full((shape.items, ITEM_FIELDS), -7, np.int32)
    tiles = np.full((shape.tiles, TILE_FIELDS), -7, np.int32)
    fill_tables(shape, sequences, items, tiles)
    return items, tiles


@settings(max_examples=60)
@given(positions=POSITIONS, spare=st.integers(0, 5), pieces=st.integers(1, 9))
def test_items_cover_every_token_of_every_row_once(positions: list[list[int]], spare: int, pieces: int) -> None:
    from kernels.sparse_prefill.captured import LaunchShape

    rows = sum(map(len, positions)) + spare
    shape = LaunchShape(rows, len(positions) + spare, GROUP, TileConfig(16, 16, 4, 2), pieces)
    sequences = Batch(positions, heads=HEADS).sequences
    items, tiles = filled(shape, sequences)
    covered = {}
    for first_row, begin, end, _, kv_begin, kv_end, slot in items.tolist():
        for token in range(kv_begin, kv_end):
            assert (first_row, end, token) not in covered
            covered[first_row, end, token] = slot
            assert 0 < end - begin <= 16
    assert items[:, 6].tolist() == list(range(shape.items))
    joined = {(first_row, end): range(slot, slot + count) for first_row, _, end, slot, count in tiles.tolist() if count}
    for sequence, own in zip(sequences, positions, strict=True):
        ends = [end for first_row, end in joined if first_row == sequence.first_row]
        assert max(ends) == len(own) * GROUP
        for end in ends:
            for token in range(own[(end - 1) // GROUP] + 1):
                assert covered[sequence.first_row, end, token] in joined[sequence.first_row, end]


@pytest.mark.parametrize("positions", [[list(range(15))], [[0], [0], [0], [0]]])
def test_a_batch_of_more_rows_or_sequences_than_the_shape_has_is_refused(positions: list[list[int]]) -> None:
    from kernels.sparse_prefill.captured import LaunchShape

    shape = LaunchShape(5, 3, GROUP, TileConfig(16, 16, 4, 2), 2)  # its tiles would hold the 15 rows
    rows = sum(map(len, positions))
    with pytest.raises(
        ValueError, match=f"has {rows} rows of {len(positions)} sequences; the launch has room for 5 of 3"
    ):
        filled(shape, Batch(positions, heads=HEADS).sequences)


def test_a_batch_of_few_tiles_is_not_cut_shorter_than_joining_is_worth() -> None:
    from kernels.sparse_prefill.captured import LaunchShape

    shape = LaunchShape(16, 1, 7, TileConfig(128, 64, 8, 2), 16)
    assert shape.tiles == 2
    items, _ = filled(shape, [rows_at(0, list(range(4080, 4096)), range(128))])
    assert (items[:, 5] - items[:, 4]).tolist() == [256] * 16 + [0] * 16


@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
@pytest.mark.parametrize(("block_m", "pieces"), [(16, 1), (16, 4), (128, 1), (128, 4)])
def test_one_shape_serves_batches_of_other_rows_and_reach(
    block_m: int, pieces: int, kv_dtype: torch.dtype, triton_device: str
) -> None:
    from kernels.sparse_prefill.captured import LaunchShape, LaunchTables, sparse_prefill

    shape = LaunchShape(10, 3, GROUP, TileConfig(block_m, 16, 4, 2), pieces)
    for positions in ([[90]], [[0, 3, 290, 291]], [list(range(40, 50))], [[0, 3, 70], [17], [5, 40, 41, 42]]):
        batch, rows = Batch(positions, heads=HEADS, kv_dtype=kv_dtype), sum(map(len, positions))
        q, own = torch.zeros(10, HEADS, 16), torch.zeros(10, dtype=torch.int64)
        q[:rows], own[:rows] = batch.q, torch.cat([sequence.positions for sequence in batch.sequences])
        blocks = torch.cat([sequence.block_ids for sequence in batch.sequences])
        tables = (*map(torch.from_numpy, filled(shape, batch.sequences)), own, blocks)
        launch = LaunchTables(*(table.to(triton_device) for table in tables))
        pool = batch.pool.to(triton_device)
        actual = sparse_prefill(q.to(triton_device), PoolLayer(pool, 1, batch.geometry), shape, launch, SCALE)
        expected = naive.sparse_prefill(batch.q, PoolLayer(batch.pool, 1, batch.geometry), batch.sequences, SCALE)
        assert_same(actual[:rows], expected)


@pytest.mark.parametrize(
    ("words", "used"), [(1, 1), (7, 3), (511, 511), (512, 512), (513, 512), (1300, 513), (1300, 1), (4097, 4097)]
)
def test_the_words_in_use_are_copied_from_pinned_memory_and_no_others(
    words: int, used: int, triton_device: str
) -> None:
    from kernels.sparse_prefill.captured import read_pinned

    values = torch.randint(-(1 << 62), 1 << 62, (words,), generator=torch.Generator().manual_seed(words))
    source = values.pin_memory() if triton_device == "cuda" else values
    source[0] = used
    # Longer than the source, so that a word written behind it shows.
    target = torch.full((words + 600,), -7, dtype=torch.int64)
    expected, actual = target.clone(), target.to(triton_device)
    naive.read_pinned(source, expected)
    read_pinned(source, actual)
    assert torch.equal(actual.cpu(), expected)
