"""sparse_prefill, write_rows and attention_mass, in torch and in Triton, against their plain forms; what no query may
read is NaN. In the plan of a launch every packed row is in one tile, and every token that it sees in one item."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import naive
from kernels.attention_mass import attention_mass
from kernels.layout import PoolLayer
from kernels.sparse_prefill import Queries, sparse_prefill, write_rows
from kernels.sparse_prefill.tiles import TileConfig, attention_work, cut_rows, longest_part
from tests.kernels import builders
from tests.kernels.builders import FP8, TOLERANCE, WIDTHS, Batch, assert_same, geometry_of, rows_at, seeded

SCALE = 0.3
SMALL = TileConfig(16, 16, 4, 2)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: needs a CUDA device")


def assert_matches_naive(device, batch, window=None, sinks=None):
    """Attention, with and without its log-sum-exp, and how much of it each token gets."""
    q, pool, sequences = batch.on(device)
    kv, own = PoolLayer(pool, 1, batch.geometry), None if sinks is None else sinks.to(device)
    lse = torch.full(q.shape[:2], math.nan)
    filled, expected = lse.to(device, copy=True), plain(batch, window, sinks, lse)
    assert not expected.isnan().any()
    for each in (None, filled):
        attended = sparse_prefill(q, kv, sequences, SCALE, window, own, each)
        assert attended.dtype == q.dtype
        assert_same(attended, expected)
    assert_same(filled, lse, q.dtype)
    mass = attention_mass(q, kv, sequences, SCALE, lse.to(device), window)
    held = PoolLayer(batch.pool, 1, batch.geometry)
    assert_same(mass, naive.attention_mass(batch.q, held, batch.sequences, SCALE, lse, window), q.dtype)
    if sinks is None:
        torch.testing.assert_close(mass.sum().cpu(), torch.tensor(float(lse.numel())), rtol=1e-2, atol=0)
    assert torch.equal(pool.cpu().view(torch.uint8), batch.pool.view(torch.uint8))


def plain(batch, window=None, sinks=None, lse=None):
    kv = PoolLayer(batch.pool, 1, batch.geometry)
    return naive.sparse_prefill(batch.q, kv, batch.sequences, SCALE, window, sinks, lse)


def tiled(device, batch, config=None, piece=None, window=None, sinks=None, lse=None):
    """By the Triton kernels, with a tile and a piece of KV of one's own."""
    from kernels.sparse_prefill import triton_attention

    q, pool, sequences = batch.on(device)
    kv, sinks = PoolLayer(pool, 1, batch.geometry), None if sinks is None else sinks.to(device)
    asked = Queries(q, kv, sequences, SCALE, window, sinks, lse)
    return triton_attention.sparse_prefill(asked, config, piece).cpu()


