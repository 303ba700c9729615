"""deviation against its plain form; the rest of the pools is NaN, so a row that is wrongly read shows."""

from dataclasses import replace

import pytest
import torch

from kernels import naive
from kernels.deviation import FreshRows, Move, deviation, relative, squares
from kernels.kv_move import kv_move
from kernels.layout import ContiguousKv
from kernels.rope import still
from tests.kernels import builders
from tests.kernels.builders import BLOCK, FP8, TOLERANCE, donor_of, error_of, fresh_rows, geometry_of, on, paged

ROTATION = builders.rotation_of()


def kv_of(seed, tokens=21, kv_heads=2, head_dim=8, dtype=torch.float32, kinds=2):
    return donor_of(geometry_of(kv_heads, head_dim, kv_factor=kinds, layers=3), tokens, seed, dtype)


def rows_of(*given, layer=1, **named):
    return fresh_rows(kv_of(*given, **named), layer)


def on_device(spans, device):
    return [replace(span, source=on(span.source, device)) for span in spans]


def assert_matches_naive(device, spans, fresh, layer=1, rotation=ROTATION, tolerance=1e-5):
    actual = deviation(on_device(spans, device), on(fresh, device), layer, rotation).cpu()
    expected = naive.deviation(spans, fresh, layer, rotation)
    assert (actual.dtype, actual.shape) == (torch.float32, expected.shape)
    assert not bool(expected.isnan().any())
    assert error_of(actual, expected) <= tolerance
    return actual


@pytest.mark.parametrize("kinds", [1, 2])
def test_squares_of_shared_heads_add_up_to_the_deviation_over_all(kinds, device):
    donor, fresh, parts = kv_of(seed=1, kv_heads=4, kinds=kinds), kv_of(seed=2, kv_heads=4, kinds=kinds), []
    fresh.tensor[:, 0, :, 7] = donor.tensor[:, 0, :, 4]  # with a shift of 0 below, nothing of K deviates there
    for heads in ((0, 1), (2, 3)):
        own, theirs = (ContiguousKv(kv.tensor[:, :, heads]) for kv in (donor, fresh))
        spans = [Move(on(own, device), 2, 5, 9, turn=0)]
        parts.append(squares(spans, on(fresh_rows(theirs, 1), device), 1, ROTATION).cpu())
    assert parts[0].shape == (2, kinds, 9)
    expected = naive.deviation([Move(donor, 2, 5, 9, turn=0)], fresh_rows(fresh, 1), 1, ROTATION)
    assert float(expected[0, 2]) == 0.0
    torch.testing.assert_close(relative(parts[0] + parts[1]), expected, rtol=1e-5, atol=0)
    assert squares([], on(rows_of(1), device), 1, ROTATION).shape == (2, 2, 0)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "rotary_dim", "block", "dtype", "interleaved"),
    [
        (4, 128, 128, 32, torch.bfloat16, False),
        (2, 64, 64, 64, torch.bfloat16, True),
        (2, 256, 256, BLOCK, torch.bfloat16, False),
        (2, 80, 80, BLOCK, torch.float32, True),
        (1, 80, 32, 3, torch.float16, False),
        (1, 8, 8, 1, torch.float32, False),
        (1, 80, 80, BLOCK, FP8, False),
        (3, 64, 64, 5, FP8, True),
    ],
)
def test_heads_widths_blocks_and_dtypes(kv_heads, head_dim, rotary_dim, block, dtype, interleaved, device):
    donor, fresh = kv_of(1, 6, kv_heads, head_dim, dtype), kv_of(2, 9, kv_heads, head_dim, dtype)
    rotation, tolerance = builders.rotation_of(rotary_dim, interleaved), TOLERANCE.get(dtype, 1e-2)
    for source, layer in ((donor, 0), (paged(donor, block), 1)):
        assert_matches_naive(device, [Move(source, 1, 4, 5)], fresh_rows(fresh, layer), layer, rotation, tolerance)


