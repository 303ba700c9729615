"""What only the Triton kernels have: tile sizes, pieces of KV that are joined, and kernels that serve every length."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.layout import KvGeometry, pool_view
from kernels.sparse_prefill import SequenceRows, naive
from kernels.sparse_prefill.tiles import TileConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
BLOCKS = 40
SCALE = 0.3
SMALL = TileConfig(16, 16, 4, 2)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: needs a CUDA device")


class Batch:
    """Rows of several sequences over a pool on the host; slots beyond each sequence's last row are NaN."""

    def __init__(
        self,
        positions: Sequence[Sequence[int]],
        *,
        head_dim: int = 16,
        group: int = 2,
        kv_heads: int = 2,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        num_blocks: int = BLOCKS,
    ) -> None:
        self.geometry = KvGeometry(num_layers=2, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
        generator = torch.Generator().manual_seed(3)
        free = torch.randperm(num_blocks, generator=generator)
        self.pool = torch.full((num_blocks, 2, 2, self.geometry.row_elements), math.nan, dtype=dtype)
        view = pool_view(self.pool, self.geometry)
        self.sequences: list[SequenceRows] = []
        rows = 0
        for own in positions:
            needed = self.geometry.blocks_for(own[-1] + 1)
            blocks, free = free[:needed], free[needed:]
            reached = torch.arange(own[-1] + 1)
            kv = torch.randn(len(reached), 2, 2, kv_heads, head_dim, generator=generator).to(dtype)
            view[blocks[reached // block_size], :, :, :, reached % block_size] = kv
            self.sequences.append(SequenceRows(rows, torch.tensor(own), blocks))
            rows += len(own)
        self.q = torch.randn(rows, group * kv_heads, head_dim, generator=generator).to(dtype)

    def naive(self) -> torch.Tensor:
        return naive.sparse_prefill(self.q, self.pool, 1, self.sequences, self.geometry, SCALE)

    def on(self, device: str) -> list[SequenceRows]:
        return [sequence.to(device) for sequence in self.sequences]

    def triton(self, device: str, config: TileConfig | None = None, piece: int | None = None) -> torch.Tensor:
        from kernels.sparse_prefill import triton_attention

        pool = self.pool.to(device)
        return triton_attention.sparse_prefill(
            self.q.to(device), pool, 1, self.on(device), self.geometry, SCALE, config, piece
        ).cpu()


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_widths_and_groups(triton_device: str, head_dim: int, group: int, dtype: torch.dtype) -> None:
    batch = Batch([[0, 17, 31, 33, 60], [32], [40, 41]], head_dim=head_dim, group=group, kv_heads=1, dtype=dtype)
    assert error(batch.triton(triton_device), batch.naive()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_lengths_around_a_block(triton_device: str, block_size: int, extra: int) -> None:
    end = block_size + extra
    batch = Batch([[end - 1], list(range(end - 5, end)), [0, end - 1]], block_size=block_size, dtype=torch.bfloat16)
    assert error(batch.triton(triton_device), batch.naive()) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("block_n", [16, 32, 64])
@pytest.mark.parametrize("block_size", [16, 32, 64, 24])
def test_tiles_of_several_blocks_and_of_parts_of_one(triton_device: str, block_size: int, block_n: int) -> None:
    batch = Batch([[3, 50, 51, 99]], block_size=block_size, dtype=torch.float16)
    actual = batch.triton(triton_device, TileConfig(16, block_n, 4, 2))
    assert error(actual, batch.naive()) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("piece", [16, 32, 48, 256])
@pytest.mark.parametrize("group", [1, 3])
def test_pieces_are_joined(triton_device: str, group: int, piece: int) -> None:
    batch = Batch([[0, 15, 16, 90], [100], list(range(20))], group=group)
    assert error(batch.triton(triton_device, SMALL, piece), batch.naive()) <= TOLERANCE[torch.float32]


def test_more_pieces_than_are_joined_at_a_time(triton_device: str) -> None:
    batch = Batch([[37, 350]], group=1, kv_heads=1)
    assert error(batch.triton(triton_device, SMALL, 16), batch.naive()) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("piece", [None, 32])
def test_large_scores_do_not_overflow(triton_device: str, piece: int | None) -> None:
    batch = Batch([[0, 40, 77]])
    batch.q *= 300
    # Scores of several hundred leave exponents of about four digits.
    assert error(batch.triton(triton_device, SMALL, piece), batch.naive()) <= 1e-3


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
def test_tile_heights(triton_device: str, block_m: int) -> None:
    batch = Batch([list(range(0, 90, 2)), [5]], group=3, kv_heads=1, dtype=torch.float16)
    actual = batch.triton(triton_device, TileConfig(block_m, 32, 4, 2))
    assert error(actual, batch.naive()) <= TOLERANCE[torch.float16]


def test_rows_of_a_fused_projection_are_read_and_written_in_place(triton_device: str) -> None:
    from kernels.sparse_prefill import triton_attention

    batch = Batch([list(range(9)), [3, 20]], group=2, kv_heads=2)
    sequences, pool = batch.on(triton_device), batch.pool.to(triton_device, copy=True)
    fused = torch.randn(11, 8, 16, generator=torch.Generator().manual_seed(8))
    q, k, v = fused.to(triton_device).split([4, 2, 2], dim=1)
    triton_attention.write_rows(k, v, pool, 0, sequences, batch.geometry)
    expected = batch.pool.clone()
    naive.write_rows(fused[:, 4:6], fused[:, 6:], expected, 0, batch.sequences, batch.geometry)
    torch.testing.assert_close(pool.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    attended = naive.sparse_prefill(fused[:, :4], expected, 0, batch.sequences, batch.geometry, SCALE)
    # Heads before rows in memory, as a model's attention hands its queries over.
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    for queries in (q, turned):
        actual = triton_attention.sparse_prefill(queries, pool, 0, sequences, batch.geometry, SCALE)
        assert error(actual.cpu(), attended) <= TOLERANCE[torch.float32]


def test_a_pool_with_gaps_between_its_blocks(triton_device: str) -> None:
    from kernels.sparse_prefill import triton_attention

    batch = Batch([[4, 30]])
    wide = torch.full((BLOCKS, 5, 2, batch.geometry.row_elements), math.nan)
    wide[:, 3:] = batch.pool
    actual = triton_attention.sparse_prefill(
        batch.q.to(triton_device), wide.to(triton_device)[:, 3:], 1, batch.on(triton_device), batch.geometry, SCALE
    )
    assert error(actual.cpu(), batch.naive()) <= TOLERANCE[torch.float32]


@needs_cuda
@pytest.mark.parametrize("positions", ["dense", "suffix", "scattered", "last"])
@pytest.mark.parametrize(("head_dim", "group", "kv_heads"), [(64, 1, 8), (80, 4, 2), (128, 7, 4), (256, 2, 4)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_thousands_of_tokens(head_dim: int, group: int, kv_heads: int, positions: str, dtype: torch.dtype) -> None:
    tokens = 2999
    generator = torch.Generator().manual_seed(5)
    own = {
        "dense": list(range(tokens)),
        "suffix": list(range(tokens - 128, tokens)),
        "scattered": sorted({*torch.randperm(tokens, generator=generator)[:300].tolist(), tokens - 1}),
        "last": [tokens - 1],
    }[positions]
    batch = Batch([own], head_dim=head_dim, group=group, kv_heads=kv_heads, block_size=32, dtype=dtype, num_blocks=100)
    view = pool_view(batch.pool.cuda(), batch.geometry)[batch.sequences[0].block_ids.cuda(), 1].double()
    # keys, values: [heads, tokens, head_dim]
    keys, values = (
        view[:, kind].transpose(0, 1).flatten(1, 2)[:, :tokens].repeat_interleave(group, 0) for kind in (0, 1)
    )
    queries = batch.q.cuda().double().transpose(0, 1)
    mask = torch.arange(tokens, device="cuda") <= torch.tensor(own, device="cuda")[:, None]
    scores = (queries @ keys.transpose(1, 2) * SCALE).masked_fill(~mask, -math.inf)
    expected = (scores.softmax(-1) @ values).transpose(0, 1).cpu()
    assert error(batch.triton("cuda"), expected) <= TOLERANCE[dtype]


@needs_cuda
def test_other_lengths_rows_layers_and_blocks_compile_nothing() -> None:
    from kernels.sparse_prefill import triton_attention

    def compiled() -> list[int]:
        kernels = (triton_attention.attention_kernel, triton_attention.join_kernel, triton_attention.write_kernel)
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    geometry = KvGeometry(num_layers=17, kv_heads=2, head_dim=64, block_size=32)
    pool = torch.randn(64, 17, 2, geometry.row_elements, device="cuda", dtype=torch.bfloat16)

    def run(positions: list[list[int]], layer: int, piece: int) -> None:
        first_rows = [sum(len(own) for own in positions[:index]) for index in range(len(positions))]
        sequences = [
            SequenceRows(first, torch.tensor(own), torch.arange(index, index + geometry.blocks_for(own[-1] + 1)))
            for index, (first, own) in enumerate(zip(first_rows, positions, strict=True))
        ]
        moved = [sequence.to("cuda") for sequence in sequences]
        q = torch.randn(sum(map(len, positions)), 4, 64, device="cuda", dtype=torch.bfloat16)
        triton_attention.write_rows(q[:, :2], q[:, 2:], pool, layer, moved, geometry)
        config = TileConfig(64, 64, 4, 2)
        triton_attention.sparse_prefill(q, pool, layer, moved, geometry, 0.125, config, piece)

    run([list(range(100))], 3, 64)
    run([list(range(100))], 3, 1024)
    before = compiled()
    for layer, positions in enumerate(([[0]], [[16]], [[255, 256]], [list(range(333))], [[1], [5, 64], [70]])):
        run(positions, layer, 1024)
        run([*positions, list(range(500, 517))], 16 - layer, 64)
    assert compiled() == before


@needs_cuda
def test_a_captured_launch_follows_positions_and_blocks() -> None:
    """Positions and blocks of a single sequence are read from its own tensors when the graph is replayed."""
    from kernels.sparse_prefill import triton_attention

    batch = Batch([[77, 90, 140]], block_size=32, dtype=torch.bfloat16)
    (longest,) = batch.on("cuda")
    q, pool = batch.q.cuda(), batch.pool.cuda()
    arguments = (q, pool, 1, (longest,), batch.geometry, SCALE, TileConfig(16, 16, 4, 2), 32)
    triton_attention.sparse_prefill(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = triton_attention.sparse_prefill(*arguments)
    graph.replay()
    assert error(output.cpu(), batch.naive()) <= TOLERANCE[torch.bfloat16]
    earlier = [5, 31, 63]
    longest.positions.copy_(torch.tensor(earlier))
    batch.sequences = [SequenceRows(0, torch.tensor(earlier), batch.sequences[0].block_ids)]
    graph.replay()
    assert error(output.cpu(), batch.naive()) <= TOLERANCE[torch.bfloat16]
