"""A donor in parts reads like one tensor."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.layout import ContiguousKv
from semblend_trt.donors.host_kv import HostKv


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_pieces_and_the_whole_hold_the_same_tokens(sizes, data):
    whole = torch.randn(2, 2, 1, sum(sizes), 4, generator=torch.Generator().manual_seed(1))
    held = HostKv(tuple(map(ContiguousKv, whole.split(sizes, dim=3))))
    assert held.capacity == whole.shape[3]
    assert torch.equal(held.tensor, whole)
    start = data.draw(st.integers(0, held.capacity - 1))
    length = data.draw(st.integers(1, held.capacity - start))
    pieces = [part.tensor[:, :, :, first : first + count] for part, first, count in held.pieces(start, length)]
    assert torch.equal(torch.cat(pieces, dim=3), whole[:, :, :, start : start + length])


def test_a_single_part_is_not_copied():
    tensor = torch.zeros(2, 2, 1, 3, 4)
    assert HostKv((ContiguousKv(tensor),)).tensor is tensor
