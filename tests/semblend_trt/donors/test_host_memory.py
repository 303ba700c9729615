"""One block of memory is given out without overlap, and all of it can be had again."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.donors.host_memory import HostMemory
from semblend_trt.errors import CapacityError, ConfigurationError

ROW = 48


@given(rows=st.integers(0, 20), steps=st.lists(st.integers(-6, 9), max_size=40))
def test_every_free_row_can_be_had_and_none_twice(rows, steps):
    """A positive step takes so many rows, any other gives back what was taken first."""
    memory, held = HostMemory(rows * ROW, lock=False), []
    for step in steps:
        used = sum(part.size for ranges in held for part in ranges)
        if step <= 0:
            if held:
                memory.give_back(held.pop(0))
        elif step * ROW > rows * ROW - used:
            with pytest.raises(CapacityError, match="raise SEMBLEND_HOST_BYTES"):
                memory.take(step, ROW)
        else:
            held.append(memory.take(step, ROW))
            assert sum(part.size for part in held[-1]) == step * ROW
        bounds = sorted(part for ranges in held for part in ranges)
        assert all(part.start % ROW == part.size % ROW == 0 and 0 <= part.start < part.end for part in bounds)
        assert all(left.end <= right.start for left, right in pairwise(bounds))
        assert sum(hole.size for hole in memory._holes) == rows * ROW - sum(part.size for part in bounds)
    for ranges in held:
        memory.give_back(ranges)
    if rows:
        assert len(memory.take(rows, ROW)) == 1


def test_the_smallest_hole_that_fits_is_taken_first():
    memory = HostMemory(10 * ROW, lock=False)
    ranges = [memory.take(rows, ROW) for rows in (4, 1, 2, 1, 2)]
    memory.give_back(ranges[0])
    memory.give_back(ranges[2])
    assert memory.take(2, ROW) == ranges[2]
    assert memory.take(3, ROW) == [(0, 3 * ROW)]


def test_views_show_the_bytes_of_their_range():
    memory = HostMemory(4 * ROW, lock=False)
    (first,), (second,) = memory.take(1, ROW), memory.take(3, ROW)
    memory.view(second, (3, 6, 2), torch.float32).fill_(7)
    memory.view(first, (24,), torch.bfloat16).fill_(1)
    assert memory.view(second, (36,), torch.float32).eq(7).all()


def test_more_memory_than_there_is_cannot_be_locked():
    with pytest.raises(ConfigurationError, match="lower it"):
        HostMemory(1 << 60, lock=True)
