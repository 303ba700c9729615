"""A pool of the model's KV is known by its shape, dtype and strides, and anything else is none."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.layout import KvGeometry, LayeredPool
from semblend_trt.pool_facts import geometry_of, needs_scales

LAYERS, KV_HEADS, HEAD_DIM, BLOCK = 3, 2, 16, 8
ROW = KV_HEADS * HEAD_DIM * BLOCK
SIZES = KvGeometry(LAYERS, KV_HEADS, HEAD_DIM, 1)


@pytest.mark.parametrize(("dtype", "is_scaled"), [(torch.bfloat16, False), (torch.float8_e4m3fn, True)])
def test_one_tensor_in_fp8_needs_scales(dtype, is_scaled):
    whole = torch.zeros(4, LAYERS + 2, 2, ROW, dtype=dtype)
    for pool in (torch.zeros(4, LAYERS, 2, ROW, dtype=dtype), whole[:, 1 : 1 + LAYERS], whole[::2, :LAYERS]):
        assert geometry_of(pool, SIZES) == KvGeometry(LAYERS, KV_HEADS, HEAD_DIM, BLOCK)
        assert needs_scales(pool) == is_scaled
    apart = torch.zeros(LAYERS, 4, KV_HEADS, BLOCK, HEAD_DIM, dtype=dtype).unbind()
    assert not needs_scales(LayeredPool(apart, apart))


@pytest.mark.parametrize(
    "pool",
    [
        *(None, "pool", [[[[0.0]]]], torch.zeros(0, LAYERS, 2, ROW), torch.zeros(4, LAYERS, 2, 0)),
        torch.zeros(4, LAYERS, 2, ROW, device="meta"),
        *(torch.zeros(4, LAYERS, 2, ROW, dtype=dtype) for dtype in (torch.float64, torch.float8_e5m2)),
        torch.zeros(1, LAYERS, 2, ROW).expand(4, LAYERS, 2, ROW),
        torch.zeros(4, 1, 2, ROW).expand(4, LAYERS, 2, ROW),
        torch.zeros(8 * ROW).as_strided((4, LAYERS, 2, ROW), (ROW, ROW, ROW, 1)),
        torch.zeros(ROW, LAYERS, 2, 4).permute(3, 1, 2, 0),
        torch.zeros(4, LAYERS, 2, 2 * ROW)[..., ::2],
    ],
)
def test_what_is_no_pool(pool):
    assert geometry_of(pool, SIZES) is None


@given(st.lists(st.integers(0, 3 * ROW), min_size=3, max_size=3), st.integers(1, 2))
def test_strides_that_are_taken_name_no_place_twice(strides, row_stride):
    shape, strides = (3, LAYERS, 2, ROW), (*strides, row_stride)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    pool = torch.arange(reach, dtype=torch.float32).as_strided(shape, strides)
    if geometry_of(pool, SIZES) is not None:
        assert pool.unique().numel() == pool.numel()
