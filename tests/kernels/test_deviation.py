"""deviation against its plain form; the rest of the pools is NaN, so a row that is wrongly read shows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.deviation import FreshRows, Move, deviation, naive, relative, squares
from kernels.kv_move import kv_move
from kernels.layout import ContiguousKv, KvGeometry, PagedKv, pool_view
from kernels.rope import RopeRotation, rotate_keys

if TYPE_CHECKING:
    from kernels.deviation.spans import Fresh

BLOCK = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def rotation_of(rotary_dim: int, interleaved: bool = False, first_channel: int = 0) -> RopeRotation:
    frequencies = tuple(1e4 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2))
    return RopeRotation(frequencies, rotary_dim, interleaved, first_channel)


def contiguous(
    seed: int,
    tokens: int = 21,
    kv_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    kinds: int = 2,
) -> ContiguousKv:
    shape = (3, kinds, kv_heads, tokens, head_dim)
    return ContiguousKv(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def paged(kv: ContiguousKv, seed: int = 3) -> PagedKv:
    """The same rows in a shuffled pool; the rest of it is NaN."""
    layers, kinds, kv_heads, tokens, head_dim = kv.tensor.shape
    geometry = KvGeometry(layers, kv_heads, head_dim, BLOCK, kinds)
    blocks = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    pool = torch.full((9, layers, kinds, geometry.row_elements), math.nan).to(kv.tensor.dtype)
    view = pool_view(pool, geometry)
    for token in range(tokens):
        view[blocks[token // BLOCK], :, :, :, token % BLOCK] = kv.tensor[:, :, :, token]
    return PagedKv(pool, blocks, geometry)


def rows(kv: ContiguousKv, layer: int, first_position: int) -> FreshRows:
    """The rows as views of a wider tensor, as a fused projection makes them: K's strides are not V's."""
    k, v = (kv.tensor[layer, kind].transpose(0, 1) for kind in (0, -1))
    wide = torch.full((v.shape[0], v.shape[1] + 2, v.shape[2]), math.nan, dtype=v.dtype)
    wide[:, 2:] = v
    return FreshRows(k, wide[:, 2:] if kv.tensor.shape[1] == 2 else None, first_position)


def on(kv: Fresh, device: str) -> Fresh:
    if isinstance(kv, FreshRows):
        v = None if kv.v is None else kv.v.to(device)
        return FreshRows(kv.k.to(device), v, kv.first_position)
    if isinstance(kv, PagedKv):
        return PagedKv(kv.pool.to(device), kv.block_ids, kv.geometry)
    return ContiguousKv(kv.tensor.to(device))


def assert_matches_naive(
    spans: list[Move], fresh: Fresh, layer: int, rotation: RopeRotation, device: str, tolerance: float = 1e-5
) -> torch.Tensor:
    placed = [Move(on(span.source, device), span.source_start, span.target_start, span.length) for span in spans]
    actual = deviation(placed, on(fresh, device), layer, rotation).cpu()
    expected = naive.deviation(spans, fresh, layer, rotation)
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    assert not bool(expected.isnan().any())
    assert float((actual - expected).norm() / expected.norm()) <= tolerance
    return actual


@pytest.mark.parametrize("kinds", [1, 2])
def test_squares_of_shared_heads_add_up_to_the_deviation_over_all(kinds: int, device: str) -> None:
    donor, fresh = contiguous(seed=1, kv_heads=4, kinds=kinds), contiguous(seed=2, kv_heads=4, kinds=kinds)
    fresh.tensor[:, 0, :, 7] = donor.tensor[:, 0, :, 4]  # with a shift of 0 below, nothing of K deviates there
    parts = []
    for heads in ((0, 1), (2, 3)):
        own, theirs = (on(ContiguousKv(kv.tensor[:, :, heads]), device) for kv in (donor, fresh))
        parts.append(squares([Move(own, 2, 5, 9, turn=0)], theirs, 1, rotation_of(8)).cpu())
    assert parts[0].shape == (2, kinds, 9)
    expected = naive.deviation([Move(donor, 2, 5, 9, turn=0)], fresh, 1, rotation_of(8))
    assert float(expected[0, 2]) == 0.0
    torch.testing.assert_close(relative(parts[0] + parts[1]), expected, rtol=1e-5, atol=0)
    assert squares([], on(fresh, device), 1, rotation_of(8)).shape == (2, 2, 0)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 2])
@pytest.mark.parametrize(("source_start", "target_start"), [(3, 3), (1, 5), (6, 2)])
def test_lengths_offsets_and_layouts(length: int, source_start: int, target_start: int, device: str) -> None:
    donor, fresh = contiguous(seed=1), contiguous(seed=2)
    move = [Move(donor, source_start, target_start, length)]
    assert_matches_naive(move, paged(fresh), 1, rotation_of(8), device)
    move = [Move(paged(donor), source_start, target_start, length)]
    assert_matches_naive(move, fresh, 2, rotation_of(8), device)
    assert_matches_naive(move, rows(fresh, 0, 2), 0, rotation_of(8), device)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "rotary_dim"),
    [(1, 8, 8), (3, 64, 64), (2, 80, 80), (1, 80, 32), (8, 128, 128), (2, 256, 256)],
)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_widths_and_dtypes(
    kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    donor = contiguous(1, 6, kv_heads, head_dim, dtype)
    fresh = contiguous(2, 9, kv_heads, head_dim, dtype)
    spans = [Move(donor, 1, 4, 5)]
    assert_matches_naive(spans, paged(fresh), 1, rotation_of(rotary_dim, interleaved), device, TOLERANCE[dtype])


@pytest.mark.parametrize("interleaved", [False, True])
def test_of_a_latent_row_there_is_one_deviation(interleaved: bool, device: str) -> None:
    donor, fresh = (contiguous(seed, 9, 1, 40, kinds=1) for seed in (1, 2))
    rotation = rotation_of(8, interleaved, first_channel=32)
    assert assert_matches_naive([Move(donor, 1, 2, 7)], paged(fresh), 1, rotation, device).shape == (1, 7)
    assert_matches_naive([Move(paged(donor), 1, 2, 7)], rows(fresh, 1, 1), 1, rotation, device)


def test_spans_of_several_donors_follow_one_another(device: str) -> None:
    donors = [contiguous(seed, 12) for seed in range(3)]
    fresh = contiguous(7)
    spans = [
        Move(donors[0], 4, 11, 5),
        Move(paged(donors[1]), 8, 0, 2),
        Move(donors[2], 3, 3, 0),
        Move(donors[2], 3, 3, 7),
    ]
    together = assert_matches_naive(spans, paged(fresh), 1, rotation_of(8), device)
    apart = [naive.deviation([span], paged(fresh), 1, rotation_of(8)) for span in spans]
    torch.testing.assert_close(together, torch.cat(apart, dim=1), rtol=1e-5, atol=1e-6)


def test_fp8(device: str) -> None:
    donor, fresh = (contiguous(seed, dtype=torch.float8_e4m3fn) for seed in (1, 2))
    assert_matches_naive([Move(paged(donor), 1, 6, 9)], paged(fresh), 1, rotation_of(8), device, 1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_moved_donor_does_not_deviate(dtype: torch.dtype, device: str) -> None:
    donor = contiguous(1, dtype=dtype)
    fresh = ContiguousKv(torch.zeros_like(donor.tensor))
    kv_move([Move(donor, 2, 7, 9), Move(donor, 0, 0, 3)], fresh, rotation_of(8))
    spans = [Move(donor, 2, 7, 9), Move(donor, 0, 0, 3)]
    placed = [Move(on(span.source, device), span.source_start, span.target_start, span.length) for span in spans]
    result = deviation(placed, on(fresh, device), 1, rotation_of(8)).cpu()
    assert float(result[0].max()) <= TOLERANCE[dtype]
    assert torch.equal(result[1], torch.zeros(12))
    assert torch.equal(result[0, 9:], torch.zeros(3))


def test_the_figure_is_that_of_the_formula(device: str) -> None:
    donor, fresh = contiguous(1), contiguous(2)
    result = deviation([Move(on(donor, device), 2, 5, 6)], on(fresh, device), 1, rotation_of(8)).cpu()
    keys = rotate_keys(donor.tensor[1, 0, :, 2:8], 3, rotation_of(8))
    expected = (fresh.tensor[1, 0, :, 5:11] - keys).norm(dim=(0, 2)) / keys.norm(dim=(0, 2))
    torch.testing.assert_close(result[0], expected, rtol=1e-5, atol=1e-6)


def test_zero_rows(device: str) -> None:
    zero, fresh = ContiguousKv(torch.zeros(3, 2, 2, 4, 8)), contiguous(2, 4)
    spans = [Move(on(zero, device), 0, 0, 4)]
    assert bool((deviation(spans, on(zero, device), 0, rotation_of(8)) == 0).all())
    assert bool(deviation(spans, on(fresh, device), 0, rotation_of(8)).isinf().all())


def test_no_spans_and_empty_spans(device: str) -> None:
    fresh = on(contiguous(2), device)
    assert deviation([], fresh, 0, rotation_of(8)).shape == (2, 0)
    assert deviation([Move(fresh, 0, 3, 0)], fresh, 0, rotation_of(8)).shape == (2, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: only a CUDA device compiles")
def test_no_plan_compiles_the_kernel_again() -> None:
    from kernels.deviation import triton_deviation

    fresh = on(contiguous(2, head_dim=64), "cuda")
    donors = [on(contiguous(seed, tokens, head_dim=64), "cuda") for seed, tokens in enumerate((1, 9, 16, 20))]

    def variants() -> int:
        return len(triton_deviation.deviation_kernel.device_caches[torch.cuda.current_device()][0])

    deviation([Move(donors[3], 0, 0, 16)], fresh, 1, rotation_of(64))
    compiled = variants()
    for layer, spans in (
        (0, [Move(donors[0], 0, 5, 1)]),
        (2, [Move(donors[3], 7, 0, 13)]),
        (1, [Move(donors[1], 0, 0, 9), Move(donors[2], 0, 9, 1)]),
    ):
        deviation(spans, fresh, layer, rotation_of(64))
    assert variants() == compiled


@pytest.mark.parametrize(
    ("span", "fresh", "layer", "message"),
    [
        (Move(contiguous(1), 14, 0, 8), contiguous(2), 0, r"spans\[0\].source from source_start 14 with length 8"),
        (Move(contiguous(1), 0, 14, 8), contiguous(2), 0, r"fresh of spans\[0\] .* 14 with length 8 leaves 0\.\.21"),
        (Move(contiguous(1), 0, 1, 8), rows(contiguous(2), 0, 2), 0, r"fresh of spans\[0\] .* -1"),
        (Move(contiguous(1), 0, 0, 8), contiguous(2), 3, r"layer is 3, outside 0\.\.2"),
        (Move(contiguous(1), 0, 0, 8), rows(contiguous(2), 0, 0), -1, r"layer is -1"),
        (Move(contiguous(1), 0, 0, 8), contiguous(2, kv_heads=3), 0, r"spans\[0\].source has .* the fresh KV has"),
        (Move(contiguous(1), 0, 0, 8), contiguous(2, dtype=torch.float16), 0, r"spans\[0\].source is torch.float32"),
        (Move(contiguous(1), 0, 0, 8), contiguous(2, head_dim=4), 0, "fresh has head_dim 4, below the rotary_dim 8"),
        (Move(contiguous(1), 0, 0, 8), FreshRows(torch.zeros(8, 2, 8), torch.zeros(8, 2, 4)), 0, "fresh.v has shape"),
        (Move(contiguous(1), 0, 0, 8), FreshRows(torch.zeros(8, 16), None), 0, "fresh.k has shape"),
        (Move(contiguous(1), 0, 0, 8), FreshRows(torch.zeros(8, 2, 8).char(), None), 0, "fresh.k is torch.int8"),
        (
            Move(contiguous(1), 0, 0, 8),
            FreshRows(torch.zeros(8, 2, 8), torch.zeros(8, 2, 8).half()),
            0,
            "fresh.v is torch.float16",
        ),
    ],
)
def test_bad_input_is_refused(span: Move, fresh: Fresh, layer: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deviation([span], fresh, layer, rotation_of(8))
