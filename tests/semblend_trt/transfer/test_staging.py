"""For every size of slots, staged copies place and fetch what one plain move would; nothing else is written."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_move import Move, kv_move
from kernels.layout import ContiguousKv, KvGeometry, PagedKv
from kernels.rope import RopeRotation
from semblend_trt.donors.store import HostKv
from semblend_trt.errors import ConfigurationError
from semblend_trt.transfer.staging import HostReader, HostWriter, Staging
from tests.semblend_trt.held_donors import whole

GEOMETRY = KvGeometry(num_layers=5, kv_heads=2, head_dim=8, block_size=4)
ROTATION = RopeRotation((1.0, 0.1, 0.01, 0.001), 8)
ROW_BYTES = 2 * 2 * 8 * 4  # one token of one layer, float32
CPU = torch.device("cpu")
DEVICES = [CPU] + [torch.device("cuda")] * torch.cuda.is_available()
MOVES = ((0, 3, 9, 11), (1, 0, 21, 5), (0, 13, 40, 1), (1, 9, 27, 4))  # donor, its start, the target's, length


def host_donor(tokens, seed, device=CPU):
    """A donor in host memory that `device` may read."""
    memory = torch.randn(5, tokens, 2, 2, 8, generator=torch.Generator().manual_seed(seed))
    return ContiguousKv((memory if device.type == "cpu" else memory.pin_memory()).permute(0, 2, 3, 1, 4))


def empty_target(device=CPU):
    pool = torch.full((20, 5, 2, GEOMETRY.row_elements), math.nan, device=device)
    return PagedKv(pool, torch.tensor([7, 2, 9, 0, 4, 6, 13, 1, 19, 3, 11]), GEOMETRY)


def staging(tokens, slots=2, device=CPU):
    return Staging(tokens * slots * ROW_BYTES, slots, GEOMETRY, torch.float32, device)


@settings(max_examples=40)
@given(room=st.integers(1, 60), layers=st.integers(1, 5), slots=st.integers(1, 3), data=st.data())
def test_staged_spans_are_those_of_one_plain_move(room, layers, slots, data):
    donors = [host_donor(14, 1), host_donor(13, 2)]
    chosen = data.draw(st.lists(st.sampled_from(MOVES), min_size=1, unique=True))
    moves = [Move(donors[donor], *place) for donor, *place in chosen]
    expected, target = empty_target(), empty_target()
    kv_move(moves, expected, ROTATION)
    reader = HostReader(CPU, ROTATION, staging(room * layers, slots))
    layers = reader.layers_at_once(layers, room)
    place = reader.placing(moves, target, layers)
    for first in range(0, 5, layers):
        place(first, min(first + layers, 5))
    torch.testing.assert_close(target.pool, expected.pool, atol=0, rtol=0, equal_nan=True)


@settings(max_examples=30)
@given(capacity=st.one_of(st.none(), st.integers(1, 130)), tokens=st.integers(1, 23), first=st.integers(1, 23))
def test_fetched_rows_are_bit_for_bit_those_of_the_blocks(capacity, tokens, first):
    source = PagedKv(torch.randn(8, 5, 2, GEOMETRY.row_elements), torch.tensor([5, 0, 3, 7, 1, 2]), GEOMETRY)
    sizes = [first, tokens - first] if first < tokens else [tokens]
    parts = [torch.full((5, size, 2, 2, 8), math.nan).permute(0, 2, 3, 1, 4) for size in sizes]
    held = HostKv(tuple(map(ContiguousKv, parts)))
    expected = torch.full((5, 2, 2, tokens, 8), math.nan)
    HostWriter(ROTATION, None if capacity is None else staging(capacity, 1)).copy(source, tokens, held)
    kv_move([Move(source, 0, 0, tokens)], ContiguousKv(expected), ROTATION)
    assert torch.equal(whole(held), expected)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@settings(max_examples=30)
@given(capacity=st.one_of(st.none(), st.integers(1, 130)), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_promoted_rows_are_bit_for_bit_those_of_the_host_and_nothing_else_is_written(device, capacity, sizes):
    held = HostKv(tuple(host_donor(size, seed, device) for seed, size in enumerate(sizes)))
    expected, target = empty_target(device), empty_target(device)
    kv_move([Move(ContiguousKv(whole(held).to(device)), 0, 0, held.capacity)], expected, ROTATION)
    HostWriter(ROTATION, None if capacity is None else staging(capacity, 1, device)).copy_up(held, target)
    torch.testing.assert_close(target.pool, expected.pool, atol=0, rtol=0, equal_nan=True)


def test_staging_without_room_for_a_token_is_refused():
    with pytest.raises(ConfigurationError, match="raise SEMBLEND_STAGING_BYTES"):
        Staging(3 * ROW_BYTES - 1, 3, GEOMETRY, torch.float32, CPU)