def test_spans_of_several_donors_follow_one_another(device):
    donors, fresh = [kv_of(seed, 12) for seed in range(3)], rows_of(7)
    places = [(4, 11, 5), (8, 0, 2), (3, 3, 0), (3, 3, 7)]
    sources = (donors[0], paged(donors[1]), donors[2], donors[2])
    assert_matches_naive(device, [Move(source, *place) for source, place in zip(sources, places, strict=True)], fresh)


@pytest.mark.parametrize("dtype", [*TOLERANCE, FP8])
def test_a_moved_donor_does_not_deviate(dtype, device):
    donor = kv_of(1, dtype=dtype)
    fresh = ContiguousKv(torch.zeros_like(donor.tensor))
    spans = [Move(paged(donor), 2, 7, 9), Move(donor, 0, 0, 3)]
    kv_move(spans, fresh, ROTATION)
    result = deviation(on_device(spans, device), on(fresh_rows(fresh, 1), device), 1, ROTATION).cpu()
    assert float(result[0].max()) <= TOLERANCE.get(dtype, 0.1)
    assert torch.equal(result[1], torch.zeros(12))
    assert torch.equal(result[0, 9:], torch.zeros(3))


def test_a_layer_without_rope_is_compared_as_it_is(device):
    donor, fresh = kv_of(1), kv_of(2)
    fresh.tensor[1, :, :, 9] = donor.tensor[1, :, :, 4]
    found = assert_matches_naive(device, [Move(donor, 2, 7, 5)], fresh_rows(fresh, 1), 1, still(8))
    assert found[:, 2].tolist() == [0.0, 0.0]
    assert bool((found[:, [0, 1, 3, 4]] > 0).all())


def test_zero_rows_and_no_rows(device):
    zero, fresh = ContiguousKv(torch.zeros(3, 2, 2, 4, 8)), on(rows_of(2, 4), device)
    spans = [Move(on(zero, device), 0, 0, 4)]
    assert bool((deviation(spans, on(fresh_rows(zero, 0), device), 0, ROTATION) == 0).all())
    assert bool(deviation(spans, fresh, 0, ROTATION).isinf().all())
    for nothing in ([], [replace(spans[0], target_start=3, length=0)]):
        assert deviation(nothing, fresh, 0, ROTATION).shape == (2, 0)


K = torch.zeros(8, 2, 8)


@pytest.mark.parametrize(
    ("place", "fresh", "layer", "message"),
    [
        ((14, 0), rows_of(2), 0, r"spans\[0\].source from source_start 14 with length 8"),
        ((0, 14), rows_of(2), 0, r"fresh of spans\[0\] .* 14 with length 8 leaves 0\.\.21"),
        ((0, -1), rows_of(2), 0, r"fresh of spans\[0\] .* -1"),
        ((0, 0), rows_of(2), 3, r"layer is 3, outside 0\.\.2"),
        ((0, 0), rows_of(2), -1, r"layer is -1"),
        ((0, 0), rows_of(2, kv_heads=3), 0, r"spans\[0\].source has .* the fresh KV has"),
        ((0, 0), rows_of(2, dtype=torch.float16), 0, r"spans\[0\].source is torch.float32"),
        ((0, 0), rows_of(2, head_dim=4), 0, "fresh has head_dim 4, below the rotary_dim 8"),
        ((0, 0), FreshRows(K, torch.zeros(8, 2, 4)), 0, "fresh.v has shape"),
        ((0, 0), FreshRows(torch.zeros(8, 16)), 0, "fresh.k has shape"),
        ((0, 0), FreshRows(K.char()), 0, "fresh.k is torch.int8"),
        ((0, 0), FreshRows(K, K.half()), 0, "fresh.v is torch.float16"),
    ],
)
def test_bad_input_is_refused(place, fresh, layer, message):
    with pytest.raises(ValueError, match=message):
        deviation([Move(kv_of(1), *place, 8)], fresh, layer, ROTATION)
