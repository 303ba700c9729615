"""Rows of a latent attention come back from the pool as Transformers' own cache holds them, and no other's are read."""

import pytest
import torch
from transformers import DynamicCache

from engine_wrapper.latent_cache import LatentCache, latent_attention, latent_rows
from engine_wrapper.sparse_forward import PagedAttention
from kernels.layout import KvGeometry, pool_view
from kernels.rope import saturated
from kernels.sparse_prefill import SequenceRows
from semblend_trt.errors import ConfigurationError
from tests.kernels.builders import FP8

FREE, TURNING, BLOCK, LAYERS = 12, 6, 4, 2
GEOMETRY = KvGeometry(LAYERS, 1, FREE + TURNING, BLOCK, kv_factor=1)


def parts(tokens, seed):
    rows = torch.randn(1, 1, tokens, FREE + TURNING, generator=torch.Generator().manual_seed(seed))
    return rows[..., :FREE], rows[..., FREE:]


def test_channels_that_turn_stand_in_pairs():
    free, turning = torch.zeros(1, 1, 1, 2), torch.tensor([0.0, 2.0, 4.0, 1.0, 3.0, 5.0]).view(1, 1, 1, 6)
    assert latent_rows(free, turning).flatten().tolist() == [0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_version_that_caches_every_head_is_refused():
    expanded = torch.zeros(1, 4, 8, 96)
    with pytest.raises(ConfigurationError, match="caches K and V of every head"):
        latent_rows(expanded, expanded)


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_what_comes_back_is_what_transformers_would_hold_of_each_sequence(dtype):
    """Two sequences, the first in two chunks; of no other block, and of what is not written, anything comes back. In
    e4m3 it is what the pool can hold."""
    pool = torch.full((8, LAYERS, 1, GEOMETRY.row_elements), float("nan")).to(dtype)
    watched = list[torch.Tensor]()
    first, second = parts(10, 1), parts(5, 2)
    first[0][0, 0, 3, 1] = 1e4 if dtype is FP8 else 1.0

    def held(part):
        return saturated(part, dtype).float()

    def watch(rows, values):
        assert values is None
        watched.append(rows)

    def update(*rows, chunk):
        write = PagedAttention(pool, GEOMETRY, rows, watch).write
        return LatentCache(pool, GEOMETRY, rows, write).update(chunk[0], chunk[1], 1)

    blocks = torch.tensor([5, 2, 7])
    begun = update(SequenceRows(0, torch.arange(6), blocks), chunk=[each[:, :, :6] for each in first])
    assert all(torch.equal(got, held(each[:, :, :6])) for got, each in zip(begun, first, strict=True))
    rest = SequenceRows(0, torch.arange(6, 10), blocks), SequenceRows(4, torch.arange(5), torch.tensor([1, 0]))
    chunk = [torch.cat([one[:, :, 6:], other], dim=2) for one, other in zip(first, second, strict=True)]
    found = update(*rest, chunk=chunk)
    expected = DynamicCache().update(*(torch.cat(each, dim=2) for each in zip(first, second, strict=True)), 0)
    assert all(got.dtype == torch.float32 for got in found)
    assert all(torch.equal(got, held(each)) for got, each in zip(found, expected, strict=True))
    assert torch.equal(watched[1][:, 0], latent_rows(*chunk)[0, 0])
    assert bool(pool_view(pool, GEOMETRY)[:, 0].float().isnan().all()), "rows of the other layer are left"


def test_rows_attend_to_their_own_sequence_up_to_themselves():
    generator = torch.Generator().manual_seed(3)
    sequences = (
        SequenceRows(0, torch.tensor([1, 4]), torch.tensor([0, 1])),
        SequenceRows(2, torch.tensor([2]), torch.tensor([2])),
    )
    query = torch.randn(1, 2, 3, 8, generator=generator)
    key, value = (torch.randn(1, 2, 5 + 3, size, generator=generator) for size in (8, 6))
    found = latent_attention(query, key, value, sequences, 0.3)
    assert found.shape == (1, 3, 2, 6)
    for row, (begin, end) in enumerate([(0, 2), (0, 5), (5, 8)]):
        scores = torch.einsum("hc,htc->ht", query[0, :, row], key[0, :, begin:end]) * 0.3
        expected = torch.einsum("ht,htc->hc", scores.softmax(-1), value[0, :, begin:end])
        torch.testing.assert_close(found[0, row], expected)
