"""The pool's layout is TensorRT-LLM's HND, and geometry errors name the tensor and its bound."""

import pytest
import torch

from kernels.layout import ContiguousKv, KvGeometry, PagedKv, pool_view


@pytest.mark.known_defect(27)
def test_pool_view_follows_the_offset_formula_of_tensorrt_llm():
    geometry = KvGeometry(num_layers=2, kv_heads=3, head_dim=4, block_size=5)
    pool = torch.arange(7 * 2 * 2 * geometry.row_elements, dtype=torch.float32).view(7, 2, 2, -1)
    view = pool_view(pool, geometry)
    for block, layer, kind, head, slot, channel in [(0, 0, 0, 0, 0, 0), (6, 1, 1, 2, 4, 3), (3, 0, 1, 1, 2, 2)]:
        offset = (head * geometry.block_size + slot) * geometry.head_dim + channel
        assert view[block, layer, kind, head, slot, channel] == pool[block, layer, kind, offset]
    assert view.data_ptr() == pool.data_ptr()


def test_sizes():
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
def test_sizes_below_one_are_refused(name):
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
def test_a_pool_of_another_layout_is_refused(pool, message):
    with pytest.raises(ValueError, match=message):
        pool_view(pool, KvGeometry(num_layers=2, kv_heads=2, head_dim=8, block_size=4))
