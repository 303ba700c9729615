"""Pools whose layers lie apart, in every layout that vLLM has: the same values go where the plain form puts them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.deviation import deviation
from kernels.kv_move import LayerMoves, Move, kv_move, naive
from kernels.layout import ContiguousKv, KvGeometry, LayeredPool, PagedKv, check_pool, layer_view
from kernels.rope import RopeRotation

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 3, 2, 8, 4, 9
GEOMETRY = KvGeometry(LAYERS, HEADS, DIM, BLOCK)
ROTATION = RopeRotation(tuple(1e4 ** (-2 * i / DIM) for i in range(DIM // 2)), DIM)
Views = tuple[torch.Tensor, torch.Tensor]


def nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, math.nan)


def blocks_kv_tokens_heads() -> Views:
    cache = nan(BLOCKS, 2, BLOCK, HEADS, DIM)
    return cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)


def blocks_heads_tokens_kv() -> Views:
    cache = nan(BLOCKS, HEADS, BLOCK, 2 * DIM)
    return cache[..., :DIM], cache[..., DIM:]


def transposed_keys() -> Views:
    cache = nan(BLOCKS, HEADS, 2 * BLOCK, DIM)
    keys = cache[:, :, :BLOCK]
    block, head, _, _ = keys.stride()
    return torch.as_strided(keys, keys.shape, (block, head, 1, BLOCK)), cache[:, :, BLOCK:]


LAYOUTS = [blocks_kv_tokens_heads, blocks_heads_tokens_kv, transposed_keys]


def layered(layout: Callable[[], Views]) -> LayeredPool:
    keys, values = zip(*(layout() for _ in range(LAYERS)), strict=True)
    return LayeredPool(keys, values)


def donor_of(tokens: int, seed: int) -> ContiguousKv:
    generator = torch.Generator().manual_seed(seed)
    return ContiguousKv(torch.randn(LAYERS, 2, HEADS, tokens, DIM, generator=generator))


def paged(pool: LayeredPool) -> PagedKv:
    return PagedKv(pool, torch.tensor([6, 1, 8, 3, 5]), GEOMETRY)


def content(pool: LayeredPool) -> torch.Tensor:
    return torch.stack([torch.stack(pool.keys), torch.stack(pool.values)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("source_start", "target_start", "length"), [(0, 0, 1), (3, 3, 9), (1, 6, BLOCK), (7, 2, 13), (0, 19, 1)]
)
def test_moves_into_it_and_out_of_it(
    layout: Callable[[], Views], source_start: int, target_start: int, length: int, device: str
) -> None:
    actual, expected = layered(layout), layered(layout)
    moves = [Move(donor_of(20, seed=length), source_start, target_start, length)]
    kv_move(moves, paged(actual), ROTATION)
    naive.kv_move(moves, paged(expected), ROTATION)
    torch.testing.assert_close(content(actual), content(expected), rtol=1e-5, atol=1e-6, equal_nan=True)
    assert int((~content(actual).isnan()).sum()) == 2 * LAYERS * length * HEADS * DIM
    read, wanted = donor_of(20, seed=1), donor_of(20, seed=1)
    back = [Move(paged(actual), target_start, source_start, length)]
    kv_move(back, read, ROTATION)
    naive.kv_move(back, wanted, ROTATION)
    torch.testing.assert_close(read.tensor, wanted.tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_some_layers_at_a_time(layout: Callable[[], Views], device: str) -> None:
    donor, whole, parts = donor_of(17, seed=2), layered(layout), layered(layout)
    kv_move([Move(donor, 2, 5, 11)], paged(whole), ROTATION)
    for first, end in ((0, 2), (2, 3)):
        target = paged(parts).layers(first, end)
        LayerMoves([Move(donor, 2, 5, 11)], target, ROTATION).make(range(first, end))
    assert torch.equal(content(parts).nan_to_num(), content(whole).nan_to_num())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_deviation_from_it(layout: Callable[[], Views], device: str) -> None:
    pool, donor = layered(layout), donor_of(15, seed=4)
    kv_move([Move(donor, 0, 2, 15)], paged(pool), ROTATION)
    found = deviation([Move(paged(pool), 2, 0, 15)], donor, 1, ROTATION)
    assert found.shape == (2, 15)
    assert float(found.abs().max()) < 1e-5
    other = deviation([Move(paged(pool), 2, 0, 15)], donor_of(15, seed=5), 1, ROTATION)
    assert float(other.min()) > 0.1


def test_it_is_told_as_the_pool_in_one_tensor_is() -> None:
    pool = layered(transposed_keys)
    assert pool.shape == (BLOCKS, LAYERS, 2, HEADS * BLOCK * DIM)
    assert (pool.dtype, pool.device, pool.is_cuda) == (torch.float32, torch.device("cpu"), False)
    assert layer_view(pool, GEOMETRY, 1, 0) is pool.keys[1]
    assert layer_view(pool, GEOMETRY, 2, 1) is pool.values[2]


@pytest.mark.parametrize(
    "broken",
    [
        lambda pool: LayeredPool(pool.keys[1:], pool.values),
        lambda pool: pool.layers(0, 2),
        lambda pool: LayeredPool(pool.keys, (*pool.values[1:], pool.values[0][:, :1])),
        lambda pool: LayeredPool(pool.keys, (*pool.values[1:], pool.values[0].half())),
    ],
)
def test_layers_that_do_not_fit_are_refused(broken: Callable[[LayeredPool], LayeredPool]) -> None:
    pool = layered(blocks_heads_tokens_kv)
    check_pool(pool, GEOMETRY)
    with pytest.raises(ValueError, match="all of one dtype on one device, are needed"):
        check_pool(broken(pool), GEOMETRY)
