"""Layers moved a few at a time are those of one plain move; nothing else is written.

Every test that takes `device` runs twice: through torch on the CPU, and through Triton, compiled where there is a CUDA
device and interpreted where there is none.
"""

from __future__ import annotations

import math

import pytest
import torch

from kernels.kv_move import LayerMoves, Move, naive
from kernels.layout import ContiguousKv, KvGeometry, PagedKv
from kernels.rope import RopeRotation

ROTATION = RopeRotation((1.0, 0.1, 0.01, 0.001), 8)
LAYERS, TOKENS = 5, 11


def donor_in_blocks(dtype: torch.dtype, device: str) -> PagedKv:
    geometry = KvGeometry(LAYERS, kv_heads=3, head_dim=8, block_size=4)
    values = torch.randn(9, LAYERS, 2, geometry.row_elements, generator=torch.Generator().manual_seed(1))
    return PagedKv(values.to(dtype).to(device), torch.tensor([6, 1, 8, 3]), geometry)


def donor_in_a_row(dtype: torch.dtype, device: str) -> ContiguousKv:
    values = torch.randn(LAYERS, 2, 3, 13, 8, generator=torch.Generator().manual_seed(2))
    return ContiguousKv(values.to(dtype).to(device))


def empty(dtype: torch.dtype, device: str, layers: int) -> torch.Tensor:
    return torch.full((layers, 2, 3, TOKENS, 8), math.nan, dtype=dtype, device=device)


def moves_from(paged: PagedKv, contiguous: ContiguousKv) -> list[Move]:
    return [Move(paged, 5, 0, 6, turn=0), Move(contiguous, 2, 7, 3), Move(contiguous, 9, 6, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [2, 5])
def test_any_layers_are_those_of_one_move(at_once: int, dtype: torch.dtype, device: str) -> None:
    expected = empty(dtype, "cpu", LAYERS)
    moves = moves_from(donor_in_blocks(dtype, "cpu"), donor_in_a_row(dtype, "cpu"))
    naive.kv_move(moves, ContiguousKv(expected), ROTATION)
    target = empty(dtype, device, at_once)
    placed = moves_from(donor_in_blocks(dtype, device), donor_in_a_row(dtype, device))
    some = LayerMoves(placed, ContiguousKv(target), ROTATION)
    for first in range(0, LAYERS, at_once):
        layers = range(first, min(first + at_once, LAYERS))
        target.fill_(math.nan)
        some.make(layers)
        torch.testing.assert_close(
            target[: len(layers)].cpu(), expected[layers.start : layers.stop], atol=1e-2, rtol=1e-2, equal_nan=True
        )
        assert target[len(layers) :].isnan().all()


def test_what_does_not_turn_is_moved_bit_for_bit_into_blocks_as_well(device: str) -> None:
    source = donor_in_a_row(torch.bfloat16, device)
    blocks = donor_in_blocks(torch.bfloat16, device).layers(0, 2)
    blocks.pool.fill_(math.nan)
    some = LayerMoves([Move(source, 3, 4, 9, turn=0)], blocks, ROTATION)
    for first in range(LAYERS - 1):
        some.make(range(first, first + 2))
        naive_blocks = PagedKv(
            torch.full_like(blocks.pool, math.nan).cpu().contiguous(), blocks.block_ids, blocks.geometry
        )
        part = ContiguousKv(source.tensor[first : first + 2].cpu())
        naive.kv_move([Move(part, 3, 4, 9, turn=0)], naive_blocks, ROTATION)
        torch.testing.assert_close(blocks.pool.cpu(), naive_blocks.pool, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("layers", [range(4, 6), range(-1, 1), range(3)])
def test_layers_that_are_not_there_are_refused_before_anything_is_written(layers: range, device: str) -> None:
    target = empty(torch.float32, device, 2)
    some = LayerMoves([Move(donor_in_a_row(torch.float32, device), 0, 0, 4)], ContiguousKv(target), ROTATION)
    with pytest.raises(
        ValueError, match=f"layers {layers.start}..{layers.stop - 1} cannot be moved: the sources have 5"
    ):
        some.make(layers)
    assert target.isnan().all()


def test_a_source_of_fewer_layers_than_go_at_once_is_refused() -> None:
    donor = donor_in_a_row(torch.float32, "cpu")
    for source in (donor.layers(0, 2), donor_in_blocks(torch.float32, "cpu").layers(0, 2)):
        with pytest.raises(ValueError, match="layers"):
            LayerMoves([Move(source, 0, 0, 4)], ContiguousKv(empty(torch.float32, "cpu", 3)), ROTATION)


def test_no_moves_write_nothing() -> None:
    target = empty(torch.float32, "cpu", 2)
    LayerMoves([], ContiguousKv(target), ROTATION).make(range(0))
    assert target.isnan().all()