@pytest.mark.parametrize(("window", "kv_dtype"), [(None, None), (33, FP8)])
@pytest.mark.parametrize(("head_dim", "block_size", "heads", "kv_heads", "dtype"), WIDTHS)
def test_widths_blocks_groups_and_dtypes(device, head_dim, block_size, heads, kv_heads, dtype, window, kv_dtype):
    """As near to naive as the queries' dtype allows: KV in fp8 is read as the numbers that it holds."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    positions = [[*range(50, 63), 70, 71], [9], [2 * block_size], list(range(7))]
    batch = Batch(positions, dtype=dtype, window=window, kv_dtype=kv_dtype, **sizes)
    assert_matches_naive(device, batch, window, None if window is None else seeded(heads, seed=4, dtype=dtype))


@pytest.mark.promise(
    "engines", "With windows and sinks attention is that of the plain formula, and KV that no row sees is not read"
)
@pytest.mark.promise("engines", "In the embedded engine KV in...")
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    positions=st.lists(st.sets(st.integers(0, 60), min_size=1, max_size=9).map(sorted), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    block_size=st.integers(1, 5),
    window=st.none() | st.integers(1, 70),
    with_sinks=st.booleans(),
    dtype=st.sampled_from([*TOLERANCE]),
    kv_dtype=st.sampled_from([None, FP8]),
)
def test_any_positions_and_any_window_match_naive(
    device, positions, kv_heads, block_size, window, with_sinks, dtype, kv_dtype
):
    sizes = {"heads": 2 * kv_heads, "kv_heads": kv_heads, "head_dim": 8, "block_size": block_size}
    batch = Batch(positions, dtype=dtype, window=window, kv_dtype=kv_dtype, **sizes)
    assert_matches_naive(device, batch, window, seeded(2 * kv_heads, seed=4) if with_sinks else None)


@pytest.mark.parametrize("sink", [-math.inf, -1e4, 0.0, 30.0])
def test_sinks_far_from_all_scores(device, sink):
    assert_matches_naive(device, Batch([list(range(9)), [2, 30]]), sinks=torch.full((4,), sink))


@pytest.mark.parametrize("device", ["torch"], indirect=True)
@pytest.mark.parametrize("scores", [1, 4 * 31 * 7])
def test_chunks_of_rows_join(device, scores, monkeypatch):
    monkeypatch.setattr("kernels.sparse_prefill.SINK_SCORES", scores)
    monkeypatch.setattr("kernels.attention_mass.MASS_ROWS", 7)
    assert_matches_naive(device, Batch([[*range(20), 30], [5]]), sinks=seeded(4, seed=4))


def test_no_rows_return_at_once():
    geometry = geometry_of()
    pool = torch.full((3, 2, 2, geometry.row_elements), math.nan)
    nothing = torch.empty(0, 2, 8)
    write_rows(nothing, nothing, PoolLayer(pool, 0, geometry), [])
    assert bool(pool.isnan().all())
    assert sparse_prefill(torch.empty(0, 4, 8), PoolLayer(pool, 0, geometry), [], 1.0).shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("first_row", "positions", "block_ids", "message"),
    [
        (-1, [0], [0], "first_row is -1"),
        (0, [1, 1], [0], "rise strictly"),
        (0, [-1, 1], [0], "positions start at -1"),
        (0, [0], [3, -2], "block_ids at -2"),
        (0, [], [0], "positions is .* at least one"),
        (0, [0], [], "block_ids is .* at least one"),
        (0, [0.5], [0], "positions is torch.float32"),
    ],
)
def test_bad_rows_are_refused(first_row, positions, block_ids, message):
    with pytest.raises(ValueError, match=message):
        rows_at(first_row, positions, block_ids)


@pytest.mark.parametrize(
    ("layer", "sequences", "shape", "dtype", "message"),
    [
        (2, [rows_at(0, [0, 1], [0])], (2, 2, 8), torch.float32, r"layer is 2, outside 0\.\.1"),
        (0, [rows_at(0, [0, 4], [0])], (2, 2, 8), torch.float32, r"positions reach 4; its blocks hold 0\.\.3"),
        (0, [rows_at(0, [0, 1], [3])], (2, 2, 8), torch.float32, r"block_ids reach 3, outside 0\.\.2"),
        (0, [rows_at(1, [0, 1], [0])], (2, 2, 8), torch.float32, r"first_row is 1; 0 is the next free row"),
        (0, [rows_at(0, [0, 1], [0])], (3, 2, 8), torch.float32, r"\[2, 2, 8\] is needed"),
        (0, [rows_at(0, [0, 1], [0])], (2, 2, 8), torch.float16, "the pool is torch.float32"),
        (0, [rows_at(0, [0, 1], [0])], (2, 2, 8), FP8, "the pool is torch.float32"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(layer, sequences, shape, dtype, message):
    geometry = geometry_of()
    pool = torch.full((3, 2, 2, geometry.row_elements), math.nan)
    rows = torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        write_rows(rows, rows, PoolLayer(pool, layer, geometry), sequences)
    assert bool(pool.isnan().all())
    with pytest.raises(ValueError, match=message):
        sparse_prefill(rows, PoolLayer(pool, layer, geometry), sequences, 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "a multiple of 2 heads"),
        *(({"scale": bad}, r"scale is .*; it must be finite and above 0") for bad in (0.0, -0.1, math.inf, math.nan)),
        ({"kinds": 1}, "kv_factor is 1"),
        ({"window": 0}, "window is 0; it must be at least 1 token"),
        ({"window": 4, "sinks": torch.zeros(3)}, r"sinks is torch.float32 of shape \[3\] .* floats of shape \[2\]"),
        ({"sinks": torch.zeros(2, dtype=torch.int64)}, "sinks is torch.int64"),
        ({"sinks": torch.zeros(2, device="meta")}, "sinks is .* on meta"),
        ({"lse": torch.zeros(2, 1)}, r"lse is torch.float32 of shape \[2, 1\] .* float32 of shape \[1, 2\]"),
    ],
)
def test_what_attention_cannot_run_with_is_refused(changes, message):
    asked = {"heads": 2, "scale": 1.0, "kinds": 2, "window": None, "sinks": None, "lse": None} | changes
    geometry = geometry_of(kv_factor=asked["kinds"])
    kv = PoolLayer(torch.zeros(3, 2, asked["kinds"], geometry.row_elements), 0, geometry)
    queries = torch.zeros(1, asked["heads"], 8)
    with pytest.raises(ValueError, match=message):
        sparse_prefill(
            queries, kv, [rows_at(0, [0], [0])], *(asked[each] for each in ("scale", "window", "sinks", "lse"))
        )


@pytest.mark.parametrize(
    ("heads", "block_size", "block_m", "block_n", "piece"),
    [(2, 16, 16, 16, 16), (6, 16, 128, 16, 48), (3, 16, 32, 64, None), (3, 64, 16, 32, None), (2, 24, 64, 64, 64)],
)
@pytest.mark.parametrize(("window", "with_sinks"), [(None, True), (5, False), (70, True)])
def test_tiles_of_any_size_and_their_pieces(
    triton_device, heads, block_size, block_m, block_n, piece, window, with_sinks
):
    positions = [[0, 15, 16, 90], [*range(50, 67)], list(range(5))]
    batch = Batch(positions, heads=heads, kv_heads=1, block_size=block_size, dtype=torch.float16, window=window)
    sinks = 2 * seeded(heads, seed=4) if with_sinks else None
    expected_lse = torch.full(batch.q.shape[:2], math.nan)
    lse = expected_lse.to(triton_device, copy=True)
    actual = tiled(triton_device, batch, TileConfig(block_m, block_n, 4, 2), piece, window, sinks, lse)
    assert_same(actual, plain(batch, window, sinks, expected_lse))
    assert_same(lse, expected_lse, batch.q.dtype)


@pytest.mark.parametrize("piece", [None, 32])
def test_large_scores_do_not_overflow(triton_device, piece):
    batch = Batch([[0, 40, 77]])
    batch.q *= 300
    # Scores of several hundred leave exponents of about four digits.
    assert builders.error_of(tiled(triton_device, batch, SMALL, piece), plain(batch)) <= 1e-3


def test_rows_of_a_fused_projection_are_read_and_written_in_place(triton_device):
    batch = Batch([list(range(9)), [3, 20]])
    _, pool, sequences = batch.on(triton_device)
    fused, expected = seeded(11, 8, 16, seed=8), batch.pool.clone()
    q, k, v = fused.to(triton_device).split([4, 2, 2], dim=1)
    write_rows(k, v, PoolLayer(pool, 0, batch.geometry), sequences)
    naive.write_rows(fused[:, 4:6], fused[:, 6:], PoolLayer(expected, 0, batch.geometry), batch.sequences)
    torch.testing.assert_close(pool.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    attended = naive.sparse_prefill(fused[:, :4], PoolLayer(expected, 0, batch.geometry), batch.sequences, SCALE)
    # Heads before rows in memory, as a model's attention hands its queries over.
    for queries in (q, q.transpose(0, 1).contiguous().transpose(0, 1)):
        assert_same(sparse_prefill(queries, PoolLayer(pool, 0, batch.geometry), sequences, SCALE), attended)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("tile", [(16, 16), (32, 64)])
def test_tiles_of_tokens_that_all_some_or_none_of_the_rows_see(triton_device, monkeypatch, tile, window):
    monkeypatch.setattr("kernels.attention_mass.triton_mass.EXACT", TileConfig(*tile, 4, 2))
    assert_matches_naive(triton_device, Batch([list(range(60, 80)), [2], [30, 99]], window=window), window)


def test_attention_of_layers_adds_up(device):
    batch = Batch([[3, 9], [5]])
    q, pool, sequences = batch.on(device)
    lse = torch.ones(3, 4, device=device)
    first, second = (attention_mass(q, PoolLayer(pool, at, batch.geometry), sequences, SCALE, lse) for at in (0, 1))
    both = attention_mass(q, PoolLayer(pool, 1, batch.geometry), sequences, SCALE, lse, into=first.clone())
    torch.testing.assert_close(both, first + second)
    assert attention_mass(q[:0], PoolLayer(pool, 0, batch.geometry), [], SCALE, lse[:0]).shape == (2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 16)}, r"q has shape \[2, 3, 16\]"),
        ({"lse": torch.zeros(2, 3)}, r"lse is .* \[2, 3\]"),
        ({"lse": torch.zeros(2, 4, dtype=torch.float64)}, "lse is torch.float64"),
        ({"lse": torch.zeros(4, 2).T}, "lse is .*; contiguous"),
        ({"into": torch.zeros(2, 9)}, r"into is .* \[2, 9\]"),
    ],
)
def test_what_attention_cannot_be_summed_of_is_refused(change, message):
    batch = Batch([[3, 9]])
    given = {"q": batch.q, "scale": SCALE, "lse": torch.zeros(2, 4)} | change
    with pytest.raises(ValueError, match=message):
        attention_mass(kv=PoolLayer(batch.pool, 0, batch.geometry), sequences=batch.sequences, **given)


def batch_of(*positions):
    first_rows = [sum(map(len, positions[:at])) for at in range(len(positions))]
    return tuple(rows_at(first, own, range(own[-1] // 4 + 1)) for first, own in zip(first_rows, positions, strict=True))


@settings(max_examples=60)
@given(
    positions=st.lists(st.sets(st.integers(0, 600), min_size=1, max_size=40).map(sorted), min_size=1, max_size=4),
    group=st.integers(1, 8),
    piece=st.sampled_from([None, 16, 64, 512]),
    window=st.one_of(st.none(), st.integers(1, 400)),
    processors=st.sampled_from([1, 4, 132]),
)
def test_every_row_and_every_token_that_it_sees_is_covered_once(positions, group, piece, window, processors):
    sequences = batch_of(*positions)
    work = attention_work(sequences, group, 2, SMALL, processors, piece, window)
    covered, slots = Counter(), {}
    for first_row, begin, end, first_block, kv_begin, kv_end, slot in work.items.tolist():
        (index,) = (index for index, own in enumerate(sequences) if own.first_row == first_row)
        assert first_block == sum(own.block_ids.shape[0] for own in sequences[:index])
        assert (0 < end - begin <= 16, kv_begin % 16) == (True, 0)
        covered.update((index, row, token) for row in range(begin, end) for token in range(kv_begin, kv_end))
        if slot >= 0:
            slots[slot] = (first_row, begin, end)
    assert set(covered.values()) == {1}
    for index, own in enumerate(positions):
        for row in range(len(own) * group):
            last = own[row // group]
            first = 0 if window is None else max(0, last - window + 1)
            assert all((index, row, token) in covered for token in range(first, last + 1))
    joined = {slot: tile for *tile, first, count in work.tiles.tolist() for slot in range(first, first + count)}
    assert {slot: tuple(tile) for slot, tile in joined.items()} == slots
    assert sorted(slots) == list(range(work.slots))


@pytest.mark.promise("engines", "With windows and sinks attention is...")
def test_rows_whose_windows_leave_out_tokens_share_no_tile():
    sequences = batch_of([0, 1, 2, 10, 14, 15, 90, 94], [7])
    table, begins, ends = cut_rows(sequences, 2, 64, 8)
    assert table[:, 1:3].tolist() == [[0, 12], [12, 16], [0, 2]]
    assert (begins.tolist(), ends.tolist()) == ([0, 83, 0], [16, 95, 8])
    assert (longest_part(sequences, 8), longest_part(sequences, None)) == (6, 8)


@pytest.mark.parametrize("piece", [0, -16, 24])
def test_pieces_are_whole_tiles(piece):
    with pytest.raises(ValueError, match="it must be a multiple of block_n, 16"):
        attention_work(batch_of([5]), 1, 1, SMALL, 4, piece)


@needs_cuda
def test_other_lengths_rows_layers_and_blocks_compile_nothing():
    from kernels.sparse_prefill import triton_attention

    kernels = (triton_attention.attention_kernel, triton_attention.join_kernel, triton_attention.write_kernel)
    counts = []
    for layer, positions in enumerate(([range(100)], [[0]], [[255, 256]], [range(333)], [[1], [5, 64], [70]])):
        for piece in (64, 1024):
            batch = Batch([*map(list, positions), list(range(500, 517))], head_dim=64, dtype=torch.bfloat16)
            q, pool, sequences = batch.on("cuda")
            kv = PoolLayer(pool, layer % 2, batch.geometry)
            write_rows(q[:, :2], q[:, 2:], kv, sequences)
            triton_attention.sparse_prefill(Queries(q, kv, sequences, 0.125), TileConfig(64, 64, 4, 2), piece)
        counts.append([len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels])
    assert counts == counts[:1] * 5
