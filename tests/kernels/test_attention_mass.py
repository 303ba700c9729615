"""attention_mass where test_sparse_prefill.py does not take it along: by tile and chunk, and what it refuses."""

import pytest
import torch

from kernels.attention_mass import attention_mass
from kernels.layout import PoolLayer
from kernels.sparse_prefill.tiles import TileConfig
from tests.kernels.builders import Batch
from tests.kernels.test_sparse_prefill import SCALE, assert_matches_naive


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
    none = attention_mass(q[:0], PoolLayer(pool, 0, batch.geometry), [], SCALE, lse[:0])
    assert none.shape == (2, 0)


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
