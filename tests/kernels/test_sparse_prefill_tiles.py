"""The plan of a launch: every packed row in one tile, every token of its KV in one item."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sparse_prefill import tiles
from kernels.sparse_prefill.tiles import PIECE_OVERHEAD, TileConfig, attention_work, balanced_pieces, cut_rows
from tests.kernels.builders import rows_at

PROCESSORS = 132
# Programs of one of 4 KV heads that run at a time, two a multiprocessor.
PROGRAMS = 66


def batch_of(*positions):
    first_rows = np.cumsum([0, *map(len, positions)]).tolist()
    return tuple(
        rows_at(first, own, range(own[-1] // 4 + 1)) for first, own in zip(first_rows, positions, strict=False)
    )


@settings(max_examples=60)
@given(
    positions=st.lists(st.sets(st.integers(0, 300), min_size=1, max_size=40).map(sorted), min_size=1, max_size=4),
    group=st.integers(1, 8),
    piece=st.sampled_from([None, 16, 64, 512]),
    window=st.one_of(st.none(), st.integers(1, 400)),
)
def test_every_row_and_every_token_that_it_sees_is_covered_once(positions, group, piece, window):
    sequences = batch_of(*positions)
    work = attention_work(sequences, group, 2, TileConfig(16, 16, 4, 2), PROCESSORS, piece, window)

    def first_of(position):
        return 0 if window is None else max(0, position - window + 1)

    covered = set()
    slots = {}
    for first_row, begin, end, first_block, kv_begin, kv_end, slot in work.items.tolist():
        (index,) = (index for index, own in enumerate(sequences) if own.first_row == first_row)
        assert first_block == sum(own.block_ids.shape[0] for own in sequences[:index])
        assert 0 < end - begin <= 16
        assert kv_begin % 16 == 0
        for packed in range(begin, end):
            for token in range(kv_begin, kv_end):
                assert (index, packed, token) not in covered
                covered.add((index, packed, token))
        own = positions[index][begin // group : (end - 1) // group + 1]
        # Nothing is read that no row of the tile sees, but what fills the first tile of KV.
        assert all(
            any(first_of(p) <= token <= p for p in own) for token in range(max(kv_begin, first_of(own[0])), kv_end)
        )
        assert kv_begin > first_of(own[0]) - 16
        if slot < 0:
            assert (kv_begin, kv_end) == (first_of(own[0]) // 16 * 16, own[-1] + 1)
        else:
            slots[slot] = (first_row, begin, end)
    for index, own in enumerate(positions):
        for packed in range(len(own) * group):
            last = own[packed // group]
            assert all((index, packed, token) in covered for token in range(first_of(last), last + 1))
    assert sorted(slots) == list(range(work.slots))
    joined = [
        (slot, (first_row, begin, end))
        for first_row, begin, end, first_slot, count in work.tiles.tolist()
        for slot in range(first_slot, first_slot + count)
    ]
    assert joined == sorted(slots.items())


def test_the_heaviest_items_come_first():
    work = attention_work(batch_of(list(range(100)), [399]), 1, 1, TileConfig(16, 16, 4, 2), 1)
    assert not work.slots
    assert work.items[:, 0].tolist() == [100] + [0] * 7
    assert work.items[1:, 2].tolist() == list(range(100, 0, -16))


@pytest.mark.promise("engines", "With windows and sinks attention is...")
def test_rows_whose_windows_leave_out_tokens_share_no_tile():
    sequences = batch_of([0, 1, 2, 10, 14, 15, 90, 94], [7])
    table, begins, ends = cut_rows(sequences, 2, 64, 8)
    assert table[:, 1:3].tolist() == [[0, 12], [12, 16], [0, 2]]
    assert (begins.tolist(), ends.tolist()) == ([0, 83, 0], [16, 95, 8])
    assert tiles.longest_part(sequences, 8) == 6
    assert tiles.longest_part(sequences, None) == 8
    table, begins, ends = cut_rows(sequences, 1, 64, 1)
    # A window of one token: neighbours still share a tile.
    assert table[:, 1:3].tolist() == [[0, 3], [3, 4], [4, 6], [6, 7], [7, 8], [0, 1]]
    assert begins.tolist() == [0, 10, 14, 90, 94, 7]


def end_of(pieces, programs):
    """When the last program ends that takes the heaviest piece left, in tokens of KV."""
    free = [0] * programs
    for tokens in sorted((pieces[:, 2] - pieces[:, 1]).tolist(), reverse=True):
        heapq.heapreplace(free, free[0] + tokens + PIECE_OVERHEAD)
    return max(free)


@pytest.mark.parametrize("tiles", [1, 7, 14, 67, 100, 135, 336])
@pytest.mark.parametrize("kind", ["same", "spread", "random"])
def test_programs_end_together(tiles, kind):
    reach = {
        "same": np.full(tiles, 24576),
        "spread": np.linspace(24576 / tiles, 24576, tiles).astype(int),
        "random": np.random.default_rng(tiles).integers(1, 24576, tiles),
    }[kind]
    pieces = balanced_pieces(reach, PROGRAMS, 64)
    assert (pieces[:, 1] % 64 == 0).all()
    assert end_of(pieces, PROGRAMS) <= 1.2 * reach.sum() / PROGRAMS + 3 * PIECE_OVERHEAD


@pytest.mark.parametrize("piece", [0, -16, 24])
def test_pieces_are_whole_tiles(piece):
    with pytest.raises(ValueError, match="it must be a multiple of block_n, 16"):
        attention_work(batch_of([5]), 1, 1, TileConfig(16, 16, 4, 2), PROCESSORS, piece)
