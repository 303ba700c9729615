"""attention_mass, in torch and in Triton, against its plain form; what no row may read is NaN."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.attention_mass import attention_mass, seen_tokens
from kernels.layout import PoolLayer
from kernels.sparse_prefill.tiles import TileConfig
from tests.kernels import builders, naive
from tests.kernels.builders import FP8, TOLERANCE, Batch, error_of, seeded

SCALE = 0.3


def lse_of(q, kv, sequences, window=None, sinks=None):
    lse = torch.full(q.shape[:2], float("nan"))
    naive.sparse_prefill(q, kv, sequences, SCALE, window, sinks, lse)
    return lse


def assert_matches_naive(device, batch, window=None, sinks=None):
    q, pool, sequences = batch.on(device)
    plain = batch.q, PoolLayer(batch.pool, 1, batch.geometry), batch.sequences
    lse = lse_of(*plain, window, sinks)
    mass = attention_mass(q, PoolLayer(pool, 1, batch.geometry), sequences, SCALE, lse.to(device), window)
    assert mass.shape == (batch.geometry.kv_heads, seen_tokens(sequences))
    assert not mass.isnan().any()
    # Triton multiplies 16-bit queries on tensor cores.
    assert error_of(mass, naive.attention_mass(*plain, SCALE, lse, window)) <= TOLERANCE[batch.q.dtype]
    if sinks is None:
        torch.testing.assert_close(mass.sum().cpu(), torch.tensor(float(q.shape[0] * q.shape[1])), rtol=1e-2, atol=0)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize(("head_dim", "block_size", "heads", "kv_heads", "dtype"), builders.WIDTHS)
def test_widths_blocks_groups_and_dtypes(device, head_dim, block_size, heads, kv_heads, dtype, kv_dtype):
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    positions = [[*range(50, 60), 90], [9], list(range(7))]
    assert_matches_naive(device, Batch(positions, dtype=dtype, kv_dtype=kv_dtype, **sizes))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    positions=st.lists(st.sets(st.integers(0, 40), min_size=1, max_size=9).map(sorted), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    block_size=st.integers(1, 5),
    window=st.none() | st.integers(1, 50),
    with_sinks=st.booleans(),
)
def test_any_positions_and_any_window_match_naive(device, positions, kv_heads, block_size, window, with_sinks):
    sizes = {"heads": 2 * kv_heads, "kv_heads": kv_heads, "head_dim": 8, "block_size": block_size}
    batch = Batch(positions, window=window, **sizes)
    assert_matches_naive(device, batch, window, seeded(2 * kv_heads, seed=4) if with_sinks else None)


@pytest.mark.parametrize("device", ["torch"], indirect=True)
def test_chunks_of_rows_join(device, monkeypatch):
    monkeypatch.setattr("kernels.sparse_prefill.by_torch.MASS_ROWS", 7)
    assert_matches_naive(device, Batch([[3, 40], list(range(30))]))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("tile", [(16, 16), (32, 64)])
def test_tiles_that_all_some_or_none_of_the_rows_see(triton_device, monkeypatch, tile, window):
    monkeypatch.setattr("kernels.attention_mass.triton_mass.EXACT", TileConfig(*tile, 4, 2))
    assert_matches_naive(triton_device, Batch([list(range(60, 80)), [2], [30, 99]], window=window), window)


def test_layers_add_up(device):
    batch = Batch([[3, 9], [5]])
    q, pool, sequences = batch.on(device)
    lse = torch.ones(3, 4, device=device)
    first, second = (attention_mass(q, PoolLayer(pool, at, batch.geometry), sequences, SCALE, lse) for at in (0, 1))
    both = attention_mass(q, PoolLayer(pool, 1, batch.geometry), sequences, SCALE, lse, into=first.clone())
    torch.testing.assert_close(both, first + second)


def test_no_rows_give_nothing():
    batch = Batch([[3]])
    kv = PoolLayer(batch.pool, 0, batch.geometry)
    assert attention_mass(batch.q[:0], kv, [], SCALE, torch.zeros(0, 4)).shape == (2, 0)


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
def test_bad_arguments_are_refused(change, message):
    batch = Batch([[3, 9]])
    given = {"q": batch.q, "scale": SCALE, "lse": torch.zeros(2, 4)} | change
    with pytest.raises(ValueError, match=message):
        attention_mass(kv=PoolLayer(batch.pool, 0, batch.geometry), sequences=batch.sequences, **given)
