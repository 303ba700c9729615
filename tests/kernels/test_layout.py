"""The pool's layout is TensorRT-LLM's HND, and geometry errors name the tensor and its bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.layout import ContiguousKv, KvGeometry, LayeredPool, PagedKv, layer_view, pool_view


@pytest.mark.known_defect(27)
def test_pool_view_follows_the_offset_formula_of_tensorrt_llm() -> None:
    geometry = KvGeometry(num_layers=2, kv_heads=3, head_dim=4, block_size=5)
    pool = torch.arange(7 * 2 * 2 * geometry.row_elements, dtype=torch.float32).view(7, 2, 2, -1)
    view = pool_view(pool, geometry)
    for block, layer, kind, head, slot, channel in [(0, 0, 0, 0, 0, 0), (6, 1, 1, 2, 4, 3), (3, 0, 1, 1, 2, 2)]:
        offset = (head * geometry.block_size + slot) * geometry.head_dim + channel
        assert view[block, layer, kind, head, slot, channel] == pool[block, layer, kind, offset]
    assert view.data_ptr() == pool.data_ptr()


def test_pool_view_of_some_of_a_pools_layers_is_no_copy() -> None:
    geometry = KvGeometry(num_layers=2, kv_heads=1, head_dim=4, block_size=2)
    pool = torch.zeros(3, 5, 2, 8)
    pool_view(pool[:, 1:3], geometry)[2, 1, 0, 0, 1, 3] = 9
    assert pool[2, 2, 0, 7] == 9


@pytest.mark.parametrize("apart", [False, True])
def test_layers_and_kinds_are_no_copies(apart: bool) -> None:
    geometry = KvGeometry(num_layers=3, kv_heads=2, head_dim=4, block_size=2)
    planes = [[torch.zeros(5, 2, 2, 4) for _ in range(3)] for _ in range(3)]
    keys, values, beside = (LayeredPool(tuple(kind)) if apart else torch.zeros(5, 3, 1, 16) for kind in planes)
    pool = LayeredPool(keys.keys, values.keys) if apart else torch.zeros(5, 3, 2, 16)
    kv = PagedKv(pool, torch.tensor([4, 1]), geometry, beside)
    some, one = kv.layers(1, 3), KvGeometry(2, 2, 4, 2, kv_factor=1)
    for number, part in enumerate((some.kind(0), some.kind(1), some.beside()), start=1):
        assert part is not None
        assert (part.keys, part.block_ids, part.geometry) == (None, kv.block_ids, one)
        layer_view(part.pool, one, 1, 0).fill_(number)
    for layer, numbers in ((1, [0, 0, 0]), (2, [1, 2, 3])):
        held = [layer_view(pool, geometry, layer, kind) for kind in (0, 1)]
        held.append(layer_view(beside, replace(geometry, kv_factor=1), layer, 0))
        assert [each.unique().tolist() for each in held] == [[number] for number in numbers]
    assert kv.kind(0).beside() is None
    assert PagedKv(pool, kv.block_ids, geometry).layers(0, 1).beside() is None


def test_layers_and_kinds_of_a_donor_are_no_copies() -> None:
    donor = ContiguousKv(torch.zeros(3, 2, 2, 5, 4))
    for kind in (0, 1):
        part = donor.layers(1, 3).kind(kind)
        assert part.tensor.shape == (2, 1, 2, 5, 4)
        part.tensor.fill_(kind + 1)
    assert donor.tensor[:, :, 0, 0, 0].tolist() == [[0, 0], [1, 2], [1, 2]]


def test_sizes() -> None:
    geometry = KvGeometry(num_layers=3, kv_heads=2, head_dim=8, block_size=4)
    assert geometry.row_elements == 64
    assert geometry.bytes_per_token(torch.bfloat16) == 3 * 2 * 2 * 8 * 2
    latent = KvGeometry(num_layers=3, kv_heads=1, head_dim=8, block_size=4, kv_factor=1)
    assert latent.bytes_per_token(torch.float8_e4m3fn) == 3 * 8
    assert pool_view(torch.empty(5, 3, 1, 32), latent).shape == (5, 3, 1, 1, 4, 8)
    assert [geometry.blocks_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert PagedKv(torch.empty(9, 3, 2, 64), torch.tensor([1, 2]), geometry).capacity == 8
    assert ContiguousKv(torch.empty(3, 2, 2, 11, 8)).capacity == 11


@pytest.mark.parametrize("name", ["num_layers", "kv_heads", "head_dim", "block_size"])
def test_sizes_below_one_are_refused(name: str) -> None:
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
        (torch.empty(4, 2, 1, 64), "is needed"),
        (torch.empty(4, 2, 2, 64, dtype=torch.int8), "int8"),
        (torch.empty(4, 2, 2, 128)[..., ::2], "stride 2"),
    ],
)
def test_a_pool_of_another_layout_is_refused(pool: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool_view(pool, KvGeometry(num_layers=2, kv_heads=2, head_dim=8, block_size=4))
