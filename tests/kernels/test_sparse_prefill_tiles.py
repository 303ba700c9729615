"""The plan of a launch: every packed row in one tile, every token of its KV in one item."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sparse_prefill import SequenceRows
from kernels.sparse_prefill.tiles import (
    MIN_PIECE,
    TileConfig,
    attention_work,
    batch_index,
    choose_piece,
    cut_rows,
    row_tiles,
)

PROCESSORS = 132


def batch_of(*positions: list[int]) -> tuple[SequenceRows, ...]:
    first_rows = np.cumsum([0, *(len(own) for own in positions)])
    return tuple(
        SequenceRows(int(first), torch.tensor(own), torch.arange(own[-1] // 4 + 1))
        for first, own in zip(first_rows, positions, strict=False)
    )


@settings(max_examples=60, deadline=None)
@given(
    positions=st.lists(st.sets(st.integers(0, 300), min_size=1, max_size=40).map(sorted), min_size=1, max_size=4),
    group=st.integers(1, 8),
    piece=st.sampled_from([None, 16, 64, 512]),
)
def test_every_row_and_every_token_is_covered_once(positions: list[list[int]], group: int, piece: int | None) -> None:
    sequences = batch_of(*positions)
    work = attention_work(sequences, group, 2, TileConfig(16, 16, 4, 2), PROCESSORS, piece)
    covered = {}
    slots = set()
    for first_row, begin, end, first_block, kv_begin, slot in work.items.tolist():
        slots.add(slot)
        (index,) = (index for index, own in enumerate(sequences) if own.first_row == first_row)
        assert first_block == sum(own.block_ids.shape[0] for own in sequences[:index])
        assert 0 < end - begin <= 16
        for packed in range(begin, end):
            for token in range(kv_begin, min(kv_begin + work.piece, positions[index][(end - 1) // group] + 1)):
                assert (index, packed, token) not in covered
                covered[index, packed, token] = slot
    for index, own in enumerate(positions):
        for packed in range(len(own) * group):
            assert all((index, packed, token) in covered for token in range(own[packed // group] + 1))
    assert slots == set(range(len(work.items)))
    ends = [first + count for first, count in work.tiles[:, 3:].tolist()]
    assert ends == [*work.tiles[1:, 3].tolist(), len(work.items)]
    assert work.split == bool((work.tiles[:, 4] > 1).any())
    assert work.piece % 16 == 0


def test_the_heaviest_items_come_first() -> None:
    work = attention_work(batch_of(list(range(100)), [399]), 1, 1, TileConfig(16, 16, 4, 2), 1)
    assert not work.split
    assert work.items[:, 0].tolist() == [100] + [0] * 7
    assert work.items[1:, 1].tolist() == list(range(96, -1, -16))


def test_one_plan_serves_all_layers() -> None:
    sequences = batch_of([0, 3, 9], [5])
    config = TileConfig(16, 16, 4, 2)
    assert attention_work(sequences, 2, 2, config, 4) is attention_work(sequences, 2, 2, config, 4)
    assert batch_index(sequences) is batch_index(sequences)
    assert row_tiles(sequences, 16) is row_tiles(sequences, 16)
    assert attention_work(sequences[:1], 2, 2, config, 4) is not attention_work(sequences, 2, 2, config, 4)


def test_a_single_sequence_lends_its_own_index_tensors() -> None:
    (rows,) = batch_of([2, 4, 7])
    index = batch_index((rows,))
    assert index.positions is rows.positions
    assert index.block_ids is rows.block_ids


def test_rows_are_cut_where_sequences_end() -> None:
    table, reach = cut_rows(batch_of([0, 1, 2, 30], [7]), 3, 8)
    assert table.tolist() == [[0, 0, 8, 0], [0, 8, 12, 0], [4, 0, 3, 8]]
    assert reach.tolist() == [3, 31, 8]


@pytest.mark.parametrize(("tokens", "tile"), [(8192, 128), (24576, 128), (32768, 128), (24576, 64)])
def test_dense_prefill_is_not_split(tokens: int, tile: int) -> None:
    reach = np.minimum((np.arange(0, tokens * 7, tile) + tile) // 7 + 1, tokens)
    assert choose_piece(reach, 4, PROCESSORS, 64) == tokens


@pytest.mark.parametrize("tiles", [1, 7, 14])
def test_few_rows_over_long_kv_are_split_to_fill_the_card(tiles: int) -> None:
    reach = np.full(tiles, 24576)
    piece = choose_piece(reach, 4, PROCESSORS, 64)
    assert piece >= MIN_PIECE
    assert piece % 64 == 0
    programs = int((-(-reach // piece)).sum()) * 4
    assert programs >= 0.75 * PROCESSORS
    assert -(-programs // PROCESSORS) * piece <= 1.35 * max(reach.sum() * 4 / PROCESSORS, MIN_PIECE)


def test_short_kv_is_not_split() -> None:
    assert choose_piece(np.full(3, 200), 4, PROCESSORS, 64) == 256


@pytest.mark.parametrize("piece", [0, -16, 24])
def test_pieces_are_whole_tiles(piece: int) -> None:
    with pytest.raises(ValueError, match="it must be a multiple of block_n, 16"):
        attention_work(batch_of([5]), 1, 1, TileConfig(16, 16, 4, 2), PROCESSORS, piece)
