"""The plan of a launch: every packed row in one tile, every token that it sees in one item."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sparse_prefill.tiles import TileConfig, attention_work, cut_rows, longest_part
from tests.kernels.builders import rows_at

CONFIG = TileConfig(16, 16, 4, 2)


def batch_of(*positions):
    first_rows = [sum(map(len, positions[:at])) for at in range(len(positions))]
    return tuple(rows_at(first, own, range(own[-1] // 4 + 1)) for first, own in zip(first_rows, positions, strict=True))


@settings(max_examples=60)
@given(
    positions=st.lists(st.sets(st.integers(0, 600), min_size=1, max_size=40).map(sorted), min_size=1, max_size=4),
    group=st.integers(1, 8),
    piece=st.sampled_from([None, 16, 64, 512]),
    window=st.one_of(st.none(), st.integers(1, 400)),
    processors=st.sampled_from([1, 4, 132]),
)
def test_every_row_and_every_token_that_it_sees_is_covered_once(positions, group, piece, window, processors):
    sequences = batch_of(*positions)
    work = attention_work(sequences, group, 2, CONFIG, processors, piece, window)
    covered, slots = Counter(), {}
    for first_row, begin, end, first_block, kv_begin, kv_end, slot in work.items.tolist():
        (index,) = (index for index, own in enumerate(sequences) if own.first_row == first_row)
        assert first_block == sum(own.block_ids.shape[0] for own in sequences[:index])
        assert (0 < end - begin <= 16, kv_begin % 16) == (True, 0)
        covered.update((index, row, token) for row in range(begin, end) for token in range(kv_begin, kv_end))
        if slot >= 0:
            slots[slot] = (first_row, begin, end)
    assert set(covered.values()) == {1}
    for index, own in enumerate(positions):
        for row in range(len(own) * group):
            last = own[row // group]
            first = 0 if window is None else max(0, last - window + 1)
            assert all((index, row, token) in covered for token in range(first, last + 1))
    joined = {slot: tile for *tile, first, count in work.tiles.tolist() for slot in range(first, first + count)}
    assert {slot: tuple(tile) for slot, tile in joined.items()} == slots
    assert sorted(slots) == list(range(work.slots))


@pytest.mark.promise("engines", "With windows and sinks attention is...")
def test_rows_whose_windows_leave_out_tokens_share_no_tile():
    sequences = batch_of([0, 1, 2, 10, 14, 15, 90, 94], [7])
    table, begins, ends = cut_rows(sequences, 2, 64, 8)
    assert table[:, 1:3].tolist() == [[0, 12], [12, 16], [0, 2]]
    assert (begins.tolist(), ends.tolist()) == ([0, 83, 0], [16, 95, 8])
    assert (longest_part(sequences, 8), longest_part(sequences, None)) == (6, 8)


@pytest.mark.parametrize("piece", [0, -16, 24])
def test_pieces_are_whole_tiles(piece):
    with pytest.raises(ValueError, match="it must be a multiple of block_n, 16"):
        attention_work(batch_of([5]), 1, 1, CONFIG, 4, piece)
